"""The trainers whose formats are written and read, by name."""

from hexiopt.exports.formats import Trainer
from hexiopt.exports.trainers import (
    accelerate,
    deepspeed,
    flagscale,
    flashflex,
    galvatron,
    megatron,
    megatron_bridge,
    own,
    torchtitan,
)

OWN = own.TRAINER.name
_MODULES = (own, megatron, megatron_bridge, flagscale, torchtitan, flashflex, galvatron, deepspeed, accelerate)
TRAINERS: dict[str, Trainer] = {module.TRAINER.name: module.TRAINER for module in _MODULES}

"""The trainers whose formats are written and read, by name."""

from hexiopt.exports.formats import Trainer
from hexiopt.exports.trainers import (
    accelerate,
    deepspeed,
    device_map,
    executor,
    flagscale,
    flashflex,
    galvatron,
    megatron,
    megatron_bridge,
    torchtitan,
)

EXECUTOR = executor.TRAINER.name
_MODULES = (
    executor,
    megatron,
    megatron_bridge,
    flagscale,
    torchtitan,
    flashflex,
    galvatron,
    deepspeed,
    accelerate,
    device_map,
)
TRAINERS: dict[str, Trainer] = {module.TRAINER.name: module.TRAINER for module in _MODULES}

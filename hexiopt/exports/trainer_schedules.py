"""The pipeline schedules that trainers run, the first by preference, each with the trainer's word for it, if any."""

from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule

TRAINER_SCHEDULES: dict[str, dict[Schedule, str]] = {
    "accelerate": dict.fromkeys((ONE_F_ONE_B, GPIPE, INTERLEAVED), ""),  # with one stage all are the same
    "deepspeed": {ONE_F_ONE_B: ""},
    "device_map": dict.fromkeys((ONE_F_ONE_B, GPIPE, INTERLEAVED), ""),  # of which none runs
    "flagscale": {ONE_F_ONE_B: ""},
    "flashflex": {ONE_F_ONE_B: "1F1B", GPIPE: "Gpipe"},
    "galvatron": {ONE_F_ONE_B: "pipedream_flush", GPIPE: "gpipe"},
    "megatron": {ONE_F_ONE_B: "", INTERLEAVED: ""},
    # Split ones are given as lists; their words only say that ranks have one virtual stage, or several.
    "torchtitan": {ONE_F_ONE_B: "1F1B", INTERLEAVED: "Interleaved1F1B", GPIPE: "GPipe"}
    | dict(zip(SPLIT_SCHEDULES, ("1F1B", "Interleaved1F1B"), strict=True)),
}

"""One process of torchrun, which tells it its rank through environment variables."""

import json
import os
import sys
from dataclasses import dataclass, replace

from hexiopt.errors import InputError
from hexiopt.readers.plan_file import PlanFile
from runtime.launch.admission import admitted_device
from runtime.launch.rank import Event, run_rank
from runtime.launch.settings import TrainingRun
from runtime.launch.supervisor import TrainingFailedError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessPlace:
    """A process: its rank of `size`, its number of `num_local` on its machine, and the `host:port` of rank 0."""

    rank: int
    size: int
    local: int
    num_local: int
    master: str


def torchrun_place() -> ProcessPlace | None:
    """This process's place under torchrun; None where torchrun has not started it."""
    if not all(name in os.environ for name in _VARIABLES):
        return None
    rank, size, local, num_local = (int(os.environ[name]) for name in _VARIABLES[:4])
    return ProcessPlace(rank, size, local, num_local, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")


def train_as_torchrun(run: TrainingRun, plan_file: PlanFile, wanted_device: str, force: bool) -> float:
    """Train one rank of a plan; rank 0 prints its events. Returns the last loss, NaN without a step.

    Raises InputError where the processes do not match the plan or the machine cannot carry them, TrainingFailedError.
    """
    place, num_devices = torchrun_place(), len(plan_file.plan.devices())
    if place is None:
        missing = next(name for name in _VARIABLES if name not in os.environ)
        raise InputError(f"train.launch=torchrun: {missing} is not set; start it by torchrun")
    if place.size != num_devices:
        raise InputError(
            f"train.launch=torchrun: {place.size} processes for {num_devices} devices of the plan; "
            "set --nnodes and --nproc-per-node to them, or take train.launch=machine"
        )
    first = place.rank - place.local
    device, told = admitted_device(plan_file, range(first, first + place.num_local), wanted_device, force)
    if told is not None and place.local == 0:
        print(told, file=sys.stderr)
    losses = [float("nan")]

    def tell(event: Event) -> None:
        if event["event"] in ("error", "stopped"):
            raise TrainingFailedError(event["reason"].strip().splitlines()[-1])
        if event["event"] == "step":
            losses.append(event["loss"])
        if place.rank == 0 and event["event"] != "beat":
            print(json.dumps(event), flush=True)

    run_rank(replace(run, device=device), plan_file, place.rank, place.local, place.master, tell)
    return losses[-1]

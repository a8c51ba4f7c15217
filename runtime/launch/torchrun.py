"""One process of torchrun, which tells it its rank through environment variables."""

import os
from dataclasses import dataclass

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    if not all(name in os.environ for name in VARIABLES):
        return None
    rank, size, local, num_local = (int(os.environ[name]) for name in VARIABLES[:4])
    return ProcessPlace(rank, size, local, num_local, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")

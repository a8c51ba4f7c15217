"""The rank table: the GPU of each process, and its place in the plan.

It stands between trainers, which say what each rank computes, and launchers, which start each rank somewhere.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import Devices, SequenceParallel, StageParallelism
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster

FILE = "ranks.tsv"


@dataclass(frozen=True, slots=True)
class RankRow:
    """One process: its rank, its GPU (`cuda_index` of `machine`), and its place in the plan.

    `replica` counts those that share experts too; `tp_rank` is its number in the TP group, or among the devices of a
    sequence layout.
    """

    rank: int
    machine: str
    cuda_index: int
    pipeline: int
    stage: int
    replica: int
    tp_rank: int


COLUMNS = tuple(field.name for field in fields(RankRow))


@dataclass(frozen=True, slots=True)
class Agent:
    """Consecutive ranks on one machine, which one launcher process starts: the first rank, and the GPUs in order."""

    machine: str
    first_rank: int
    cuda_indices: tuple[int, ...]

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return len(self.cuda_indices)

    @property
    def cuda_list(self) -> str:
        """The GPUs, as CUDA_VISIBLE_DEVICES has them."""
        return ",".join(map(str, self.cuda_indices))


def rank_rows(cluster: Cluster, plan: Plan, devices: Sequence[int]) -> tuple[RankRow, ...]:
    """The rank table of `plan`; `devices` are the plan's devices in the order of ranks."""
    place = {
        device: (p, s, r, t)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for r, group in enumerate(_replicas(stage.parallelism))
        for t, device in enumerate(group)
    }
    assert sorted(devices) == sorted(place), "ranks and plan have the same devices"
    return tuple(
        RankRow(rank, cluster.machines[int(cluster.machine_of[d])].name, int(cluster.index_in_machine[d]), *place[d])
        for rank, d in enumerate(devices)
    )


def _replicas(parallelism: StageParallelism) -> tuple[Devices, ...]:
    """The devices of each replica; all those of a sequence layout are one."""
    whole = isinstance(parallelism, SequenceParallel)
    return parallelism.executors if whole else parallelism.parameter_copies


def agents(rows: Sequence[RankRow]) -> tuple[Agent, ...]:
    """Runs of consecutive ranks on one machine, in the order of ranks: torchrun counts ranks through its agents."""
    runs = (list(run) for _, run in groupby(rows, key=lambda row: row.machine))
    return tuple(Agent(run[0].machine, run[0].rank, tuple(row.cuda_index for row in run)) for run in runs)


def num_agents(cluster: Cluster, devices: Sequence[int]) -> int:
    """The number of agents that start `devices` in the order of ranks."""
    return sum(1 for _ in groupby(cluster.machine_of[list(devices)].tolist()))


def table_text(rows: Sequence[RankRow]) -> str:
    """The rank table as tab-separated text with a header."""
    lines = ["\t".join(COLUMNS), *("\t".join(map(str, astuple(row))) for row in rows)]
    return "\n".join(lines) + "\n"


def devices_of_table(text: str, cluster: Cluster, where: str) -> tuple[int, ...]:
    """The devices of `cluster` in the order of ranks; only the columns rank, machine and cuda_index are read.

    Raises InputError.
    """
    lines = [line.split("\t") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or lines[0][:3] != list(COLUMNS[:3]):
        raise InputError(f"{where}: has no header {' '.join(COLUMNS[:3])}, separated by tabs; give a {FILE}")
    devices = []
    for rank, cells in enumerate(lines[1:]):
        if len(cells) < 3 or cells[0] != str(rank):
            what = f"{where}: row {rank + 1} is {' '.join(cells)!r}"
            raise InputError(f"{what}; it must be rank {rank} with its machine and CUDA index")
        devices.append(cluster.device_index(f"{cells[1]}:{cells[2]}", f"{where}: rank {rank}"))
    if not devices:
        raise InputError(f"{where}: has no rank; give one row for each")
    return tuple(devices)

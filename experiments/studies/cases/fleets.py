"""Clusters as people have them, which nobody laid out for training."""

from dataclasses import dataclass

from experiments.app.configurations import named_cluster, named_model
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload


@dataclass(frozen=True)
class Fleet:
    """An irregular cluster, and what is trained on it."""

    cluster: str
    model: str
    workload: Workload
    exclude: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """The problem."""
        return Problem(named_cluster(self.cluster), named_model(self.model), self.workload, Space(exclude=self.exclude))


_LONG = 8192
FLEETS = (
    Fleet("fleet", "llama3_70b", Workload(2048, _LONG), ("v100",)),
    Fleet("fleet_quarter", "llama3_70b", Workload(512, _LONG), ("v100",)),
    Fleet("two_sites", "llama3_70b", Workload(512, _LONG)),
    Fleet("spot_mix", "llama3_70b", Workload(256, _LONG)),
    Fleet("campus", "llama2_13b", Workload()),
)
TINY = (Fleet("small_mixed", "tiny", Workload(32, 512)),)

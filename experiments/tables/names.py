"""Planners by the names that people know, and as tasks."""

from dataclasses import dataclass

from experiments.tables.task import Task
from hexiopt.problem.problem import Problem


@dataclass(frozen=True)
class Planner:
    """A solver of the registry with its options, and its name in tables."""

    solver: str
    label: str
    options: tuple[tuple[str, str | bool], ...] = ()

    def task(self, problem: Problem, time_limit_s: float, seed: int = 0) -> Task:
        """Its search on `problem`."""
        return Task(problem, self.solver, time_limit_s, seed, self.options)


OURS = Planner("portfolio", "ours")
MEGATRON = Planner("megatron", "Megatron-LM")
GALVATRON = Planner("galvatron", "Galvatron")
FSDP = Planner("fsdp", "FSDP")
HOMOGENEOUS = (MEGATRON, GALVATRON, FSDP)
RIVALS = (
    Planner("metis_atc24", "Metis (ATC 24)"),
    Planner("amp", "AMP"),
    Planner("espresso", "Espresso"),
    Planner("flashflex", "FlashFlex as published"),
    Planner("flashflex", "FlashFlex as released", (("defects", "as_released"),)),
    Planner("sailor", "Sailor"),
    *HOMOGENEOUS,
)

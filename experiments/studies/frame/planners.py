"""The planners that studies compare: solvers of the registry with their options, and their names in tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.studies.frame.search import BOUND, SearchSpec
from hexiopt.problem.problem import Problem


@dataclass(frozen=True)
class Planner:
    """A solver of the registry with its options, and its name in tables."""

    label: str
    solver: str
    options: tuple[tuple[str, str | bool], ...] = ()

    def search(self, problem: Problem, limit_s: float, labels: Mapping[str, Any], seed: int = 0) -> SearchSpec:
        """Its search on `problem`, with its name among the labels."""
        return SearchSpec(problem, self.solver, limit_s, {**labels, "planner": self.label}, seed, dict(self.options))


OURS, LOWER_BOUND = Planner("ours", "portfolio"), Planner(BOUND, BOUND)
HOMOGENEOUS = (Planner("Megatron-LM", "megatron"), Planner("Galvatron", "galvatron"), Planner("FSDP", "fsdp"))
RIVALS = (
    Planner("Metis (ATC 24)", "metis_atc24"),
    Planner("AMP", "amp"),
    Planner("Espresso", "espresso"),
    Planner("FlashFlex as published", "flashflex"),
    Planner("FlashFlex as released", "flashflex", (("defects", "as_released"),)),
    Planner("Sailor", "sailor"),
    *HOMOGENEOUS,
)

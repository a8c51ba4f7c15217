"""Seconds of stages and room in memory for them, asked of the pricer once."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight
from hexiopt.solving import Pricer
from solvers.core.partition import DeviceGroup

Member = TypeVar("Member", int, DeviceGroup)
StageTpGroups = frozenset[Any]  # of a stage; the slowest and the fullest decide


def around(members: Iterable[Member]) -> Iterator[tuple[Member, Member]]:
    """Neighbours on a ring of `members` in ascending order: (sender, receiver)."""
    ring = sorted(members)
    return zip(ring, ring[1:] + ring[:1], strict=True)


class StageEstimates:
    """Estimates for the stages of one search; repeated ones are kept."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.problem: Problem = pricer.problem
        self._seconds: dict[tuple[Any, ...], float] = {}
        self._max_layers: dict[tuple[Any, ...], int] = {}
        workload = self.problem.workload
        self.sequence_bytes = float(workload.seq_len * self.problem.model.hidden_size * workload.element_bytes)

    def stage_s(
        self, tp_groups: StageTpGroups, num_layers: int, first: bool, last: bool, size: int, policy: str
    ) -> float:
        """Seconds of forward and backward of a stage on its slowest TP group."""
        key = (tp_groups, num_layers, first, last, size, policy)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = max(
                sum(self.pricer.stage_s(tp_group, num_layers, first, last, size, policy)) for tp_group in tp_groups
            )
        return found

    def max_layers(
        self, tp_groups: StageTpGroups, first: bool, last: bool, size: int, policy: str, held: InFlight, shards: int
    ) -> int:
        """The most layers that fit on the fullest TP group of a stage; at least 0."""
        key = (tp_groups, first, last, size, policy, held, shards)
        found = self._max_layers.get(key)
        if found is None:
            spread = StateSharding(1, shards)
            fitting = (
                self.pricer.max_layers(tp_group, first, last, size, policy, held, spread) for tp_group in tp_groups
            )
            found = self._max_layers[key] = max(0, min(fitting))
        return found

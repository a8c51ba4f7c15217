"""Ours against the fastest baseline; and a mixed cluster against a homogeneous one of like FLOPS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from matplotlib.axes import Axes

from experiments.tables.figures import relative_bars
from experiments.tables.names import Planner
from experiments.tables.task import Outcome, Task, fastest

S = TypeVar("S")


@dataclass(frozen=True)
class Contest(Generic[S]):
    """A setting: ours and every baseline."""

    setting: S
    ours: Outcome
    baselines: dict[Planner, Outcome]

    @property
    def best(self) -> tuple[Planner, Outcome]:
        """The fastest baseline."""
        return fastest(self.baselines)

    @property
    def ratio(self) -> float | None:
        """Throughput of ours over the fastest baseline's."""
        return self.ours.over(self.best[1])


@dataclass(frozen=True)
class Pairing(Contest[S]):
    """Ours on a mixed cluster; on a homogeneous one the baselines and ours, `ours_there`. `flops_ratio`: of the dense
    peaks of both."""

    flops_ratio: float
    ours_there: Outcome


def flops_ratio(mixed: Task, partner: Task) -> float:
    """Dense peaks of the mixed cluster over those of its partner."""
    own, other = (one.problem.cluster.total_peak_flops(one.problem.workload.precision) for one in (mixed, partner))
    return own / other


def pairing_bars(
    ax: Axes, groups: Sequence[str], pairings: Sequence[Pairing[Any]], also: Mapping[str, Sequence[Outcome]]
) -> None:
    """Throughput relative to the best homogeneous baseline, a group of bars a setting; `also` stands beside ours."""
    series = {
        "ours, mixed cluster": [one.ours for one in pairings],
        **also,
        **{f"{p.label}, homogeneous": [one.baselines[p] for one in pairings] for p in pairings[0].baselines},
        "ours, homogeneous": [one.ours_there for one in pairings],
    }
    relative_bars(ax, groups, series, [one.best[1] for one in pairings])
    ax.set_ylabel("throughput (best baseline = 1)")

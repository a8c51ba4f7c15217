"""Sailor: its equal layers, its zones, and what it can say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.baselines._grids import areas, linked_areas
from solvers.baselines.sailor import splits
from solvers.registry import make_solver
from tests.solvers import problems as small
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import SPACES


@given(st.integers(1, 100), st.integers(1, 40))
def test_splits(num_layers: int, stages: int) -> None:
    """All layers once; equal but for one, embedding and head counted or not; what is left over comes last."""
    all_splits = splits(num_layers, stages)
    assert bool(all_splits) == (stages <= num_layers)
    for layers in all_splits:
        assert sum(layers) == num_layers
        assert len(layers) == stages
        assert min(layers) > 0
    if all_splits:
        units = [list(layers) for layers in all_splits]
        if len(units) == 2:
            units[0][0] += 1
            units[0][-1] += 1
        assert all(counts == sorted(counts) and counts[-1] - counts[0] <= 1 for counts in units)


def test_its_layers_as_published() -> None:
    """GPT-Neo 2.7B: 32 layers, embedding and head, over four stages of 8, 8, 9 and 9 units."""
    assert splits(32, 4)[0] == (7, 8, 9, 8)


def line(
    *groups: tuple[int, ...], layers: tuple[int, ...], batches: int = 4, size: int = 2, policy: str = "none"
) -> Pipeline:
    ends = [sum(layers[: s + 1]) for s in range(len(layers))]
    stages = (Stage.of(g, end - n, end, policy) for g, end, n in zip(groups, ends, layers, strict=True))
    return Pipeline(tuple(stages), batches, size)


# Six layers on a (0, 1), b (2, 3) and c (4 to 7).
MIXED = Plan((line((0,), (4, 5), layers=(3, 3)), line((2, 3), (6,), layers=(3, 3))), ONE_F_ONE_B, Sharding(1))


@pytest.mark.parametrize(
    ("tried", "broken"),
    [
        (MIXED, None),
        (replace(MIXED, schedule=GPIPE), "schedule gpipe"),
        (Plan((line((0,), (1,), layers=(2, 4), batches=8),)), "unequal layers"),
        (Plan((line((0,), (1,), layers=(3, 3)), line((2,), (3,), layers=(2, 4)))), "different layers"),
        (Plan((line((0,), layers=(6,), batches=6), line((1,), layers=(6,), batches=2))), "unequal batches"),
        (Plan((line((0,), layers=(6,)), line((1,), layers=(6,), policy="full"))), "several recompute policies"),
        (Plan((line((0,), layers=(6,)), line((1,), layers=(6,), batches=8, size=1))), "unequal batches"),
    ],
)
def test_its_space(tried: Plan, broken: str | None) -> None:
    violation = SPACES["sailor"].first_violation(small.easy(), tried)
    assert violation is None if broken is None else violation is not None and broken in violation


def test_zones_are_what_fast_links_join() -> None:
    """Machines a and d stand in one rack, b and c in the other."""
    assert linked_areas(problems.racks()) == [frozenset({0, 1, 2, 3}), frozenset({0, 3}), frozenset({1, 2})]
    assert linked_areas(small.easy()) == [frozenset({0, 1, 2})]
    assert areas(small.easy()) == [frozenset(m) for m in ({0}, {2}, {0, 1}, {0, 1, 2})]


@pytest.mark.slow
def test_pipelines_stay_in_a_rack() -> None:
    problem = problems.racks()
    result = make_solver("sailor").solve(problem, Budget(3600.0))
    assert result.plan is not None
    machine_of = problem.cluster.machine_of
    for pipeline in result.plan.pipelines:
        racks = {int(machine_of[stage.devices[0]]) in (0, 3) for stage in pipeline.stages}
        assert len(racks) == 1


def test_one_tp_degree_where_asked() -> None:
    problem = small.easy()
    problem = replace(problem, space=replace(problem.space, uneven_tp=False, num_stages=2, num_pipelines=2))
    result = make_solver("sailor").solve(problem, Budget(3600.0))
    assert result.plan is not None
    assert len({stage.tp for pipeline in result.plan.pipelines for stage in pipeline.stages}) == 1
    assert [len(pipeline.stages) for pipeline in result.plan.pipelines] == [2, 2]

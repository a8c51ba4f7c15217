"""Shapes, their moves and their estimates; the layers and policies of stages; the joint search."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.solving import Budget
from solvers.core.operators import OperatorStatistics
from solvers.core.search import Search
from solvers.registry import make_solver
from solvers.sequence.estimates import SequenceEstimates, split_s
from solvers.sequence.grouping import Signatures
from solvers.sequence.layout_search import LayoutSearch
from solvers.sequence.plan_builder import PlanBuilder
from solvers.sequence.planning import plan_jointly, shape_of
from solvers.sequence.shapes import SHAPE_OPERATORS, SequenceShape, ShapeProposals
from solvers.sequence.stage_tables import RecomputeTable, StageOption, allocate_layers
from solvers.sequence.starts import SequenceStarts
from tests.solvers.sequence.small_layouts import task

PROBLEM = task(("fast", 4), ("slow", 4), ("slow", 4), batch=6, seq_len=16384)


def uses_once(problem: Problem, shape: SequenceShape) -> bool:
    devices = [d for line in shape.pipelines for seat in line for d in seat]
    return len(set(devices)) == len(devices) and set(devices) <= set(problem.usable_devices)


@pytest.mark.parametrize("space", [Space(sequence=True), Space(sequence=True, num_pipelines=3, num_stages=2)])
@pytest.mark.parametrize("zero", [1, 3])
def test_hand_made_shapes_are_shapes(space: Space, zero: int) -> None:
    problem = replace(PROBLEM, space=space)
    ranked = SequenceStarts(problem, SequenceEstimates(PlanPricer(problem), zero)).rank(lambda: True)
    assert [estimated.step_s for estimated in ranked] == sorted(estimated.step_s for estimated in ranked)
    shapes = [estimated.shape() for estimated in ranked]
    assert all(uses_once(problem, shape) for shape in shapes)
    for number, numbers_of in (
        ("num_pipelines", lambda s: {len(s.pipelines)}),
        ("num_stages", lambda s: set(map(len, s.pipelines))),
    ):
        asked = getattr(space, number)
        assert asked is None or all(numbers_of(shape) == {asked} for shape in shapes)
    if zero == 1:
        assert ranked
        uneven = {len(set(map(len, shape.pipelines))) > 1 for shape in shapes}
        assert uneven == ({False} if space.num_stages else {False, True})


def test_moves_give_shapes_that_obey_the_space() -> None:
    rng, problem = random.Random(3), PROBLEM
    shape = SequenceStarts(problem, SequenceEstimates(PlanPricer(problem), 1)).rank(lambda: True)[0].shape()
    seen, statistics = {shape}, OperatorStatistics()
    proposals = ShapeProposals(problem, statistics)
    for _ in range(300):
        drawn = proposals.draw(shape, rng)
        assert drawn is not None
        next_shape = drawn[1]
        assert uses_once(problem, next_shape)
        assert all(seat == tuple(sorted(seat)) and seat for line in next_shape.pipelines for seat in line)
        assert len(next_shape.pipelines) * next_shape.size <= problem.workload.global_batch
        shape = next_shape
        seen.add(next_shape)
    assert len(seen) > 200
    assert {count.operator for count in statistics.counts() if count.valid} == {
        operator.name for operator in SHAPE_OPERATORS
    }
    assert len({tuple(map(len, seen_shape.pipelines)) for seen_shape in seen}) > 10


@pytest.mark.parametrize("tensor", [False, True])
def test_estimates_are_near_the_price(tensor: bool) -> None:
    """Of the median shape within a factor, and the best estimate is not a bad plan."""
    model = PlanPricer(PROBLEM)
    estimates = SequenceEstimates(model, 1, tensor=tensor)
    ranked = SequenceStarts(PROBLEM, estimates).rank(lambda: True)
    builder = PlanBuilder(model, LayoutSearch(model, lambda: True), tensor=tensor)
    ratios, prices = [], []
    for estimated in ranked[:: max(1, len(ranked) // 25)]:
        seconds, shape = estimated.step_s, estimated.shape()
        plan = builder.build(shape, 0)
        assert plan is not None
        assert check(PROBLEM, plan) == []
        prices.append(model.price(plan).step_time_s)
        ratios.append(prices[-1] / seconds)
        assert estimates.shape_s(shape) == pytest.approx(seconds, rel=0.5)
    assert 0.8 < float(np.median(ratios)) < 2.5
    assert prices[0] <= 1.5 * min(prices)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 5.0)), min_size=1, max_size=4), st.integers(4, 12))
def test_a_batch_is_split_as_fast_as_by_all_ways(pipelines: list[tuple[float, float]], count: int) -> None:
    fills, periods = (np.array([column]) for column in zip(*pipelines, strict=True))
    best = min(
        max(f + b * n for (f, b), n in zip(pipelines, counts, strict=True))
        for counts in product(range(1, count + 1), repeat=len(pipelines))
        if sum(counts) >= count
    )
    assert split_s(fills, periods, count)[0] == pytest.approx(best, rel=1e-4)


def recompute_table(
    layer_s: Sequence[float], base: Sequence[float], each: Sequence[float], limit: float, most: int
) -> RecomputeTable:
    """Of policies 0, 1, ... on one device, bytes as in the cost model."""
    names = [str(k) for k in range(len(layer_s))]

    def bytes_of(layers: tuple[str, ...]) -> Floats:
        used = {int(name) for name in layers}
        return np.array([max(base[k] for k in used) + sum(each[int(name)] for name in layers)])

    return RecomputeTable(names, lambda p: layer_s[int(p)], bytes_of, np.array([limit]), 0.5, most, mixed=True)


@given(
    st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.tuples(*[st.floats(0.0, 3.0)] * 2), st.floats(0.2, 3.0),
    st.floats(0.1, 1.0), st.floats(1.0, 20.0),
)  # fmt: skip
def test_mixtures_of_two_policies_are_the_best_that_fit(
    rich_s: float, factor: float, base: tuple[float, float], each: float, less: float, limit: float
) -> None:
    table = recompute_table((rich_s, rich_s * factor), base, (each, each * less), limit, 6)
    for n in range(1, 7):
        fitting = [
            x * rich_s + (n - x) * rich_s * factor + 0.5
            for x in range(n + 1)
            if max([base[0]] * (x > 0) + [base[1]] * (x < n)) + x * each + (n - x) * each * less <= limit * (1 - 1e-7)
        ]
        ours = table.seconds[n - 1]
        if fitting:
            assert ours <= min(fitting) * (1 + 1e-9)
        if np.isfinite(ours):
            policies = table.options().recompute(n)
            assert len(policies) in (1, n)
            whole = policies * n if len(policies) == 1 else policies
            x = whole.count("0")
            assert ours == pytest.approx(x * rich_s + (n - x) * rich_s * factor + 0.5)
            assert max([base[0]] * (x > 0) + [base[1]] * (x < n)) + x * each + (n - x) * each * less <= limit * (
                1 + 1e-6
            )


LINES = st.integers(1, 3).flatmap(
    lambda stages: st.lists(
        st.lists(st.tuples(st.floats(0.5, 3.0), st.integers(0, 6)), min_size=stages, max_size=stages),
        min_size=1,
        max_size=2,
    )
)


@given(LINES, st.integers(1, 6))
def test_layers_are_dealt_as_well_as_in_all_ways(pipelines: list[list[tuple[float, int]]], total: int) -> None:
    ways = [
        [
            [StageOption((k,), recompute_table((s,), (0.0,), (1.0,), room, total).options())]
            for k, (s, room) in enumerate(stages)
        ]
        for stages in pipelines
    ]
    layers = allocate_layers(ways, total)
    rooms = [min(room for _, room in place) for place in zip(*pipelines, strict=True)]
    speeds = [max(s for s, _ in place) for place in zip(*pipelines, strict=True)]
    all_counts = [
        counts
        for counts in product(range(1, total + 1), repeat=len(rooms))
        if sum(counts) == total and all(n <= room for n, room in zip(counts, rooms, strict=True))
    ]
    if not all_counts:
        assert layers is None
        return
    assert layers is not None
    assert sum(layers) == total
    slowest = max(n * s for n, s in zip(layers, speeds, strict=True))
    best = min(max(n * s for n, s in zip(counts, speeds, strict=True)) for counts in all_counts)
    assert slowest == pytest.approx(best, rel=1e-6)


def test_alike_devices_price_layouts_alike() -> None:
    """And unlike ones have other signatures."""
    model, signatures = PlanPricer(PROBLEM), Signatures(PROBLEM)
    second, third, mixed = (4, 5, 6, 7), (8, 9, 10, 11), (3, 4, 5, 6)
    assert signatures.of(second) == signatures.of(third)
    assert signatures.of(second) != signatures.of((0, 1, 2, 3))
    assert signatures.of(second) != signatures.of((4, 5, 8, 9))
    builder = PlanBuilder(model, LayoutSearch(model, lambda: True))
    times = []
    for seat in (second, third, mixed):
        plan = builder.build(SequenceShape(((seat,),)))
        assert plan is not None
        assert plan.devices() == seat or set(plan.devices()) == set(seat)
        times.append(model.price(plan).step_time_s)
    assert times[0] == times[1] != times[2]


@pytest.mark.parametrize("switch", ["uneven_tokens", "uneven_heads", "uneven_groups"])
def test_a_freedom_taken_away_is_not_used(switch: str) -> None:
    problem = task(("fast", 2), ("slow", 2))
    problem = replace(problem, space=replace(problem.space, num_pipelines=1, num_stages=1))
    free = make_solver("hexiseq").solve(problem, Budget(3600.0, 60))
    bound = make_solver("hexiseq", **{switch: False}).solve(problem, Budget(3600.0, 60))
    assert bound.plan is not None
    layout = bound.plan.pipelines[0].stages[0].parallelism
    assert isinstance(layout, SequenceParallel)
    if switch == "uneven_tokens":
        tokens = [n for group in layout.groups for n in group.tokens]
        assert max(tokens) - min(tokens) <= 1
    elif switch == "uneven_heads":
        assert all(max(group.heads) - min(group.heads) <= 1 for group in layout.groups)
    else:
        assert len({len(group.devices) for group in layout.groups}) == 1
    assert free.objective <= bound.objective * (1 + 1e-9)


def test_the_joint_search_is_as_good_as_its_parts_and_mixes_stages() -> None:
    """Where one machine has a fast link inside and others have none, stages of both kinds may stand in a pipeline."""
    problem = task(("fast", 4), ("slow", 2), ("slow", 2), batch=4, seq_len=16384, network_gb_per_s=5.0)
    steps = Budget(3600.0, 120)
    joint = Search("joint", problem, steps, 0)
    plan_jointly(joint, random.Random(0))
    assert joint.plan is not None
    assert violations(problem, joint.plan, joint.cost) == []
    alone = make_solver("hexiseq").solve(problem, steps)
    assert joint.best_s <= 1.01 * alone.objective
    shape = shape_of(joint.plan)
    assert uses_once(problem, shape)
    assert shape.size in problem.space.micro_batch_sizes(4)


def test_the_portfolio_plans_jointly_only_where_layouts_are_allowed() -> None:
    problem = task(("fast", 2), ("slow", 2), batch=4, seq_len=65536, memory_gib=8.0)
    with_layouts = make_solver("portfolio").solve(problem, Budget(3600.0, 200))
    without = make_solver("portfolio").solve(replace(problem, space=Space(max_micro_batch_size=2)), Budget(3600.0, 200))
    assert with_layouts.plan is not None
    assert violations(problem, with_layouts.plan, with_layouts.cost) == []
    assert with_layouts.objective <= without.objective
    if without.plan is not None:
        assert all(
            not isinstance(stage.parallelism, SequenceParallel)
            for line in without.plan.pipelines
            for stage in line.stages
        )

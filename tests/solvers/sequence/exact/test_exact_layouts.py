"""`sequence_exact` against brute force, and the contract of solvers."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import solver_to_dict
from hexiopt.numbers.frameworks import default_framework
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, recompute_policies
from hexiopt.report.facts import PlanFacts
from hexiopt.report.table import bound, known_bounds
from hexiopt.solving import Budget, Progress
from hexiopt.solving.result import Result, Status
from solvers.frame.infeasible import memory_infeasibility
from solvers.registry import make_solver, names, of_sequences
from solvers.sequence.exact.batch_split import best_split
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton, device_sets, group_orders
from solvers.sequence.exact.quanta_grid import QuantaGrid, default_resolution
from solvers.sequence.exact.skeleton_bounds import SkeletonBounds
from solvers.sequence.exact.skeleton_memory import SkeletonNeeds
from solvers.sequence.exact.skeleton_program import SkeletonProgram
from solvers.sequence.grouping import Signatures
from tests.hexiopt.plan.layouts import parts as some_parts
from tests.slow import slow_but
from tests.solvers.sequence import every_plan
from tests.solvers.sequence.small_layouts import BEST_S, SMALL, SMALL_LAYOUTS, cluster, task
from tests.timing import within

SEQUENCE = names(of_sequences)

AFTER = replace(default_framework(), gradient_sums="after", weight_gathers="after", layer_host_s=0.0)
PROVEN = 3e-6  # of a step time, within which a bound is called equal


def solve(problem: Problem, resolution: int | None = None, seconds: float = 3600.0, **more: Any) -> Result:
    options = {} if resolution is None else {"resolution": resolution}
    return make_solver("sequence_exact", **options).solve(problem, Budget(seconds), **more)


def assert_sound(problem: Problem, result: Result) -> None:
    """A valid plan at its true price, the bounds below it, and of both no more said than they prove."""
    assert result.plan is not None, result.reason
    assert result.cost == PlanPricer(problem).price(result.plan)
    assert violations(problem, result.plan, result.cost) == []
    assert result.restricted_bound is not None
    assert 0.0 < result.bound_s <= result.restricted_bound.bound_s <= result.objective
    assert (result.status is Status.OPTIMAL) == (result.gap <= 1e-6)
    bests = [point.step_time_s for point in result.trajectory]
    assert bests == sorted(set(bests), reverse=True)
    assert bests[-1] == result.objective


def tiny(
    *machines: tuple[str, int], heads: int = 3, kv_heads: int = 3, batch: int = 1, seq_len: int = 1536, **more: Any
) -> Problem:
    """A problem of which all plans can be priced."""
    space = more.pop("space", {})
    problem = task(*machines, seq_len=seq_len, batch=batch, **more)
    model: ModelSpec = replace(SMALL, num_heads=heads, num_kv_heads=kv_heads, num_layers=2)
    return replace(problem, model=model, space=replace(problem.space, **space))


TINY = {
    "batch": (tiny(("fast", 1), ("slow", 1), batch=2), 4),
    "unfused": (tiny(("slow", 1), ("old", 1), kv_heads=1, network_gb_per_s=100.0), 6),
    "one machine": (tiny(("fast", 2), heads=4, kv_heads=2, seq_len=12288), 6),
    "slow network": (tiny(("fast", 1), ("slow", 1), heads=4, network_gb_per_s=0.5, kv_heads=4), 6),
    "memory for states": (tiny(("fast", 1), ("slow", 1), batch=2, heads=2, kv_heads=2, memory_gib=1.25), 4),
    "memory for tokens": (tiny(("fast", 1), ("slow", 1), seq_len=24576, memory_gib=2.0), 6),
    "gpipe": (tiny(("fast", 1), ("slow", 1), batch=3, heads=2, kv_heads=2, recompute="full"), 4),
    "three": (tiny(("fast", 1), ("slow", 2), recompute="selective", optimizer_sharding="1"), 4),
    "shared keys": (
        tiny(("fast", 2), ("slow", 1), heads=4, kv_heads=2, recompute="none", optimizer_sharding="0"),
        4,
    ),
    # Two pipelines over both machines share the network; over one each, they share nothing.
    "shared network": (
        tiny(
            ("fast", 2),
            ("slow", 2),
            heads=2,
            kv_heads=2,
            batch=2,
            recompute="none",
            optimizer_sharding="0",
            space={"num_pipelines": 2, "max_micro_batch_size": 1},
        ),
        2,
    ),
}


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed when the last backward has ended: then bounds of several pipelines are tight too."""
    monkeypatch.setattr("hexiopt.cost.executors.group_model.default_framework", lambda: AFTER)


@pytest.mark.parametrize("kind", slow_but(("unfused", "memory for states"), TINY))
def test_bounds_hold_beside_last_backwards(kind: str) -> None:
    """Of what several pipelines sum beside their last backwards the bound knows little, but nothing that is false."""
    problem, resolution = TINY[kind]
    result = solve(problem, resolution)
    assert_sound(problem, result)
    best_s = every_plan.best_step_s(problem, resolution)
    assert result.objective >= best_s * (1 - 2e-6)
    assert result.restricted_bound is not None
    assert result.restricted_bound.bound_s <= best_s * (1 + 2e-6)


@pytest.mark.usefixtures("after")
@pytest.mark.parametrize("kind", slow_but(("unfused", "memory for states"), TINY))
def test_equals_brute_force(kind: str) -> None:
    problem, resolution = TINY[kind]
    result = solve(problem, resolution)
    assert_sound(problem, result)
    best_s = every_plan.best_step_s(problem, resolution)
    assert result.objective == pytest.approx(best_s, rel=2e-6)
    assert result.restricted_gap <= PROVEN


@st.composite
def tiny_problems(draw: st.DrawFn, batch: int) -> Problem:
    """Two devices of any types, any policy."""
    types = [draw(st.sampled_from(("fast", "slow", "old"))) for _ in range(2)]
    machines = ((types[0], 2),) if draw(st.booleans()) else ((types[0], 1), (types[1], 1))
    heads, each = draw(st.sampled_from(((2, 1), (2, 2), (3, 1), (3, 3), (4, 2))))
    return tiny(
        *machines,
        heads=heads,
        kv_heads=heads // each,
        batch=batch,
        seq_len=draw(st.sampled_from((24, 1536, 12288))),
        network_gb_per_s=draw(st.sampled_from((0.1, 3.0, 100.0))),
        memory_gib=draw(st.sampled_from((40.0, 2.0, 1.0))),
        recompute=draw(st.sampled_from(("auto", "none", "selective", "full"))),
        optimizer_sharding=draw(st.sampled_from(("0", "1"))),
        space={"uneven_batch": draw(st.booleans()), "recompute_per_stage": draw(st.booleans())},
    )


@pytest.mark.parametrize(("resolution", "batch"), slow_but([(2, 2)], product((2, 4), (1, 2))))
@settings(max_examples=5)
@given(data=st.data())
def test_equals_brute_force_on_random_problems(resolution: int, batch: int, data: st.DataObject) -> None:
    """Plans that break a switch are left out."""
    problem = data.draw(tiny_problems(batch))
    model = PlanPricer(problem)
    prices = (model.price(plan).objective for plan in every_plan.plans(problem, resolution) if not check(problem, plan))
    best_s, result = min(prices), solve(problem, resolution)
    if result.restricted_bound is not None:
        assert result.restricted_bound.bound_s <= best_s * (1 + 2e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hexiopt.cost.executors.group_model.default_framework", lambda: AFTER)
        equals_brute_force(problem, resolution)


def equals_brute_force(problem: Problem, resolution: int) -> None:
    model = PlanPricer(problem)
    prices = (model.price(plan).objective for plan in every_plan.plans(problem, resolution) if not check(problem, plan))
    best_s, result = min(prices), solve(problem, resolution)
    if best_s == float("inf"):
        assert result.status is Status.NOT_FOUND
        assert result.reason
    else:
        assert_sound(problem, result)
        assert result.objective == pytest.approx(best_s, rel=2e-6)
        assert result.restricted_gap <= PROVEN


# ------------------------------------------------------------------ the contract


@pytest.mark.slow
def test_the_time_limit_is_kept_and_the_bound_then_holds() -> None:
    problem = SMALL_LAYOUTS["four_batch"]()
    result = within(1.0, lambda: solve(problem, seconds=3.0), after_s=3.0)
    assert_sound(problem, result)
    assert result.restricted_gap > PROVEN
    whole = SMALL_LAYOUTS["pair_tight"]()
    proven, cut_off = solve(whole), make_solver("sequence_exact").solve(whole, Budget(3600.0, 2))
    assert cut_off.restricted_bound is not None
    assert cut_off.restricted_bound.bound_s <= proven.objective * (1 + PROVEN)


def test_same_steps_same_plan() -> None:
    problem = SMALL_LAYOUTS["three_slow_link"]()
    first, second = (make_solver("sequence_exact").solve(problem, Budget(3600.0, 8), seed=s) for s in (0, 0))
    assert first.plan == second.plan
    assert first.restricted_bound == second.restricted_bound
    assert first.steps == second.steps == 8


def test_a_listener_may_stop() -> None:
    heard: list[Progress] = []

    def stop(progress: Progress) -> bool:
        heard.append(progress)
        return False

    result = solve(SMALL_LAYOUTS["four_batch"](), on_progress=stop)
    assert len(heard) == 1
    assert result.steps <= heard[0].steps + 1


def test_without_room_there_is_a_reason() -> None:
    result = solve(tiny(("fast", 1), ("slow", 1), memory_gib=0.5), 4)
    assert result.status is Status.NOT_FOUND
    assert "lacks" in result.reason
    assert "\n" not in result.reason


def test_a_layout_has_room_where_no_device_has_room_for_a_sequence() -> None:
    """Devices that share a layer's activations need not have room for all of them."""
    problem = tiny(*(("fast", 1),) * 3, seq_len=98304, memory_gib=4.0, recompute="full")
    assert memory_infeasibility(replace(problem, space=Space()), StageModel(problem)) is not None
    assert memory_infeasibility(problem, StageModel(problem)) is None
    assert_sound(problem, solve(problem, 6))


PAIR = tiny(("fast", 1), ("slow", 1))
REFUSED: dict[str, tuple[Problem, dict[str, object], str]] = {
    "the switch": (replace(PAIR, space=Space()), {}, "allow them with space.sequence=true"),
    "ZeRO-2": (
        replace(PAIR, workload=replace(PAIR.workload, optimizer_sharding="2", schedule="1f1b")),
        {},
        "optimizer_sharding: 2 does not work with",
    ),
    "devices": (tiny(("fast", 7), heads=8, kv_heads=8), {}, "7 devices are more than the 6"),
    "divisor": (PAIR, {"resolution": 5}, "5 quanta do not divide a sequence of 1536 tokens"),
    "resolution": (PAIR, {"resolution": 0}, "solver.resolution: 0 is not a number of quanta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_in_one_line(kind: str) -> None:
    problem, options, words = REFUSED[kind]
    with pytest.raises(InputError, match=words):
        make_solver("sequence_exact", **options).solve(problem, Budget(1.0))


def test_plan_file_and_table_tell_both_bounds() -> None:
    problem, resolution = TINY["batch"]
    result = solve(problem, resolution)
    assert result.plan is not None
    assert result.cost is not None
    facts = PlanFacts(problem, result.plan, result.cost, solver_to_dict(result))
    [(name, words)] = bound(facts)
    assert name.strip() == "lower bound"
    _, sentence = known_bounds(facts)
    assert "one stage each, with tokens in multiples of 1/4 of a sequence" in sentence
    assert sentence.endswith("(gap 0.0%).")
    assert words.endswith("%)")


# ------------------------------------------------------------------ twenty small problems

QUICK = [name for name in SMALL_LAYOUTS if name.startswith("pair")]  # proven in less than a second each
HEURISTICS = {name: steps for name, steps in {"hexiseq": 30}.items() if name in SEQUENCE}


@pytest.mark.usefixtures("after")
@pytest.mark.parametrize("name", slow_but(QUICK[:2], QUICK))
def test_proves_small_problems(name: str) -> None:
    problem = SMALL_LAYOUTS[name]()
    result = solve(problem)
    assert_sound(problem, result)
    assert result.restricted_gap <= PROVEN
    assert result.objective == pytest.approx(BEST_S[name], rel=PROVEN)


@pytest.mark.usefixtures("after")
def test_the_best_are_within_bounds_and_heuristics_near_them() -> None:
    """The bound of all plans is below the best plans, the best of equal shards on all devices above; and heuristics
    that are registered come within 3 % on 18 of 20."""
    assert len(SMALL_LAYOUTS) == 20
    assert list(BEST_S) == list(SMALL_LAYOUTS)
    near = Counter[str]()
    for name, make in SMALL_LAYOUTS.items():
        problem = make()
        model = PlanPricer(problem)
        assert lower_bound_s(model) <= BEST_S[name]
        assert equal_shards_s(model) >= BEST_S[name] * (1 - PROVEN)
        for solver in HEURISTICS:
            result = make_solver(solver).solve(problem, Budget(3600.0, HEURISTICS[solver]))
            near[solver] += result.objective <= 1.03 * BEST_S[name]
    assert all(near[solver] >= 18 for solver in HEURISTICS)


def equal_shards_s(model: PlanPricer) -> float:
    """The step time of one ring, or one group, of equal shards on all devices; infinite where neither fits."""
    problem = model.problem
    devices, seq_len, heads = problem.usable_devices, problem.workload.seq_len, problem.model.num_heads
    layers, count = ((0, problem.model.num_layers),), len(devices)
    tokens = tuple(seq_len // count + (k < seq_len % count) for k in range(count))
    shares = tuple(heads // count + (k < heads % count) for k in range(count))
    ring = SequenceParallel(
        tuple(SequenceGroup((d,), (n,), (heads,)) for d, n in zip(devices, tokens, strict=True)), "zigzag"
    )
    group = SequenceParallel((SequenceGroup(tuple(devices), tokens, shares),))
    batch = problem.workload.global_batch
    return min(
        model.price(Plan((Pipeline((Stage(layout, layers, (policy,)),), batch),))).objective
        for layout in (ring, group)
        for policy in recompute_policies(problem.workload)
    )


# ------------------------------------------------------------------ its parts


def test_resolutions() -> None:
    """Quanta of an even number of tokens, at most 16, where that goes."""
    known = {(4096, 4): 16, (1536, 2): 16, (24, 2): 12, (10, 2): 5, (14, 6): 7, (2 * 37, 6): 37, (7, 2): 7, (4, 4): 4}
    assert {key: default_resolution(*key) for key in known} == known


def test_group_orders_are_all_ordered_partitions() -> None:
    """Fubini numbers, of devices that all differ; of two that do not, in two groups or one, one each."""
    types = ("fast", "slow", "old")
    unlike = tiny(*((name, 1) for name in types))
    assert [len(group_orders(Signatures(unlike), range(n), 3)) for n in (1, 2, 3)] == [1, 3, 13]
    assert len(group_orders(Signatures(unlike), range(3), 2)) == 12
    assert len(group_orders(Signatures(tiny(("fast", 2))), range(2), 3)) == 2


def test_device_sets_are_all_disjoint_ones() -> None:
    unlike = tiny(("fast", 1), ("slow", 1), ("old", 1))
    assert [len(device_sets(Signatures(unlike), range(3), count, 3)) for count in (1, 2, 3)] == [7, 6, 1]
    assert [len(device_sets(Signatures(tiny(("fast", 3))), range(3), count, 3)) for count in (1, 2, 3)] == [3, 2, 1]


@given(
    st.lists(
        st.dictionaries(st.tuples(st.sampled_from((1, 2)), st.integers(1, 3)), st.floats(0.1, 9.0), max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 7),
    st.booleans(),
)
def test_best_split_is_the_best_of_all(seconds: list[dict[tuple[int, int], float]], batch: int, uneven: bool) -> None:
    def ends() -> Any:
        for rows in product(*(ends_s.items() for ends_s in seconds)):
            counts = [size * count for (size, count), _ in rows]
            even = max(counts) - min(counts) <= max(size for (size, _), _ in rows)
            if sum(counts) == batch and (uneven or even):
                yield max(end_s for _, end_s in rows)

    split = best_split(seconds, batch, uneven)
    assert (split.end_s if split else None) == min(ends(), default=None)
    if split:
        assert sum(size * count for size, count in split.batches) == batch
        assert split.end_s == max(ends_s[pair] for ends_s, pair in zip(seconds, split.batches, strict=True))


@st.composite
def framed_layouts(draw: st.DrawFn) -> tuple[Problem, LayoutSkeleton, SequenceParallel]:
    """A frame over some devices and a layout of it, in sixteenths of a sequence."""
    machines = draw(
        st.sampled_from(((("fast", 2), ("old", 2)), (("fast", 1), ("slow", 3)), (("slow", 2), ("fast", 2))))
    )
    problem = replace(
        SMALL_LAYOUTS["four"](), cluster=cluster(*machines, network_gb_per_s=draw(st.sampled_from((0.5, 3.0, 50.0))))
    )
    problem = replace(problem, model=replace(SMALL, num_kv_heads=draw(st.sampled_from((1, 2, 8)))))
    groups = draw(st.sampled_from(group_orders(Signatures(problem), draw(st.permutations(range(4))), 4)))
    skeleton = LayoutSkeleton(
        groups, draw(st.sampled_from(("contiguous", "zigzag"))), draw(st.sampled_from(("none", "full")))
    )
    heads = [n for group in groups for n in draw(some_parts(8, len(group)))]
    quanta = draw(some_parts(16, len(skeleton.devices)))
    return problem, skeleton, skeleton.layout([2048 * n for n in quanta], heads)


@settings(max_examples=4)
@given(framed_layouts())
def test_a_program_with_heads_is_the_cost_model(given: tuple[Problem, LayoutSkeleton, SequenceParallel]) -> None:
    """Its choice takes what it says, and no longer than any other."""
    problem, skeleton, layout = given
    model, policies = PlanPricer(problem), (skeleton.policy,) * SMALL.num_layers
    limit_s = 1.01 * sum(model.stages.sequence_stage(layout, 1).stage_s(policies, True, True))
    heads = [n for group in layout.groups for n in group.heads]
    grid = QuantaGrid(problem, model.framework, 16, 1)
    program = SkeletonProgram(
        grid, skeleton, SkeletonNeeds(1, tuple((d, 0.0) for d in skeleton.devices)), limit_s, heads, memory=False
    )
    choice, proven = program.least(60.0, 60.0)
    assert proven
    assert choice is not None
    best = model.stages.sequence_stage(skeleton.layout([2048 * n for n in choice.quanta], heads), 1)
    assert sum(best.stage_s(policies, True, True)) == pytest.approx(choice.seconds, rel=1e-6)
    assert choice.seconds <= limit_s / 1.01 * (1 + 1e-9)


@settings(max_examples=200)
@given(framed_layouts())
def test_floors_are_below_every_layout(given: tuple[Problem, LayoutSkeleton, SequenceParallel]) -> None:
    problem, skeleton, layout = given
    model = PlanPricer(problem)
    lower_bounds = SkeletonBounds(QuantaGrid(problem, model.framework, 16, 1))
    seconds = sum(model.stages.sequence_stage(layout, 1).stage_s((skeleton.policy,) * SMALL.num_layers, True, True))
    assert (
        lower_bounds.of_devices(skeleton.devices) <= lower_bounds.of_skeleton(skeleton) * (1 + 1e-9)
        or skeleton.policy == "full"
    )
    assert lower_bounds.of_devices(skeleton.devices) <= seconds * (1 + 1e-9)
    assert 0.0 < lower_bounds.of_skeleton(skeleton) <= seconds * (1 + 1e-9)

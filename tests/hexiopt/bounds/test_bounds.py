"""The lower bound: below every valid plan, and close to the best one where only layers take time."""

import itertools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.bounds.chains import Boxes
from hexiopt.bounds.programme import families_of
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Entry, Measured, Profile, Shape
from hexiopt.problem.space import Space
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from tests.conftest import STRESS
from tests.hexiopt.cost.test_late_weights import split_plan
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.oracle import every_plan
from tests.strategies import problems_with_depths, problems_with_plans, roomy_problems_with_plans

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=8,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=2816,
    vocab_size=10,
    max_positions=2048,
)


def two_kinds(**changes: object) -> Problem:
    cluster = cluster_from_section(
        Section(
            {
                "name": "two",
                "inter_machine": {"bandwidth_gb_per_s": 1000, "latency_us": 0},
                "machines": [
                    {"name": "a", "gpu": "a100_80gb_sxm", "num_gpus": 1},
                    {"name": "b", "gpu": "rtx_3090", "num_gpus": 1},
                ],
            },
            "test",
        )
    )
    return Problem(cluster, MODEL, Workload(seq_len=2048, **changes))  # type: ignore[arg-type]


@given(pair=problems_with_plans())
def test_no_plan_beats_the_bound(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    assert 0.0 < lower_bound_s(model) <= model.price(plan).pipeline_s


def test_a_huge_batch_approaches_the_bound() -> None:
    """Two GPUs as two pipelines, the batch split by their speed: only ends and the last steps remain."""
    gaps = []
    for global_batch in (100, 200_000):
        problem = two_kinds(global_batch=global_batch)
        model = PlanPricer(problem)
        sizes = problem.space.micro_batch_sizes(global_batch)
        best = []
        for device in (0, 1):
            tp_group = model.tp_group((device,))
            best.append(min((sum(model.stages.layer_s(tp_group, b, "none")) / b, b) for b in sizes))
        speeds = [1 / seconds for seconds, _ in best]
        first = round(global_batch * speeds[0] / sum(speeds) / 16) * 16
        pipelines = []
        for device, share, (_, size) in zip((0, 1), (first, global_batch - first), best, strict=True):
            while share % size:
                size //= 2
            pipelines.append(Pipeline((Stage.of((device,), 0, 8),), share // size, size))
        cost = model.price(Plan(tuple(pipelines)))
        gaps.append((cost.step_time_s - lower_bound_s(model)) / cost.step_time_s)
    assert 0 <= gaps[1] < gaps[0]
    assert gaps[1] < 0.02


def test_the_bound_falls_with_devices_and_rises_with_work() -> None:
    problem = two_kinds(global_batch=64)
    bound = lower_bound_s(PlanPricer(problem))
    fewer = replace(problem, space=replace(problem.space, exclude=("b",)))
    assert lower_bound_s(PlanPricer(fewer)) > bound
    assert lower_bound_s(PlanPricer(two_kinds(global_batch=128))) > 1.99 * bound
    forced = lower_bound_s(PlanPricer(two_kinds(global_batch=64, recompute="full")))
    assert forced > 1.2 * bound


# Of a clock that counts them: from tables alone to many boxes.
READINGS = pytest.mark.parametrize("readings", slow_but((20,), (3, 20, 80, 400)))


def counted_bound_s(model: PlanPricer, readings: int) -> float:
    """The bound after so many readings of the clock, so that it is the same on any machine."""
    counted = itertools.count()
    return lower_bound_s(model, float(readings), lambda: float(next(counted)))


@READINGS
@settings(max_examples=200 if STRESS else 15)
@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_no_plan_beats_the_raised_bound(readings: int, pair: tuple[Problem, Plan]) -> None:
    """Interleaved, replicated, sharded in any way: whatever time the program had."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    if cost.fits:
        assert lower_bound_s(model) <= counted_bound_s(model, readings) <= cost.step_time_s


def profile_of(problem: Problem) -> Profile:
    """Measured layers of micro-batches of up to 16 sequences on all GPUs of a problem, whatever they could compute."""
    shape, entries = Shape.of(problem.model, problem.workload), []
    for gpu in sorted({machine.gpu.name for machine in problem.cluster.machines}):
        for tp, size in itertools.product((1, 2, 4, 8), (1, 16)):
            seconds = 0.01 * size / tp**0.7 * (1 + len(gpu) % 3)
            times = Measured((0.1 * seconds, 0.2 * seconds), (seconds, 1.8 * seconds), (seconds, 2 * seconds))
            entries.append(Entry(shape, gpu, tp, size, times))
    return Profile(tuple(entries))


@READINGS
@settings(max_examples=200 if STRESS else 25)
@given(pair=problems_with_plans() | roomy_problems_with_plans(), named=st.booleans(), measured=st.booleans())
def test_no_plan_with_split_backwards_beats_the_raised_bound(
    readings: int, pair: tuple[Problem, Plan], named: bool, measured: bool
) -> None:
    """Whether the problem names the schedule, or leaves it open and allows such plans beside the others; also where a
    profile has measured the layers."""
    problem, whole = pair
    plan = split_plan(whole)
    schedule = plan.schedule.name if named else AUTO
    sharding = "auto" if problem.workload.optimizer_sharding in ("2", "3") else problem.workload.optimizer_sharding
    problem = replace(
        problem,
        workload=replace(problem.workload, schedule=schedule, optimizer_sharding=sharding),
        space=replace(problem.space, split_backward=True),
    )
    if measured:
        problem = replace(problem, cluster=replace(problem.cluster, profile=profile_of(problem)))
    model = PlanPricer(problem)
    bound_s = counted_bound_s(model, readings)
    for candidate in (plan,) if named else (plan, whole):
        cost = model.price(candidate)
        if cost.fits:
            assert bound_s <= cost.step_time_s


@READINGS
@settings(max_examples=200 if STRESS else 25)
@given(pair=problems_with_depths() | problems_with_depths(SPLIT_SCHEDULES[0]), named=st.booleans())
def test_no_plan_of_other_depths_beats_the_raised_bound(readings: int, pair: tuple[Problem, Plan], named: bool) -> None:
    """Where the space leaves depths free, whatever numbers of micro-batches stages have in flight."""
    problem, plan = pair
    if not named:
        space = replace(problem.space, split_backward=True)
        problem = replace(problem, workload=replace(problem.workload, schedule=AUTO), space=space)
    model = PlanPricer(problem)
    cost = model.price(plan)
    if cost.fits:
        assert compute_bound_s(model) <= counted_bound_s(model, readings) <= cost.step_time_s


@pytest.mark.parametrize(
    ("split", "recompute"),
    slow_but([*zip(SPLIT_SCHEDULES, ("none", "full"), strict=False)], product(SPLIT_SCHEDULES, ("none", "full"))),
)
def test_the_bound_of_split_backwards_is_near_the_best_of_all_plans(split: Schedule, recompute: str) -> None:
    """By pricing every plan of a tiny problem; also where whole backwards are allowed beside them."""
    problem = problems.loose()
    workload = replace(problem.workload, schedule=split.name, optimizer_sharding="1", recompute=recompute)
    problem = replace(problem, workload=workload, space=Space(max_micro_batch_size=1, split_backward=True))
    model = PlanPricer(problem)
    best_s = min(model.price(plan).objective for plan in every_plan(problem))
    assert max(1.2 * compute_bound_s(model), 0.85 * best_s) < counted_bound_s(model, 4000) <= best_s
    assert counted_bound_s(PlanPricer(replace(problem, workload=replace(workload, schedule=AUTO))), 4000) <= best_s


def test_one_device_meets_the_raised_bound() -> None:
    """One GPU with all the layers and a large LM head: the program finds its time, and does not pass it."""
    model = replace(MODEL, vocab_size=32_000)
    problem = replace(
        two_kinds(global_batch=16, recompute="none", schedule="1f1b"),
        model=model,
        space=Space(exclude=("b",), max_micro_batch_size=1),
    )
    pricer = PlanPricer(problem)
    step_s = pricer.price(Plan((Pipeline((Stage.of((0,), 0, 8),), 16),))).step_time_s
    bound_s = counted_bound_s(pricer, 1000)
    assert lower_bound_s(pricer) < 0.95 * bound_s
    assert 0.98 * step_s < bound_s <= step_s


def test_memory_raises_the_bound() -> None:
    """Where no device holds enough layers, pipelines must be deep, and the bound knows what that costs."""
    roomy = two_kinds(global_batch=8, schedule="1f1b", optimizer_sharding="0", recompute="none")
    gpus = {machine.gpu for machine in roomy.cluster.machines}
    assert len(gpus) == 2
    large = replace(roomy, model=replace(MODEL, hidden_size=8192, ffn_size=28672, num_heads=64, num_kv_heads=64))
    for problem, least in ((roomy, 1.0), (large, 1.05)):
        model = PlanPricer(problem)
        assert counted_bound_s(model, 1000) >= least * lower_bound_s(model)


def test_a_clock_alone_decides_how_far_the_bound_is_raised() -> None:
    """Of a clock that counts its readings, equal limits give equal bounds, and longer ones none that are lower."""
    model = PlanPricer(two_kinds(global_batch=16, recompute="none", schedule="1f1b"))
    bounds_s = [counted_bound_s(model, readings) for readings in (0, 40, 40, 4000)]
    assert bounds_s[0] <= bounds_s[1] == bounds_s[2] <= bounds_s[3]
    assert bounds_s[0] < bounds_s[3]


def test_tables_of_the_bound_end_with_its_time() -> None:
    """Of many types, a limit of a few readings of the clock is kept, and the bound is the one that takes none."""
    model = PlanPricer(two_kinds(global_batch=64, schedule="1f1b"))
    for limit in (1, 7):
        counted = itertools.count()
        bound_s = lower_bound_s(model, float(limit), lambda counted=counted: float(next(counted)))  # type: ignore[misc]
        assert bound_s == lower_bound_s(model)
        assert next(counted) <= limit + 3


def test_boxes_cover_all_pairs() -> None:
    """Every micro-batch count and every sum lies in a box, and halving keeps it so."""
    boxes = Boxes.grid(np.array([1.0, 2.0, 7.0, 30.0]), np.array([0.0, 0.5, 2.0]))
    by_m = (boxes.high_m > boxes.low_m) & (np.arange(len(boxes)) % 2 == 0)
    for cover in (boxes, boxes.halves(by_m)):
        for m in range(1, 31):
            for s in np.linspace(0.0, 2.0, 41):
                inside = (cover.low_m <= m) & (m <= cover.high_m) & (cover.low_s <= s) & (s <= cover.high_s)
                assert inside.any()


@pytest.mark.parametrize("sharding", ["auto", "0", "1", "2", "3"])
@pytest.mark.parametrize(("max_chunks", "num_layers"), [(1, 5), (8, 9), (8, 60), (3, 80)])
def test_shapes_cover_all_pipelines(max_chunks: int, num_layers: int, sharding: str) -> None:
    """Every number of layer ranges and of stages that has a layer for each range is in a class, of either kind of
    sharding that the workload allows; from ZeRO-2 on there is one range, and as many micro-batches for all pipelines,
    so that they divide the batch."""
    problem = two_kinds(optimizer_sharding=sharding)
    model, space = replace(problem.model, num_layers=num_layers), replace(problem.space, max_chunks=max_chunks)
    shapes = families_of(replace(problem, model=model, space=space))
    for late in {"auto": (False, True), "0": (False,), "1": (False,)}.get(sharding, (True,)):
        for ranges in range(1, 2 if late else max_chunks + 1):
            for stages in range(1 if ranges == 1 else 2, num_layers // ranges + 1):
                assert any(
                    shape.least_ranges <= ranges <= shape.most_ranges
                    and shape.least_stages <= stages <= shape.most_stages
                    and shape.late == late
                    for shape in shapes
                )
    aligned = [shape.micro_batches for shape in shapes if shape.late]
    assert sorted(aligned) == ([m for m in range(1, 257) if 256 % m == 0] if sharding in ("auto", "2", "3") else [])
    assert all(shape.late == (sharding in "23") for shape in shapes if sharding != "auto")


def test_no_late_shapes_where_pipelines_interleave() -> None:
    """They would only weaken the bound: ZeRO-2 and 3 do not go with that schedule."""
    assert not any(shape.late for shape in families_of(two_kinds(schedule="interleaved")))

"""The compiled estimate is the price over the network of `tests/estimate.py`: random candidates of random problems."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import hexiopt
from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost import rings
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.frameworks import frameworks
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from solvers.compiled.plans import fitting, partition_of, plan_of, state_of
from solvers.compiled.state import SearchState, copy_rows, copy_state, forget_touched, new_state, new_work, touch
from solvers.compiled.step import FAR, evaluate, refresh
from solvers.compiled.support import unsupported
from solvers.compiled.tables import tables_of
from tests.estimate import Estimate
from tests.solvers.compiled.candidates import assert_free, like_state, random_state, random_step
from tests.solvers.drawn import drawn_problem

ROUNDING = 1e-9
INTERLEAVED = 1e-5  # TP groups whose devices interleave: the rings of their slices pass a machine in unlike orders
UNALIKE = 0.01  # sharded inside machines, pipelines that hold unlike layers: rings between machines are merged by stage
UNLIKE = 0.03  # both where links inside a machine differ: slices then cross unlike links
EXTRAPOLATED = 0.03  # micro-batches beyond those that are timed take a period each
STALE = 0.03  # messages within 1.2 % of a period, micro-batches within 12 % of those that a pipeline was timed with
MAKERS: tuple[Callable[..., SearchState], ...] = (random_state, random_state, random_state, like_state)


def candidates(
    problem: Problem, number: int, count: int, pricer: PlanPricer | None = None
) -> list[tuple[Any, Any, float]]:
    """(plan, its price, the relative error of the compiled one) of random candidates that fit."""
    pricer = pricer or PlanPricer(problem)
    assert unsupported(problem, pricer) is None
    tables, rng, rows = tables_of(pricer), random.Random(number), []
    estimate = pricer.with_network(Estimate(both_ways=problem.space.depth))
    work = new_work(tables)
    for k in range(count):
        state = MAKERS[k % len(MAKERS)](rng, tables, problem)
        assert_free(tables, state)
        objective = refresh(tables, work, state)
        if not state.plan[0]["num_pipelines"] or objective >= FAR:
            continue
        plan = with_depths(plan_of(tables, work, state, pricer.policies()), state)
        cost = estimate.price(plan)
        assert sum(pipeline.num_sequences for pipeline in plan.pipelines) == problem.workload.global_batch
        assert objective >= state.plan[0]["step_s"] > 0.0
        rows.append((plan, cost, abs(float(state.plan[0]["step_s"]) / cost.step_time_s - 1.0)))
    return rows


def with_depths(plan: Plan, state: SearchState) -> Plan:
    """The plan of a candidate with as many micro-batches in flight as that has."""
    if not plan.schedule.takes_depths:
        return plan
    lines = zip(plan.pipelines, fitting(state), strict=True)
    return replace(plan, pipelines=tuple([_with_depths(line, state.stages[p]["depth"].tolist()) for line, p in lines]))


def _with_depths(pipeline: Pipeline, depths: list[int]) -> Pipeline:
    count = len(pipeline.stages)
    stages = tuple(
        [
            stage if depth == count - s else replace(stage, in_flight=min(depth, pipeline.num_micro_batches))
            for s, (stage, depth) in enumerate(zip(pipeline.stages, depths[:count], strict=True))
        ]
    )
    return replace(pipeline, stages=stages)


def interleave(problem: Problem, plan: Plan) -> bool:
    """Whether the devices of two TP groups of a machine lie between each other."""
    by_machine: dict[int, list[tuple[int, int]]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            machine = int(problem.cluster.machine_of[stage.devices[0]])
            by_machine.setdefault(machine, []).append((min(stage.devices), max(stage.devices)))
    runs = (sorted(ranges) for ranges in by_machine.values())
    return any(low <= high for ranges in runs for (_, high), (low, _) in pairwise(ranges))


def check(
    problem: Problem,
    number: int,
    count: int = 24,
    pricer: PlanPricer | None = None,
    interleaved: float = INTERLEAVED,
    unalike: float = UNALIKE,
    near: float = ROUNDING,
) -> int:
    """All candidates cost what the pricer says and fit; how many there were."""
    rows = candidates(problem, number, count, pricer)
    for plan, cost, error in rows:
        inside = plan.sharding.groups == "machine"
        within = max(near, unalike if inside else interleaved if interleave(problem, plan) else ROUNDING)
        assert error < within, plan
        assert cost.fits or inside, plan
    return len(rows)


@pytest.mark.parametrize("number", range(10))
def test_candidates_cost_what_the_pricer_says(number: int) -> None:
    assert check(drawn_problem(number), number)


@pytest.mark.parametrize("number", range(0, 10, 3))
def test_so_they_do_with_messages_in_8_bits(number: int) -> None:
    problem = drawn_problem(number)
    assert check(replace(problem, workload=replace(problem.workload, message_precision="fp8")), number)


@pytest.mark.parametrize("zero", ["0", "1"])
@pytest.mark.parametrize("number", range(0, 10, 3))
def test_so_they_do_with_gradients_in_8_bits(number: int, zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But that all-to-alls are taken to pass as rings do, which hardly matters where few holders share a machine."""
    monkeypatch.setattr(rings, "_exchange_edges", rings._edges)
    problem = drawn_problem(number)
    workload = replace(problem.workload, gradient_precision="fp8", optimizer_sharding=zero)
    assert check(replace(problem, workload=workload), number)


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("number", range(0, 8, 2))
def test_so_they_do_where_backwards_are_split(number: int, depth: bool) -> None:
    problem = drawn_problem(number)
    workload = replace(problem.workload, schedule="zb")
    problem = replace(problem, workload=workload, space=replace(problem.space, depth=depth))
    few = replace(problem, workload=replace(workload, global_batch=8))  # all micro-batches are timed one by one
    assert check(few, number) + check(problem, number, near=EXTRAPOLATED) > 8


@pytest.mark.parametrize("number", range(0, 8, 2))
def test_so_they_do_where_depth_is_free(number: int) -> None:
    problem = drawn_problem(number)
    problem = replace(
        problem, workload=replace(problem.workload, schedule="1f1b"), space=replace(problem.space, depth=True)
    )
    few = replace(problem, workload=replace(problem.workload, global_batch=8))
    assert check(few, number) + check(problem, number, near=EXTRAPOLATED) > 8


OFF = pytest.mark.xfail(
    reason="a TP group whose devices enclose another's: the step is priced 0.06 % too short, as rings of slices enter "
    "and leave the machine by devices that the arrays take for the same",
    strict=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(n, marks=[OFF] * (n == 26)) for n in range(10, 60)])
def test_many_candidates_cost_what_the_pricer_says(number: int) -> None:
    check(drawn_problem(number), number)


@pytest.mark.parametrize(
    "space",
    [
        Space(uneven_layers=False),
        Space(uneven_batch=False),
        Space(uneven_batch=False, batch_remainder=False),
        Space(uneven_tp=False),
        Space(recompute_per_stage=False),
        Space(recompute_per_layer=False),
        Space(num_pipelines=2),
        Space(num_stages=3),
        Space(max_tp=2, memory_headroom=0.2, max_micro_batch_size=2),
        Space(tp_degrees="all"),
    ],
)
def test_so_they_do_in_every_plan_space(space: Space) -> None:
    problem = replace(drawn_problem(6), space=space)
    rows = candidates(problem, 1, 60)
    assert rows
    for plan, _, error in rows:
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        assert error < UNALIKE
        assert space.uneven_tp or len({stage.tp for stage in stages}) == 1
        assert space.recompute_per_stage or len({stage.recompute for stage in stages}) == 1
        assert space.recompute_per_layer or all(len(stage.recompute) == 1 for stage in stages)
        assert space.num_pipelines in (None, len(plan.pipelines))
        assert space.num_stages in (None, *{len(pipeline.stages) for pipeline in plan.pipelines})
        assert max(stage.tp for stage in stages) <= (space.max_tp or 64)
        for pipeline in plan.pipelines if not space.uneven_layers else ():
            lengths = [stage.num_layers for stage in pipeline.stages]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "workload",
    [
        {"schedule": "gpipe"},
        {"recompute": "full"},
        {"recompute": "selective", "optimizer_sharding": "0"},
        {"sequence_parallel": False},
        {"gradient_bytes": 4, "loss_chunk_tokens": 512, "optimizer_sharding": "1"},
        {"precision": "fp32"},
    ],
)
@pytest.mark.parametrize("number", [5, 8])
def test_so_they_do_under_every_workload(workload: dict[str, Any], number: int) -> None:
    problem = drawn_problem(number)
    check(replace(problem, workload=replace(problem.workload, **workload)), number)


@pytest.mark.parametrize("name", ["megatron", "fsdp", "torchtitan"])
def test_so_they_do_in_every_framework(name: str) -> None:
    problem = drawn_problem(8)
    assert check(problem, 3, pricer=PlanPricer(problem, frameworks()[name]))


@pytest.mark.parametrize("name", ["small_mixed", "four_machines", "campus", "two_sites"])
def test_so_they_do_on_named_clusters(name: str) -> None:
    model = replace(named_model("gpt2_345m"), num_layers=12)
    assert model.tied_embeddings
    problem = Problem(named_cluster(name), model, Workload(64, 1024))
    assert check(problem, 0, 40)


@pytest.mark.parametrize("machines", [1, 2])
def test_so_they_do_on_unlike_links_inside_machines(machines: int) -> None:
    """Two bridges between GPUs of a machine, and a slow GPU in it: rings take the links that they cross."""
    bridged = {
        "gpu": "rtx_3090",
        "num_gpus": 6,
        "intra_bandwidth_gb_per_s": 12,
        "intra_links": [{"between": [0, 1], "bandwidth_gb_per_s": 50}, {"between": [3, 4], "bandwidth_gb_per_s": 50}],
    }
    cluster = hexiopt.cluster(
        {
            "name": "bridged",
            "inter_machine": {"bandwidth_gb_per_s": 1.25, "latency_us": 50},
            "slow": {"m0:5": 0.8},
            "machines": [{"name": f"m{k}", **bridged} for k in range(machines)],
        }
    )
    for tied in (False, True):
        model = replace(named_model("gpt2_345m"), num_layers=12, tied_embeddings=tied)
        assert check(Problem(cluster, model, Workload(64, 512)), 0, 60, None, UNLIKE, UNLIKE) > 20


@pytest.mark.parametrize("number", range(6))
def test_a_walk_stays_near_the_pricer(number: int) -> None:
    problem = drawn_problem(number)
    pricer, rng = PlanPricer(problem), random.Random(number)
    tables, estimate = tables_of(pricer), pricer.with_network(Estimate())
    work = new_work(tables)
    state = next(s for s in (random_state(rng, tables, problem) for _ in range(500)) if refresh(tables, work, s) < FAR)
    errors = []
    for _ in range(40):
        forget_touched(work)
        for p in random_step(rng, tables, state):
            touch(work, p)
        if evaluate(tables, work, state, np.inf) < FAR:
            plan = plan_of(tables, work, state, pricer.policies())
            errors.append(abs(float(state.plan[0]["step_s"]) / estimate.price(plan).step_time_s - 1.0))
    assert max(errors, default=0.0) < STALE


def test_a_limit_rejects_only_what_is_above_it() -> None:
    problem = drawn_problem(4)
    tables, rng = tables_of(PlanPricer(problem)), random.Random(0)
    work = new_work(tables)
    for _ in range(30):
        state = random_state(rng, tables, problem)
        objective = refresh(tables, work, state)
        forget_touched(work)
        if state.plan[0]["num_pipelines"] and objective < FAR:
            touch(work, 0)
            assert evaluate(tables, work, state, 1.001 * objective) == pytest.approx(objective, rel=1e-3)


def test_a_plan_becomes_a_candidate_and_a_partition() -> None:
    problem = drawn_problem(4)
    pricer = PlanPricer(problem)
    tables = tables_of(pricer)
    work = new_work(tables)
    for plan, _, _ in candidates(problem, 2, 12):
        state = state_of(tables, plan, problem.cluster)
        assert_free(tables, state)
        refresh(tables, work, state)
        again = plan_of(tables, work, state, pricer.policies())
        assert [p.stages for p in again.pipelines] == [p.stages for p in plan.pipelines]
        assert partition_of(tables, state).devices() == set(plan.devices())


def test_a_copy_is_equal_and_its_own() -> None:
    problem = drawn_problem(4)
    tables, rng = tables_of(PlanPricer(problem)), random.Random(1)
    work, state, other = new_work(tables), random_state(rng, tables, problem), new_state(tables)
    refresh(tables, work, state)
    copy_state(state, other)
    assert all((a == b).all() for a, b in zip(state, other, strict=True))
    forget_touched(work)
    for p in random_step(rng, tables, other):
        touch(work, p)
    assert not (state.free == other.free).all()
    evaluate(tables, work, other, np.inf)
    copy_rows(work, other, state)
    count = int(state.plan[0]["num_pipelines"])
    for p in range(count):
        length = int(state.pipelines[p]["num_stages"])
        assert state.pipelines[p] == other.pipelines[p]
        assert (state.stages[p, :length] == other.stages[p, :length]).all()


def test_what_the_tables_do_not_speak_for_is_said() -> None:
    problem = drawn_problem(4)

    class Stranger(PlanPricer):
        pass

    assert "Stranger" in (unsupported(problem, Stranger(problem)) or "")
    alike = replace(problem, space=Space(uneven_structure=False))
    assert "alike" in (unsupported(alike, PlanPricer(alike)) or "")
    deep = replace(problem, workload=replace(problem.workload, optimizer_sharding="3"))
    assert "lockstep" in (unsupported(deep, PlanPricer(deep)) or "")

"""Brute force leaves out nothing that counts: it finds what looking at every plan finds, on the smallest problems."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.reading import Section
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers import oracle, problems
from tests.solvers.brute_force import best_plan, earliest
from tests.strategies import problems_with_plans, roomy_problems_with_plans

MOST_PLANS = 1500  # that the naive oracle prices of a drawn problem
MOST_SETS = 10_000  # of pipelines that it puts together


def machine(name: str, gpu: str, num_gpus: int, **more: Any) -> dict[str, Any]:
    links = {"intra_bandwidth_gb_per_s": 25, "intra_latency_us": 5} if num_gpus > 1 else {}
    return {"name": name, "gpu": gpu, "num_gpus": num_gpus, **links, **more}


def task(
    machines: list[dict[str, Any]], workload: Workload, space: Space, *, layers: int = 2, gib: float = 16.0, **more: Any
) -> Problem:
    """A small Llama on machines of `fast` and `slow` GPUs of `gib` and half of it."""
    data = {
        "name": "small",
        "inter_machine": {"bandwidth_gb_per_s": 1.0, "latency_us": 20},
        "machines": machines,
        "gpus": {
            "fast": {"tflops": 100, "memory_gib": gib, "hbm_gb_per_s": 1500},
            "slow": {"tflops": 40, "memory_gib": gib, "hbm_gb_per_s": 600},
        },
        **more,
    }
    cluster = cluster_from_section(Section(data, "small.yaml"))
    return Problem(cluster, replace(problems.TINY, num_layers=layers), workload, space)


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Up to four devices of any machines and network, memory from too little to plenty, any switches."""
    sizes = draw(st.sampled_from([(1, 1), (2,), (2, 1), (1, 1, 1), (3,), (1, 2), (2, 2), (3, 1), (4,), (1, 1, 2)]))
    machines = []
    for k, size in enumerate(sizes):
        entry: dict[str, Any] = {"network_interfaces": draw(st.sampled_from([1, size]))}
        if size > 1:
            entry["intra_bandwidth_gb_per_s"] = draw(st.sampled_from((2, 25, 300)))
            if draw(st.integers(0, 3)) == 0:
                entry["intra_links"] = [{"between": [0, 1], "bandwidth_gb_per_s": 50}]
        machines.append(machine("abcd"[k], draw(st.sampled_from(("fast", "slow"))), size, **entry))
    bandwidth = {"bandwidth_gb_per_s": draw(st.sampled_from((0.05, 1.0, 10.0, 100.0))), "latency_us": 20}
    more: dict[str, Any] = {"inter_machine": bandwidth}
    if len(sizes) > 1 and draw(st.integers(0, 3)) == 0:
        more["links"] = [{"from": "a", "to": "b", "bandwidth_gb_per_s": 0.5}]
    if len(sizes) > 2 and draw(st.booleans()):
        more["groups"] = [{"name": "rack", "members": ["a", "b"], "uplink_gb_per_s": 2, "latency_us": 100}]
    workload = Workload(
        global_batch=draw(st.integers(1, 5)),
        seq_len=draw(st.sampled_from((256, 2048))),
        recompute=draw(st.sampled_from((AUTO, "none", "full"))),
        schedule=draw(st.sampled_from((AUTO, "1f1b", "gpipe", "interleaved"))),
        optimizer_sharding=draw(st.sampled_from((AUTO, "0", "1"))),
    )
    if workload.schedule != "interleaved" and draw(st.booleans()):
        workload = replace(workload, optimizer_sharding=draw(st.sampled_from(("2", "3"))))
    space = Space(
        tp_degrees=draw(st.sampled_from(("powers_of_two", "all"))),
        max_micro_batch_size=draw(st.sampled_from((1, 2, 4))),
        num_pipelines=draw(st.sampled_from((None, None, None, 1, 2))),
        max_tp=draw(st.sampled_from((None, None, 1))),
        **{switch: draw(st.integers(0, 5)) > 0 for switch in SWITCHES},  # type: ignore[arg-type]
    )
    gib = draw(st.sampled_from((0.8, 0.9, 1.0, 1.2, 1.5, 16.0)))
    layers = draw(st.integers(1, 4))
    model = replace(problems.TINY, num_layers=layers, tied_embeddings=draw(st.booleans()))
    try:
        problem = task(machines, workload, space, layers=layers, gib=gib, **more)
        return replace(problem, model=model)
    except InputError:  # more pipelines than devices or sequences
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=100 if STRESS else 12, suppress_health_check=[HealthCheck.filter_too_much])
@given(tiny_problems())
def test_equals_the_naive_oracle(problem: Problem) -> None:
    try:
        plans = list(itertools.islice(oracle.every_plan(problem, MOST_SETS), MOST_PLANS + 1))
    except oracle.TooManyError:
        assume(False)
        raise
    assume(len(plans) <= MOST_PLANS)
    model = PlanPricer(problem)
    best_s = min((model.price(plan).objective for plan in plans), default=float("inf"))
    assert lower_bound_s(model, 0.2) <= best_s * (1 + 1e-9)
    plan, step_s = best_plan(problem)
    if plan is None:
        assert step_s == best_s == float("inf")
    else:
        assert step_s == pytest.approx(best_s, rel=1e-9)
        cost = model.price(plan)
        assert cost.step_time_s == step_s
        assert violations(problem, plan, cost) == []


FREE = Workload(4, 512)
BIGGER = {
    "two_and_two": ([machine("a", "fast", 2), machine("b", "slow", 2)], replace(FREE, recompute="none"), 16.0),
    "one_machine": ([machine("a", "fast", 3)], replace(FREE, global_batch=3), 16.0),
    "tight": ([machine("a", "fast", 1), machine("b", "slow", 2)], replace(FREE, global_batch=3, seq_len=2048), 1.0),
    "small": ([machine("a", "fast", 1), machine("b", "slow", 1)], replace(FREE, global_batch=3, seq_len=2048), 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BIGGER if STRESS else ["small"])
def test_equals_the_naive_oracle_with_every_freedom(name: str) -> None:
    """Replicas, layer ranges, ZeRO 0 to 3 with both groups, all at once."""
    machines, workload, gib = BIGGER[name]
    problem = task(machines, workload, Space(max_micro_batch_size=2), gib=gib)
    model, best_s, kinds = PlanPricer(problem), float("inf"), set()
    for plan in oracle.every_plan(problem):
        best_s = min(best_s, model.price(plan).objective)
        kinds.add((plan.schedule, plan.sharding))
    assert len(kinds) >= 15
    assert best_plan(problem)[1] == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("schedule", slow_but(("interleaved",), ("1f1b", "interleaved")))
def test_recompute_layer_by_layer(schedule: str) -> None:
    """Where memory binds, two policies in a stage are faster than one, and both are what the naive oracle finds."""
    problem = problems.tight()
    machines = problems.cluster(("a", "fast", 1), ("b", "slow", 1), fast_gib=1.9, slow_gib=1.9)
    workload = replace(problem.workload, schedule=schedule)
    problem = replace(problem, cluster=machines, workload=workload, space=Space(max_micro_batch_size=1))
    best_s = []
    for per_layer in (True, False):
        variant = replace(problem, space=replace(problem.space, recompute_per_layer=per_layer))
        model = PlanPricer(variant)
        best_s.append(best_plan(variant)[1])
        assert best_s[-1] == pytest.approx(
            min(model.price(plan).objective for plan in oracle.every_plan(variant)), rel=1e-9
        )
    assert best_s[0] < 0.95 * best_s[1]


def test_a_tied_matrix_is_sharded_between_the_ends_of_one_pipeline() -> None:
    """Nothing else has two holders; sharded, their ring has one pass of gradients and one of weights, not two."""
    workload = Workload(1, 128, gradient_bytes=4, recompute="none")
    problem = task([machine("a", "fast", 2)], workload, Space(num_stages=2), gib=16.0)
    problem = replace(problem, model=replace(problem.model, tied_embeddings=True))
    plan, step_s = best_plan(problem)
    assert plan is not None
    assert plan.sharding.stage == 1
    model = PlanPricer(problem)
    assert step_s == pytest.approx(min(model.price(p).objective for p in oracle.every_plan(problem)))


def test_a_model_whose_first_layer_has_no_attention_window() -> None:
    """GPT-Neo's every second layer has it, so that no GPT-Neo of one layer does; windows are not planned with."""
    problem = task([machine("a", "fast", 1), machine("b", "slow", 2)], FREE, Space(), layers=2)
    biases = {"mlp_bias": True, "tied_embeddings": True, "activation": "gelu_new"}
    neo = replace(problem.model, architecture="gpt_neo", attention_window=256, **biases)
    _, step_s = best_plan(replace(problem, model=neo))
    assert step_s == best_plan(replace(problem, model=replace(neo, attention_window=None)))[1] < float("inf")


def test_replicas_can_be_best() -> None:
    """One sequence at a time is too little for TP's overhead to pay: two devices share a micro-batch."""
    problem = problems.TINY_PROBLEMS["three_gpus"]()
    plan, step_s = best_plan(problem)
    assert plan is not None
    assert any(len(stage.parallelism.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    _, without_s = best_plan(replace(problem, space=replace(problem.space, replicas=False)))
    assert without_s > 1.04 * step_s


def test_every_plan_counts_what_there_is() -> None:
    """One layer, two sequences, micro-batches of one or two, on two devices of one machine; by hand.

    Per name: two for one device; one TP group (two orders of ranks, two micro-batch sizes), replicas (two orders, one
    size), two pipelines. Two layers add two stages in two orders at two sizes, and each layer to the stage.
    """
    workload = Workload(2, 512, recompute="none", schedule="1f1b", optimizer_sharding="0")
    problem = task([machine("a", "fast", 2)], workload, Space(max_micro_batch_size=2), layers=1)
    plans = list(oracle.every_plan(problem))
    assert len(plans) == len(set(plans)) == 2 * 2 + 2 * 2 + 2 * 1 + 1
    two = list(oracle.every_plan(replace(problem, model=replace(problem.model, num_layers=2))))
    assert len(two) == len(set(two)) == len(plans) + 2 * 2
    free = replace(problem, workload=Workload(2, 512, recompute="none", optimizer_sharding="0"))
    # Three schedules; four layers on two interleaved stages of two ranges each need both sequences apart.
    several = list(oracle.every_plan(replace(free, model=replace(free.model, num_layers=4))))
    assert sum(plan.pipelines[0].num_chunks > 1 for plan in several) == 2
    assert len(several) == 3 * (len(plans) + 3 * 2 * 2) + 2


def test_too_much_is_said_before_it_is_priced() -> None:
    problem = problems.TINY_PROBLEMS["slow_network"]()
    with pytest.raises(oracle.TooManyError):
        best_plan(problem, 100)


# The two facts that it uses.


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.one_of(problems_with_plans(), roomy_problems_with_plans()))
def test_nothing_that_a_plan_adds_makes_it_faster(drawn: tuple[Problem, Plan]) -> None:
    """Its pipelines end no earlier than alone, and its step no earlier than if all executors ended so."""
    problem, plan = drawn
    model = PlanPricer(problem)
    alone = [model.pipelines(Plan((pipeline,), plan.schedule))[0] for pipeline in plan.pipelines]
    together = model.pipelines(plan)
    for apart, inside in zip(alone, together, strict=True):
        pairs = zip(apart.executor_end_s, inside.executor_end_s, strict=True)
        assert all(alone_s <= inside_s * (1 + 1e-9) for alone_s, inside_s in pairs)
    if plan.sharding.stage < 2:
        costs = [earliest([inside, cost_alone]) for cost_alone, inside in zip(alone, together, strict=True)]
        assert model.price(plan, costs).step_time_s <= model.price(plan).step_time_s * (1 + 1e-9)

"""`exact`: its recurrences are the cost model's, its bounds hold for random plans, and its proofs equal looking at all
plans."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from experiments.app.configurations import named_model
from hexiopt.calibration.gpus import catalogue
from hexiopt.calibration.links import intra_bandwidth_gb_per_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.result import Status
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.exact.exact import Exact
from solvers.exact.exhaustive import Exhaustive
from solvers.proof.combinations import Combinations
from solvers.proof.gaps import is_provable
from solvers.proof.joint import Lines
from solvers.proof.kernels import NEVER_S, NO, chain_ends
from solvers.proof.partitions import surroundings
from solvers.proof.pipelines import WHOLE, FoundPipeline, PipelineSearch, stages_of_line
from solvers.proof.proof import ALONE, Proof
from solvers.proof.tables import ProofTables, Sharding, Surroundings
from tests import strategies
from tests.stated_pipelines import chain_ends_s

SLOW = settings(suppress_health_check=[HealthCheck.filter_too_much])
ROUNDING = 1 + 1e-9


@given(st.sampled_from((GPIPE, ONE_F_ONE_B)), st.integers(1, 6), st.integers(1, 20), st.randoms(use_true_random=False))
def test_ends_are_those_of_the_cost_model(schedule: object, p: int, count: int, rng: random.Random) -> None:
    times = [np.array([rng.uniform(0.1, 1.0) for _ in range(p)]) for _ in range(2)]
    sends = [np.array([rng.uniform(0.0, 0.8) for _ in range(p - 1)]) for _ in range(2)]
    ends_s = np.zeros(p)
    chain_ends(schedule == GPIPE, *times, *sends, p, count, ends_s)
    named = GPIPE if schedule == GPIPE else ONE_F_ONE_B
    expected = chain_ends_s(named, *(own.tolist() for own in (*times, *sends)), count)
    np.testing.assert_allclose(ends_s, expected, rtol=1e-12)


@st.composite
def priced_plans(draw: st.DrawFn) -> tuple[PlanPricer, Plan, float]:
    """A pricer, a plan of the space of proofs that fits, and its step time in seconds."""
    cluster = draw(strategies.clusters(max_gpus=3))
    machines = tuple(replace(machine, num_interfaces=1, intra_links=()) for machine in cluster.machines)
    workload = replace(
        draw(strategies.workloads(24)),
        schedule=draw(st.sampled_from(("1f1b", "gpipe"))),
        optimizer_sharding=draw(st.sampled_from(("auto", "0", "1"))),
    )
    flat = replace(cluster, machines=machines, groups=(), links=())
    problem = Problem(flat, draw(strategies.models(6)), workload, Space(replicas=False, max_micro_batch_size=4))
    plan = draw(strategies.plans(problem, plain=True))
    assume(plan.sharding.stage < 2 and plan.sharding.groups in ("all", "machine") and not check(problem, plan))
    model = PlanPricer(problem)
    cost = model.price(plan)
    assume(cost.fits)
    assert is_provable(problem)
    return model, plan, cost.step_time_s


def usage_of(tables: ProofTables, pipeline: Pipeline) -> int:
    """The number of the usage of a pipeline."""
    machine_of = tables.problem.cluster.machine_of
    named = list(tables.problem.usable_by_machine)
    counts = [0] * len(named)
    for stage in pipeline.stages:
        for device in stage.devices:
            counts[named.index(int(machine_of[device]))] += 1
    return tables.usages.number(counts)


def stages_of(tables: ProofTables, pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """Group and layers of each stage."""
    machine_of = tables.problem.cluster.machine_of
    named = list(tables.problem.usable_by_machine)
    return tuple(
        (tables.group_list.index((named.index(int(machine_of[stage.devices[0]])), stage.tp)), stage.num_layers)
        for stage in pipeline.stages
    )


def listed_pipeline(tables: ProofTables, lines: Lines, i: int) -> FoundPipeline:
    """Pipeline i of a list."""
    return FoundPipeline(tables.sizes[lines.size[i]], stages_of_line(lines, i), int(lines.num_micro_batches[i]))


@SLOW
@given(priced_plans())
def test_every_level_lets_through_what_a_plan_does(drawn: tuple[PlanPricer, Plan, float]) -> None:
    model, plan, step_s = drawn
    tables = ProofTables(model, plan.schedule)
    search = PipelineSearch(tables, step_s * ROUNDING)
    usages = [usage_of(tables, pipeline) for pipeline in plan.pipelines]
    if len(usages) == 1:
        [pipeline] = plan.pipelines
        answer, _ = search.find(ALONE, usages[0], pipeline.micro_batch_size, pipeline.num_micro_batches, WHOLE)
        assert answer != NO
        return
    parts = tuple(sorted(usages))
    sharding: Sharding = "machine" if plan.sharding.groups == "machine" else "all"
    around = surroundings(tables, parts, sharding)
    anything = Surroundings(min(tables.most_stages, tables.batch))
    chosen, lists = list[FoundPipeline](), list[tuple[int, Lines]]()
    for usage, pipeline in zip(usages, plan.pipelines, strict=True):
        assert search.most(anything, usage) >= pipeline.num_sequences
        assert search.exact_most(anything, usage) >= pipeline.num_sequences
        assert search.can_process(around[usage], usage, pipeline.num_sequences, WHOLE)
        assert search.exact_most(around[usage], usage) >= pipeline.num_sequences
        listed = search.all_pipelines(around[usage], usage, pipeline.num_sequences, 20_000)
        own = FoundPipeline(pipeline.micro_batch_size, stages_of(tables, pipeline), pipeline.num_micro_batches)
        chosen.append(own)
        assume(listed is not None)
        assert listed is not None
        lines = [listed_pipeline(tables, listed, i) for i in range(len(listed.size))]
        assert max(x.num_micro_batches for x in lines if (x.size, x.stages) == (own.size, own.stages)) >= (
            own.num_micro_batches
        )
        if usage not in (other for other, _ in lists):
            lists.append((usage, listed))
    run = Search("test", model.problem, Budget(), 0, model)
    every = Combinations(tables, run).together(
        [(listed, usages.count(usage)) for usage, listed in lists], sharding == "machine", step_s * ROUNDING
    )
    wanted = sorted((one.size, one.stages, one.num_micro_batches) for one in chosen)
    assert every is None or any(
        all(
            (a.size, a.stages) == b[:2] and a.num_micro_batches >= b[2]
            for a, b in zip(sorted(together, key=lambda one: (one.size, one.stages)), wanted, strict=True)
        )
        for together in every
    )


def random_problem(seed: int) -> Problem:
    """Up to five GPUs of one or two types, up to six layers; sometimes a network as slow as 1 Gbit/s."""
    rng, known = random.Random(seed), catalogue()
    sizes = rng.choice(((2,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (3, 2), (2, 2, 1), (4, 1), (1, 1, 2)))
    kinds = rng.sample(("h100_80gb_sxm", "a100_40gb_pcie", "l40s", "rtx_4090", "rtx_3080_ti"), 2)
    rate = rng.choice((1, 5, 25, 200)) / 8 * 1e9 if len(sizes) > 1 else float("inf")
    machines = []
    for k, size in enumerate(sizes):
        gpu = known[kinds[min(k, 1)]]
        inside = intra_bandwidth_gb_per_s(gpu) * 1e9 if size > 1 else float("inf")
        machines.append(Machine(f"m{k}", f"m{k}", gpu, size, inside, 3e-6, (), 1, rate, 2e-5))
    model = replace(named_model(rng.choice(("gpt_3b", "llama2_7b"))), num_layers=rng.randint(2, 6))
    workload = Workload(
        global_batch=rng.choice((1, 2, 3, 4, 6, 8)),
        seq_len=rng.choice((512, 1024)),
        schedule=rng.choice(("1f1b", "gpipe")),
        optimizer_sharding=rng.choice(("0", "1")),
    )
    space = Space(max_micro_batch_size=rng.choice((1, 2, 4)), replicas=False)
    return Problem(Cluster("random", tuple(machines), rate, 2e-5), model, workload, space)


def agrees(problem: Problem) -> bool:
    """Holds that there is no plan below the optimum of `exhaustive` and one at it; false where that gives up."""
    expected = Exhaustive().solve(problem, Budget(30.0, max_steps=200_000))
    if expected.status is not Status.OPTIMAL:
        return False
    model = PlanPricer(problem)
    run = Search("test", problem, Budget(600.0), 0, model)
    [proof] = [Proof(ProofTables(model, GPIPE if problem.workload.schedule == "gpipe" else ONE_F_ONE_B), run)]
    assert proof.answer(expected.objective * (1 - 1e-6), run.until()) == "none"
    assert run.best_s >= expected.objective * (1 - 1e-9)
    assert proof.answer(expected.objective * (1 + 1e-6), run.until()) == "found"
    assert run.plan is not None
    assert not check(problem, run.plan)
    return True


@pytest.mark.parametrize("seed", range(8))
def test_proofs_equal_looking_at_all_plans(seed: int) -> None:
    assert agrees(random_problem(seed))


@pytest.mark.slow
def test_proofs_equal_looking_at_all_plans_of_many_problems() -> None:
    assert sum(agrees(random_problem(seed)) for seed in range(8, 208)) >= 190


def test_the_same_steps_prove_the_same() -> None:
    problem = random_problem(3)
    one, two = (Exact().solve(problem, Budget(60.0, max_steps=400), seed=1) for _ in range(2))
    assert one.status is Status.OPTIMAL
    assert (one.plan, one.bound_s, one.steps) == (two.plan, two.bound_s, two.steps)


def test_a_bound_of_part_of_the_space_says_so() -> None:
    """Where schedules or replicas are allowed that are not proved, `optimal` is not said."""
    problem = random_problem(3)
    free = replace(problem, workload=replace(problem.workload, schedule="auto"), space=Space(max_micro_batch_size=2))
    result = Exact().solve(free, Budget(60.0, max_steps=600), seed=1)
    assert result.restricted_bound is not None
    assert result.restricted_bound.space == (
        "plans without the interleaved schedule (workload.schedule=1f1b) or replicated stages (space.replicas=false)"
    )
    assert result.restricted_gap <= 0.01
    assert result.bound_s <= result.objective


def test_other_networks_get_a_plan_without_the_proof() -> None:
    problem = random_problem(3)
    two = tuple(replace(machine, num_interfaces=2) for machine in problem.cluster.machines)
    other = replace(problem, cluster=replace(problem.cluster, machines=two))
    assert not is_provable(other)
    result = Exact().solve(other, Budget(60.0, max_steps=50), seed=1)
    assert result.plan is not None
    assert NEVER_S > result.bound_s > 0.0

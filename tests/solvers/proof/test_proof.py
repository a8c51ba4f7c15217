"""`exact`: its recurrences are the cost model's, its bounds hold for random plans, and its proofs equal looking at all
plans."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.proof.combinations import COMBINE, Combinations
from solvers.proof.gaps import is_provable, num_usages
from solvers.proof.joint import Lines
from solvers.proof.kernels import NO, chain_ends
from solvers.proof.partitions import Packings, PackingTable, case_surroundings, surroundings
from solvers.proof.pipelines import WHOLE, FoundPipeline, PipelineSearch, stages_of_line
from solvers.proof.proof import ALONE, Proof
from solvers.proof.tables import ProofTables, Sharding, Surroundings
from solvers.proof.usages import case_of
from tests import strategies
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers.brute_force import TooManyError, best_plan
from tests.solvers.proof.problems import random_problem
from tests.stated_pipelines import chain_ends_s

SLOW = settings(suppress_health_check=[HealthCheck.filter_too_much])
ROUNDING = 1 + 1e-9
STEPS = Budget(600.0, max_steps=10**9)  # in one process
MOST_PRICES = 6_000  # of brute force
EIGHT_BITS = ("message_precision", "gradient_precision")


@given(st.sampled_from((GPIPE, ONE_F_ONE_B)), st.integers(1, 6), st.integers(1, 20), st.randoms(use_true_random=False))
def test_ends_are_those_of_the_cost_model(schedule: object, p: int, count: int, rng: random.Random) -> None:
    times = [np.array([rng.uniform(0.1, 1.0) for _ in range(p)]) for _ in range(2)]
    sends = [np.array([rng.uniform(0.0, 0.8) for _ in range(p - 1)]) for _ in range(2)]
    ends_s = np.zeros(p)
    chain_ends(schedule == GPIPE, *times, *sends, p, count, ends_s)  # type: ignore[call-arg]
    named = GPIPE if schedule == GPIPE else ONE_F_ONE_B
    expected = chain_ends_s(named, *(array.tolist() for array in (*times, *sends)), count)  # type: ignore[call-arg]
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
    assume(cost.fits and num_usages(problem) <= 1000)
    assert is_provable(PlanPricer(problem))
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


def holds_layer_bounds(search: PipelineSearch, around: Surroundings, usage: int, pipeline: FoundPipeline) -> None:
    """Holds that a pipeline that is in time has no more layers on a machine than the search allows."""
    tables = search.tables
    most = search.stage_bounds.most_layers(around, pipeline.size, pipeline.num_micro_batches)
    layers = [0] * len(tables.machines)
    for group, count in pipeline.stages:
        layers[tables.group_list[group][0]] += count
    for m, (devices, num_layers) in enumerate(zip(tables.usages.vectors[usage], layers, strict=True)):
        assert num_layers <= most[m, devices]


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
    case = case_of(tables.usages.vectors[list(parts)])
    any_of_case = case_surroundings(case, anything.holders, "any")
    of_case = case_surroundings(case, len(parts), sharding)
    chosen, lists = list[FoundPipeline](), list[tuple[int, Lines]]()
    for usage, pipeline in zip(usages, plan.pipelines, strict=True):
        assert search.most_sequences(anything)[usage] >= pipeline.num_sequences
        assert search.most_sequences(any_of_case, anything)[usage] >= pipeline.num_sequences
        assert search.most_sequences(of_case, any_of_case)[usage] >= pipeline.num_sequences
        assert search.exact_most(of_case, usage) >= pipeline.num_sequences
        assert search.exact_most(anything, usage) >= pipeline.num_sequences
        assert search.can_process(around[usage], usage, pipeline.num_sequences, WHOLE)
        assert search.exact_most(around[usage], usage) >= pipeline.num_sequences
        listed = search.all_pipelines(around[usage], usage, pipeline.num_sequences, 20_000)
        found_pipeline = FoundPipeline(
            pipeline.micro_batch_size, stages_of(tables, pipeline), pipeline.num_micro_batches
        )
        chosen.append(found_pipeline)
        for known in (anything, of_case, around[usage]):
            holds_layer_bounds(search, known, usage, found_pipeline)
        assume(listed is not None)
        assert listed is not None
        lines = [listed_pipeline(tables, listed, i) for i in range(len(listed.size))]
        assert max(
            x.num_micro_batches for x in lines if (x.size, x.stages) == (found_pipeline.size, found_pipeline.stages)
        ) >= (found_pipeline.num_micro_batches)
        if usage not in (other for other, _ in lists):
            lists.append((usage, listed))
    run = Search("test", model.problem, STEPS, 0, model)
    every = Combinations(tables, run).together(
        [(listed, usages.count(usage)) for usage, listed in lists],
        sharding == "machine",
        step_s * ROUNDING,
        COMBINE,
        2_000,
    )
    wanted = sorted((choice.size, choice.stages, choice.num_micro_batches) for choice in chosen)
    assert every is None or any(
        all(
            (a.size, a.stages) == b[:2] and a.num_micro_batches >= b[2]
            for a, b in zip(
                sorted(together, key=lambda candidate: (candidate.size, candidate.stages)), wanted, strict=True
            )
        )
        for together in every
    )


@settings(max_examples=30)
@given(st.integers(1, 17), st.sampled_from(("all", "machine")), st.randoms(use_true_random=False))
def test_equal_machines_process_alike(usage: int, sharding: Sharding, rng: random.Random) -> None:
    """What is known of a usage in surroundings is known of it with equal machines in another order."""
    problem = random_problem(11)
    gpu = problem.cluster.machines[0].gpu
    machines = [Machine(f"m{k}", f"m{k}", gpu, size, 24e9, 3e-6, (), 1, 3e9, 2e-5) for k, size in enumerate((2, 1, 2))]
    workload = replace(problem.workload, global_batch=6, schedule="1f1b")
    tables = ProofTables(
        PlanPricer(replace(problem, cluster=Cluster("c", tuple(machines), 3e9, 2e-5), workload=workload)), ONE_F_ONE_B
    )
    assert tables.usages.alike == [(0, 2), (1,)]
    forced, counts = [rng.random() < 0.5 for _ in range(3)], [rng.randrange(3) for _ in range(3)]
    whole = tuple(m for m in range(3) if forced[m] and rng.random() < 0.5)
    inside = tuple(counts) if sharding == "machine" else ()
    around = Surroundings(3, sharding, tuple(forced), 2, whole, inside)
    turned = Surroundings(3, sharding, tuple(forced[::-1]), 2, tuple(sorted(2 - m for m in whole)), inside[::-1])
    other = tables.usages.number(tables.usages.vectors[usage][::-1].tolist())
    assert tables.representative(around, usage) == tables.representative(turned, other)
    search = PipelineSearch(tables, rng.uniform(0.25, 0.8))
    for count in range(1, 7):
        expected, rows = search.find(around, usage, 1, count, WHOLE, 5_000)
        answer, others = search.find(*tables.representative(around, usage), 1, count, WHOLE, 5_000)
        assert (expected, len(rows)) == (answer, len(others))


def proof_of(run: Search, packings: type[Packings]) -> Proof:
    """A proof of the one schedule of a problem."""
    schedule = GPIPE if run.problem.workload.schedule == "gpipe" else ONE_F_ONE_B
    return Proof(ProofTables(run.exact_pricer, schedule), run, packings)


def agrees(problem: Problem, budget: Budget = STEPS, packings: type[Packings] = PackingTable) -> bool:
    """Holds that there is no plan below the optimum by brute force and one at it; false where there is too much to
    price, or no plan."""
    try:
        best, optimum_s = best_plan(problem, MOST_PRICES)
    except TooManyError:
        return False
    if best is None:
        return False
    run = Search("test", problem, budget, 0)
    proof = proof_of(run, packings)
    assert proof.answer(optimum_s * (1 - 1e-6), run.until()) == "none"
    assert run.best_s >= optimum_s * (1 - 1e-9)
    assert proof.answer(optimum_s * (1 + 1e-6), run.until()) == "found"
    assert run.plan is not None
    assert not check(problem, run.plan)
    refutes_ever_shorter_times(problem, optimum_s, budget, packings)
    return True


def refutes_ever_shorter_times(problem: Problem, optimum_s: float, budget: Budget, packings: type[Packings]) -> None:
    """Holds that one proof, asked again below each plan that it finds, remembers what it refuted and ends at the
    optimum."""
    run = Search("test", problem, budget, 0)
    proof = proof_of(run, packings)
    limit_s, answers = 3 * optimum_s, list[str]()
    while not answers or answers[-1] == "found":
        answers.append(proof.answer(limit_s, run.until()))
        limit_s = min(run.best_s, limit_s) * (1 - 1e-6)
    assert answers[-1] == "none"
    assert run.best_s <= optimum_s * (1 + 2e-6)
    for share in (0.5, 0.9, 0.7):  # weaker targets begin with what stronger ones have refuted
        assert proof.answer(optimum_s * share, run.until()) == "none"


@pytest.mark.parametrize("seed", slow_but((1, 3, 6), range(8)))
def test_proofs_equal_looking_at_all_plans(seed: int) -> None:
    assert agrees(random_problem(seed))


@pytest.mark.parametrize("seed", slow_but((3,), (3, 5, 11)))
def test_proofs_of_several_processes_equal_looking_at_all_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solvers.core.workers.usable_cores", lambda: 3)
    for name in ("_MANY_USAGES", "_WORTH_A_PROCESS"):
        monkeypatch.setattr(f"solvers.proof.proof.{name}", 1)
    assert agrees(random_problem(seed), Budget(600.0))


@pytest.mark.parametrize(
    ("seed", "what"),
    slow_but([(3, "message_precision"), (5, "gradient_precision")], product((3, 5, 7), EIGHT_BITS)),
)
def test_proofs_of_8_bits_do_too(seed: int, what: str) -> None:
    problem = random_problem(seed)
    assert agrees(replace(problem, workload=replace(problem.workload, **{what: "fp8"})))


@pytest.mark.slow
def test_proofs_equal_looking_at_all_plans_of_many_problems() -> None:
    seeds = range(8, 208, 1 if STRESS else 5)
    assert sum(agrees(random_problem(seed)) for seed in seeds) >= (180 if STRESS else 35)

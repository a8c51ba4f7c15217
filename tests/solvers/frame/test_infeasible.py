"""Why there is no plan: proofs are right, texts name the device, the GiB and a remedy."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer, PricerFeatures
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from hexiopt.solving.result import Result, Status
from solvers.core.search import Search
from solvers.frame import infeasible
from solvers.frame.infeasible import conclude, nearest_change
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.brute_force import best_plan


def conclude_search(problem: Problem, *offered: Plan) -> Result:
    """What a search that has found nothing says, after it was offered some plans."""
    search = Search("test", problem, Budget(), 0)
    for plan in offered:
        search.offer(plan)
    return conclude(search)


def small(gib: float, layers: int, space: Space, machines: tuple[tuple[str, str, int], ...]) -> Problem:
    base = problems.tight()
    cluster = problems.cluster(*machines, fast_gib=gib, slow_gib=gib)
    workload = replace(base.workload, global_batch=2, recompute="full", optimizer_sharding="0", seq_len=512)
    return Problem(cluster, replace(base.model, num_layers=layers, vocab_size=500), workload, space)


@pytest.mark.parametrize("tp_degrees", slow_but(("all",), ("powers_of_two", "all")))
@pytest.mark.parametrize(
    "machines",
    [(("a", "fast", 3),), (("a", "fast", 2), ("b", "slow", 1)), (("a", "fast", 1), ("b", "fast", 1))],
)
def test_infeasible_is_never_said_of_what_fits(machines: tuple[tuple[str, str, int], ...], tp_degrees: str) -> None:
    """Over memory sizes from too little to enough, against all plans."""
    space = replace(problems.SMALL_SPACE, tp_degrees=tp_degrees)
    fits, proven = set(), set()
    for layers in (4, 5):
        for tenth in range(4, 16):
            problem = small(tenth / 10, layers, space, machines)
            status = conclude_search(problem).status
            _, best = best_plan(problem)
            fits.add(best < float("inf"))
            proven.add(status is Status.INFEASIBLE)
            assert status is not Status.INFEASIBLE or best == float("inf"), (tenth, layers)
    assert fits == proven == {True, False}


def test_the_text_of_a_proof() -> None:
    layer, model = conclude_search(problems.hopeless_layer()), conclude_search(problems.hopeless())
    assert (layer.status, model.status) == (Status.INFEASIBLE, Status.INFEASIBLE)
    assert "not one layer of tiny fits a device" in layer.reason
    assert "of the 2000 layers of tiny" in model.reason
    for reason in (layer.reason, model.reason):
        assert "GiB" in reason
        assert "it fits with" in reason or "choose a smaller model" in reason
        assert "\n" not in reason


def test_the_text_of_a_proof_ends_in_what_the_states_take() -> None:
    problem = problems.hopeless()
    memory_gib = sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in problem.cluster.machines) / 2**30
    for gradient_bytes, each in ((2, 16), (4, 18)):
        workload = replace(problem.workload, precision="fp16", gradient_bytes=gradient_bytes)
        states_gib = each * problem.model.num_params / 2**30
        reason = conclude_search(replace(problem, workload=workload)).reason
        sizes = f"{problem.model.num_params / 1e9:.3g} B = {states_gib:.4g} GiB of {memory_gib:.4g} GiB"
        assert reason.endswith(f"; states of {each} B a parameter × {sizes}; hexiopt fit says what does")


def test_the_nearest_plan_names_its_fullest_device() -> None:
    """The first stage of six layers is over memory; of two plans the nearer one is named."""
    problem = replace(problems.tight(), space=Space(num_pipelines=1))
    whole = Pipeline((Stage.of((0,), 0, 5, "full"),), 4)
    halves = Pipeline((Stage.of((0,), 0, 1, "full"), Stage.of((1,), 1, 5, "full")), 4)
    plans = [Plan((pipeline,), ONE_F_ONE_B, Sharding(0)) for pipeline in (halves, whole)]
    model = Search("test", problem, Budget(), 0).pricer
    costs = [model.price(plan) for plan in plans]
    nearer = min(range(2), key=lambda k: costs[k].excess_bytes)
    assert costs[nearer].excess_bytes > 0
    result = conclude_search(problem, *plans)
    assert result.status is Status.NOT_FOUND
    assert result.plan is None
    assert ("b:0", "a:0")[nearer] in result.reason
    assert f"{costs[nearer].excess_bytes / 2**30:.2f} GiB" in result.reason
    assert "it fits with the constraints left out" in result.reason


def test_a_plain_plan_that_fits_is_the_result() -> None:
    """Of a search of the whole plan space whose budget ended too early, also where no freedom is left."""
    problem = replace(problems.easy(), space=Space(**dict.fromkeys(SWITCHES, False)))
    for budget in (Budget(1e-9), Budget(99.0, 3)):
        result = conclude(Search("test", problem, budget, 0))
        assert result.status is Status.FEASIBLE
        assert result.plan is not None
        assert violations(problem, result.plan, result.cost) == []
        assert result.reason == ""


def test_another_solver_is_proposed_beside_more_budget() -> None:
    """Of a search that does not cover the whole plan space; only without its budget spent does it know more."""
    for budget, raised in (
        (Budget(1e-9), "raise solver.time_limit_s above 1e-09"),
        (Budget(99.0, 3), "raise solver.max_steps above 3"),
        (Budget(), ""),
    ):
        search = Search("test", problems.easy(), budget, 0)
        search.remedy = "try another"
        search.steps = budget.max_steps or 0
        result = conclude(search)
        assert result.plan is None
        if raised:
            met = f"the budget ended before one of those that fit was met; {raised}"
        else:
            met = "the plain plans that fit are outside its plan space"
        assert result.reason.endswith(f"{met}; try another")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"recompute": "none"}, "workload.recompute=auto"),
        ({"optimizer_sharding": "0"}, "workload.optimizer_sharding=auto"),
        ({"gradient_bytes": 4}, "workload.gradient_bytes=2"),
        ({"seq_len": 2048}, "workload.seq_len=1024"),
        ({}, "1 more machine like a"),
    ],
)
def test_the_remedy_is_the_least_change_that_fits(change: dict[str, object], remedy: str) -> None:
    """From memory for nothing to memory for all: at some size in between this change is the one that helps."""
    reasons = []
    for gib in range(1, 40):
        machines = (("a", "fast", 2), ("b", "slow", 1))
        base = small(gib / 20, 4, Space(), machines)
        free = replace(base.workload, recompute="auto", optimizer_sharding="auto", seq_len=1024)
        problem = replace(base, workload=replace(free, **change))
        reasons.append(conclude_search(problem).reason)
    assert any(f"it fits with {remedy}" in reason for reason in reasons), reasons


def test_the_remedy_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does other work all the time between two looks at the clock."""
    problem = small(1.0, 4, Space(max_tp=1), (("a", "fast", 2), ("b", "slow", 1)))
    calm = nearest_change(problem)
    assert "it fits with" in calm
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 1000.0).__next__)
    assert nearest_change(problem) == calm


def test_looking_for_a_remedy_ends_by_the_devices_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change has its turn; then it ends."""
    base = problems.easy()
    problem = replace(base, workload=replace(base.workload, recompute="none", optimizer_sharding="0"))
    placed: list[tuple[Problem, int]] = []

    def none_fits(changed: Problem, compiled: bool) -> Iterator[bool]:
        while True:
            placed.append((changed, len(changed.usable_devices)))
            yield False

    monkeypatch.setattr(infeasible, "_fitting", none_fits)
    assert "choose a smaller model" in nearest_change(problem)
    changes = [changed for changed, _ in infeasible._changes(problem)]
    assert [changed for changed, _ in itertools.groupby(placed, key=lambda pair: pair[0])] == changes
    assert sum(devices for _, devices in placed) <= infeasible._PLACED


class Foreign:
    """Another cost model: ours behind its own name, with nothing but what a search may ask of it."""

    features = PricerFeatures()
    _ASKED = ("problem", "tp_group", "stage_s", "max_layers", "message_s", "policies", "pipelines", "price")

    def __init__(self, model: PlanPricer) -> None:
        for name in self._ASKED:
            setattr(self, name, getattr(model, name))


def test_a_foreign_cost_model_gets_a_reason_too() -> None:
    problem = problems.hopeless()
    search = Search("test", problem, Budget(), 0, Foreign(PlanPricer(problem)))
    result = conclude(search)
    assert result.status is Status.NOT_FOUND  # proofs are about our own memory model
    assert result.reason


def test_a_foreign_cost_model_that_says_our_memory_is_its_own_gets_no_proof_of_ours() -> None:
    problem = problems.hopeless()
    ours = PlanPricer(problem)
    foreign = Foreign(ours)
    foreign.features = PricerFeatures(stages=ours.stages)
    assert conclude(Search("test", problem, Budget(), 0, foreign)).status is Status.NOT_FOUND
    assert conclude(Search("test", problem, Budget(), 0, ours)).status is Status.INFEASIBLE


def test_a_found_plan_needs_no_reason() -> None:
    problem = problems.loose()
    result = conclude_search(problem, Plan((Pipeline((Stage.of((0,), 0, 4),), 4),)))
    assert (result.status, result.reason) == (Status.FEASIBLE, "")
    assert result.plan is not None

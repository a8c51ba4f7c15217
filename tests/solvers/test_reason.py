"""Why there is no plan: proofs are right, texts name the device, the GiB and a remedy."""

from dataclasses import replace

import pytest

from experiments.configurations import named_cluster, named_model
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.result import Result, Status
from hexiopt.schedules.registry import ONE_F_ONE_B
from solvers.core.search import Budget, Search
from solvers.frame.infeasible import explain, nearest_change
from tests.solvers import oracle, problems


def explained(problem: Problem, *offered: Plan) -> Result:
    """What a search that has found nothing says, after it was offered some plans."""
    search = Search("test", problem, Budget(), 0)
    for plan in offered:
        search.offer(plan)
    return explain(search)


def small(gib: float, layers: int, space: Space, machines: tuple[tuple[str, str, int], ...]) -> Problem:
    base = problems.tight()
    own = problems.cluster(*machines, fast_gib=gib, slow_gib=gib)
    workload = replace(base.workload, global_batch=2, recompute="full", optimizer_sharding="0", seq_len=512)
    return Problem(own, replace(base.model, num_layers=layers, vocab_size=500), workload, space)


@pytest.mark.parametrize("tp_degrees", ["powers_of_two", "all"])
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
            status = explained(problem).status
            best = oracle.best_step_s(problem)
            fits.add(best < float("inf"))
            proven.add(status is Status.INFEASIBLE)
            assert status is Status.NOT_FOUND or best == float("inf"), (tenth, layers)
    assert fits == proven == {True, False}


def test_the_text_of_a_proof() -> None:
    layer, model = explained(problems.hopeless_layer()), explained(problems.hopeless())
    assert (layer.status, model.status) == (Status.INFEASIBLE, Status.INFEASIBLE)
    assert "not one layer of tiny fits a device" in layer.reason
    assert "of the 2000 layers of tiny" in model.reason
    for reason in (layer.reason, model.reason):
        assert "GiB" in reason
        assert "it fits with" in reason or "choose a smaller model" in reason
        assert "\n" not in reason


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
    result = explained(problem, *plans)
    assert result.status is Status.NOT_FOUND
    assert result.plan is None
    assert ("b:0", "a:0")[nearer] in result.reason
    assert f"{costs[nearer].excess_bytes / 2**30:.2f} GiB" in result.reason
    assert "it fits with the constraints left out" in result.reason


def test_a_budget_too_small_is_the_reason_where_plans_fit() -> None:
    """Also where they are few, since no freedom is left."""
    problem = replace(problems.easy(), space=Space(**dict.fromkeys(SWITCHES, False)))
    for budget, raised in ((Budget(0.25), "time_limit_s above 0.25"), (Budget(99.0, 3), "max_steps above 3")):
        reason = explain(Search("test", problem, budget, 0)).reason
        assert reason.startswith("no plan found in 0 steps: the budget ended")
        assert reason.endswith(f"raise solver.{raised}")


def test_another_solver_is_proposed_beside_more_budget() -> None:
    """Of a search that does not cover the whole plan space; only without its budget spent does it know more."""
    problem, remedy = problems.easy(), "try another"
    spent = explain(Search("test", problem, Budget(1e-9), 0), remedy).reason
    assert spent.endswith(
        "the budget ended before one of those that fit was met; raise solver.time_limit_s above 1e-09; try another"
    )
    left = explain(Search("test", problem, Budget(), 0), remedy).reason
    assert left.endswith("the plain plans that fit are outside its plan space; try another")


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
        reasons.append(explained(problem).reason)
    assert any(f"it fits with {remedy}" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("cluster", "model", "remedy"),
    [("small_mixed", "llama3_70b", "16 more machines like old"), ("local_cpu", "llama2_13b", "12 more machines like")],
)
def test_more_machines_are_found_where_many_are_needed(cluster: str, model: str, remedy: str) -> None:
    """However busy the processor is."""
    problem = Problem(named_cluster(cluster), named_model(model), Workload(global_batch=64))
    assert nearest_change(problem).startswith(f"it fits with {remedy}")


def test_what_no_number_of_machines_helps_says_how_many_were_tried() -> None:
    said = "no change was seen to fit (the last tried: 96 more machines like a (2 × fast)); choose a smaller model"
    assert nearest_change(problems.hopeless_layer()) == said


class Foreign:
    """Another cost model: ours behind its own name, with nothing but what a search may ask of it."""

    sends_occupy_stages = False
    _ASKED = ("problem", "site", "stage_s", "max_layers", "hop_s", "policies", "pipelines", "price")

    def __init__(self, model: CostModel) -> None:
        for name in self._ASKED:
            setattr(self, name, getattr(model, name))


def test_a_foreign_cost_model_gets_a_reason_too() -> None:
    problem = problems.hopeless()
    search = Search("test", problem, Budget(), 0, Foreign(CostModel(problem)))
    result = explain(search)
    assert result.status is Status.NOT_FOUND  # proofs are about our own memory model
    assert result.reason


def test_a_found_plan_needs_no_reason() -> None:
    problem = problems.loose()
    result = explained(problem, Plan((Pipeline((Stage.of((0,), 0, 4),), 4),)))
    assert (result.status, result.reason) == (Status.FEASIBLE, "")
    assert result.plan is not None

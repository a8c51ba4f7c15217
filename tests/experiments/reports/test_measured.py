"""The table of measured beside predicted: memory where ranks are GPUs."""

from rich.console import Console

from experiments.reports.measured import MeasuredOperation, MeasuredRank, measured_table
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.report.facts import PlanFacts
from hexiopt.report.style import milliseconds
from hexiopt.units import GIB
from tests.solvers.problems import loose


def lines(*peaks: int | None) -> list[str]:
    problem = loose()
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), 4),))
    ranks = [
        MeasuredRank(0, k, 0, problem.cluster.device_name(k), (MeasuredOperation("forward", 0, 0, 1.0, 1.5),), peak)
        for k, peak in enumerate(peaks)
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(measured_table(PlanFacts(problem, plan, PlanPricer(problem).price(plan)), ranks))
    return captured.get().splitlines()


def test_memory_is_shown_beside_the_prediction_without_its_reserve() -> None:
    header, first, second, *_ = lines(3 * GIB, int(5.26 * GIB))
    assert header.split()[-3:] == ["GiB", "predicted", "measured"]
    problem = loose()
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), 4),))
    for s, (line, peak) in enumerate(((first, "3.0"), (second, "5.3"))):
        memory = PlanPricer(problem).price(plan).pipelines[0].stages[s].memory
        assert line.split()[-2:] == [f"{memory.tensors / GIB:.1f}", peak]


def test_a_row_for_each_replica_with_its_devices_in_the_order_of_the_plan() -> None:
    problem = loose()
    replicas = (Replica((1, 0), 1), Replica((2,), 1))
    plan = Plan((Pipeline((Stage.of_replicas(replicas, ((0, 4),)),), 2, 2),))
    ranks = [
        MeasuredRank(0, 0, r, problem.cluster.device_name(d), (MeasuredOperation("forward", 0, 0, 1.0, 1.0 + took_s),))
        for r, d, took_s in ((1, 2, 0.2), (0, 0, 0.5), (0, 1, 0.4))
    ]
    cost = PlanPricer(problem).price(plan)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(measured_table(PlanFacts(problem, plan, cost), ranks))
    _, first, second, *_ = captured.get().splitlines()
    name = problem.cluster.device_name
    assert first.split()[:3] == ["0·0.0", f"{name(1)},", name(0)]
    assert second.split()[:2] == ["0·0.1", name(2)]
    assert [line.split()[-3] for line in (first, second)] == ["250.0", "100.0"], "ms of the two micro-batches"
    each = [
        milliseconds(executor.forward_s + executor.backward_s) for executor in cost.pipelines[0].stages[0].executors
    ]
    assert [line.split()[-4] for line in (first, second)] == each


def test_other_devices_have_no_columns_of_memory() -> None:
    assert "GiB" not in lines(None, None)[0]

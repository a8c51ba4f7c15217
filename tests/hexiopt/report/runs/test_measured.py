"""The table of measured beside predicted: memory where ranks are GPUs."""

from rich.console import Console

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.report.runs.measured import MeasuredOperation, MeasuredRank, measured_table
from hexiopt.units import GIB
from tests.solvers.problems import loose


def lines(*peaks: int | None) -> list[str]:
    problem = loose()
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), 4),))
    ranks = [
        MeasuredRank(0, k, 0, f"gpu{k}", (MeasuredOperation(False, 0, 0, 1.0, 1.5),), peak)
        for k, peak in enumerate(peaks)
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(measured_table(problem, plan, PlanPricer(problem).price(plan), ranks))
    return captured.get().splitlines()


def test_memory_is_shown_beside_the_prediction_without_its_reserve() -> None:
    header, first, second, *_ = lines(3 * GIB, int(5.26 * GIB))
    assert header.split()[-3:] == ["GiB", "predicted", "measured"]
    problem = loose()
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), 4),))
    for s, (line, peak) in enumerate(((first, "3.0"), (second, "5.3"))):
        memory = PlanPricer(problem).price(plan).pipelines[0].stages[s].memory
        assert line.split()[-2:] == [f"{memory.tensors / GIB:.1f}", peak]


def test_other_devices_have_no_columns_of_memory() -> None:
    assert "GiB" not in lines(None, None)[0]

"""The clock ends when the event simulation does, on many random plans: all schedules, backwards whole and split, with
other depths, messages in 8 bits, replicas and links that are shared."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import links_of, stage_times
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import SCHEDULES, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule, stage_orders
from hexiopt.simulation.engine import Step
from tests.hexiopt.cost.test_late_weights import Ends, choose_orders, ends_of, run_step, split_plan
from tests.slow import slow_but
from tests.strategies import problems_with_depths, problems_with_plans, roomy_problems_with_plans

USUAL = problems_with_plans() | roomy_problems_with_plans()
CHUNKED = roomy_problems_with_plans().filter(lambda pair: any(line.num_chunks > 1 for line in pair[1].pipelines))
PLANS = USUAL | CHUNKED | problems_with_depths() | problems_with_depths(SPLIT_SCHEDULES[0])
MOST_ERROR = 1e-12  # of the end of an executor, relative


def simulate(placed: list[PlacedPipeline]) -> Ends:
    """When executors end by the event simulation, which decides itself what split backwards put off."""
    if placed[0].schedule.splits:
        return choose_orders(placed)[0]
    links = [link for p, line in enumerate(placed) for link in links_of(p, line)]
    running = {p: stage_times(line) for p, line in enumerate(placed)}
    orders = {p: stage_orders(line.schedule, line.graph.positions()) for p, line in enumerate(placed)}
    return run_step(Step(running, placed[0].schedule, links, orders))[0]


def worst_errors(count: int) -> tuple[list[float], Counter[str]]:
    """The largest relative difference between clock and simulation of each of `count` plans; how many have what."""
    errors: list[float] = []
    features: Counter[str] = Counter()
    drawn: Counter[Schedule] = Counter()

    @seed(count)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(PLANS)
    def compare(pair: tuple[Problem, Plan]) -> None:
        problem, plan = pair
        if not plan.schedule.splits and plan.sharding.stage < 2:
            drawn[plan.schedule] += 1
            if drawn[plan.schedule] % 2:  # of those that can be, every second one of each schedule
                plan = split_plan(plan)
        model = PlanPricer(problem)
        placed = list(model.place_pipelines(plan))
        clock_s, engine_s = ends_of(model.network(placed)), simulate(placed)
        assert clock_s.keys() == engine_s.keys()
        errors.append(max(abs(clock_s[at] - end_s) / end_s for at, end_s in engine_s.items()))
        features.update([str(plan.schedule)])
        features["depths"] += any(plan.other_depths())
        features["8 bits"] += problem.workload.message_precision == "fp8"
        features["pipelines"] += len(plan.pipelines) > 1

    compare()
    return errors, features


@pytest.mark.parametrize("count", slow_but([60], [60, 600]))
def test_the_clock_ends_when_the_simulation_does(count: int) -> None:
    errors, features = worst_errors(count)
    assert len(errors) >= count
    assert max(errors) <= MOST_ERROR
    wanted = [*map(str, (*SCHEDULES, *SPLIT_SCHEDULES)), "depths", "8 bits", "pipelines"]
    assert all(features[name] >= count / 200 for name in wanted), features


if __name__ == "__main__":
    all_errors, having = worst_errors(2000)
    print(f"{len(all_errors):,} plans, largest relative difference {max(all_errors):.2g}; {dict(having)}")

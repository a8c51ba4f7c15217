"""The clock: equal pipelines are one class, sets that share nothing are apart, and what waits for ever is refused.

Its ends are those of the event simulation, on random small plans (`test_sharing.py`) and on searched ones here.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import pytest

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.clock.folding import Folding, Lane, PipelineLanes, components, fold
from hexiopt.cost.executors.network_load import PlacedMessage, Route
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.errors import InputError
from hexiopt.plan.messages import executor_links, messages_of
from hexiopt.schedules.gpipe import GPipe
from hexiopt.schedules.graph import PipelineGraph, pipeline_graph
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Programme, Schedule, StagePosition
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.hexiopt.simulation.test_many_plans import simulate
from tests.slow import slow_but
from tests.solvers.drawn import drawn_problem

SAMPLES = ((1,), (1,))


def graph(forward_s: float = 1.0, schedule: Schedule = ONE_F_ONE_B) -> PipelineGraph:
    """Two stages and four micro-batches; backwards take twice as long as forwards."""
    times = ((forward_s, 2 * forward_s),)
    return pipeline_graph(schedule, 2, 4, (0, 1), (times, times), executor_links(SAMPLES, False))


def lanes(*resources: int) -> tuple[Lane, Lane]:
    """Ahead over one resource and back over another, half a second each."""
    ahead, back = (Lane(0.0, inf, ((resource, 0.5),)) for resource in resources)
    return ahead, back


def place(of: PipelineGraph, *resources: int) -> PlacedPipeline:
    """A pipeline over `lanes`."""
    messages = messages_of(SAMPLES, False)
    routes = [Route(((resource, 0.5),), 0.0, 0.0) for resource in resources]
    ways = tuple(PlacedMessage(message, route, 1.0) for message, route in zip(messages, routes, strict=True))
    return PlacedPipeline(of.schedule, of.num_micro_batches, (), ways, messages, PipelineLanes.of(ways), of)


def test_pipelines_with_like_company_are_one_class() -> None:
    """Two over an interface and two over another: each message meets one like it."""
    folding = fold([graph()] * 4, [lanes(7, 8), lanes(7, 8), lanes(1, 2), lanes(1, 2)])
    assert folding == Folding([0, 0, 0, 0], [lanes(0, 1)], [((2,), (2,))])


def test_pipelines_with_unlike_company_are_not() -> None:
    """The third shares its way ahead with a slower one; all others are alone."""
    folding = fold([graph(), graph(), graph(), graph(3.0)], [lanes(0, 1), lanes(2, 3), lanes(4, 5), lanes(4, 6)])
    assert folding.class_of == [0, 0, 1, 2]
    assert components([[r for lane in way for r, _ in lane.needs] for way in folding.lanes]) == [[0], [1, 2]]


def test_company_slows_down_and_equal_company_equally() -> None:
    """By hand: stage 1 waits for the third and the fourth forward, which come a second after the answer to the first
    and the second; a message that meets another takes a second, alone half of it."""
    clock = Clock()
    (alone,) = clock.times([place(graph(), 0, 1)])
    assert alone == ((17.0, 14.5), (0.5, 0.5), ())
    assert clock.times([place(graph(), 0, 1), place(graph(), 2, 3)]) == [alone, alone]
    together = clock.times([place(graph(), 0, 1), place(graph(), 0, 1)])
    assert together == [((19.0, 16.0), (1.0, 1.0), ())] * 2
    clock.forget()
    assert clock.times([place(graph(), 5, 1), place(graph(), 5, 1)]) == together


@pytest.mark.parametrize("number", slow_but(range(3), range(24)))
def test_searched_plans_end_when_the_event_simulation_says(number: int) -> None:
    """Plans of many equal pipelines among them, of which one runs for all, here and in what is drawn; to the last
    digit."""
    problem = drawn_problem(number)
    plan = make_solver("local_search").solve(problem, Budget(3600.0, 40), seed=number).plan
    if plan is None:
        pytest.skip("the search finds no plan in so few steps")
    fair = PlanPricer(problem, network=FairShares())
    cost = fair.price(plan)
    one_by_one = simulate(list(fair.place_pipelines(plan)))
    for p, pipeline in enumerate(cost.pipelines):
        ends = {(s.stage, s.executor): s.end_s for s in fair.spans(plan, cost, p) if not s.is_message}
        assert tuple(ends[at] for at in sorted(ends)) == pipeline.executor_end_s
        assert {at[1:]: end_s for at, end_s in one_by_one.items() if at[0] == p} == ends


def test_an_order_that_waits_for_itself_is_refused() -> None:
    """The first stage wants its backwards first; they come when its forwards have been through the second."""

    @dataclass(frozen=True)
    class Backwards(GPipe):
        name: ClassVar[str] = "backwards"

        def programme(self, at: StagePosition) -> Programme:
            return super().programme(at)[:: -1 if at.first else 1]

    with pytest.raises(InputError, match="schedule backwards: operations wait for each other"):
        Clock().times([place(graph(schedule=Backwards()), 0, 1)])

"""A finer simulation of one training step: messages share the network while they are under way.

The cost model lets all messages of a step share an interface all the time, each taking as long as if all others of its
interface came along. Here a message shares it with those only that are under way at once, by max-min fairness
(`simulation/fair_shares.py`). Nothing searches with it yet; next to a price it says how much of it is waiting for
messages that never meet.
"""

from collections.abc import Iterator, Sequence

from hexiopt.cost.clock.clock import Clock, lanes_of
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import StageOrders, pipeline_costs, shared_message_s, stage_orders, stage_times
from hexiopt.memo import Memo
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import SimulatedLink, Span, Step, link_of


def simulation_s(pricer: PlanPricer, plan: Plan) -> float:
    """The step of `plan` in seconds over a network of fair shares. Raises InputError as `pricer.price`."""
    return pricer.with_network(FairShares()).price(plan).step_time_s


class FairShares:
    """A network (`NetworkModel`) whose resources are shared by those messages that are under way at once.

    Pipelines end by the clock; their `message_s` are those of static shares. Spans are of the event simulation, and
    those of the last plan are remembered.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._spans = Memo(self._simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        return pipeline_costs(placed, shared_message_s(placed), self._clock.runs(placed))

    def orders(self, placed: Sequence[PlacedPipeline]) -> list[StageOrders]:
        """As of `NetworkModel`."""
        return stage_orders(placed, self._clock.runs(placed))

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return (span for span in self._spans[tuple(placed)] if span.pipeline == number)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._clock.forget()
        self._spans.clear()

    def _simulate(self, placed: tuple[PlacedPipeline, ...]) -> tuple[Span, ...]:
        """All spans of pipelines that share the network, in the order in which they end."""
        schedule, links = placed[0].schedule, [link for p, line in enumerate(placed) for link in links_of(p, line)]
        running = {p: (line.num_micro_batches, stage_times(line)) for p, line in enumerate(placed)}
        orders = dict(enumerate(self.orders(placed))) if schedule.splits else None
        return tuple(Step(running, schedule, links, orders).spans())


def links_of(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    for placed, lane in zip(pipeline.messages, lanes_of(pipeline), strict=True):
        yield link_of(p, placed.message, lane.fixed_s, len(pipeline.stages), dict(lane.needs), lane.most)

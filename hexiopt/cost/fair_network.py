"""A finer simulation of one training step: messages share the network only while they are in transit.

In the cost model all messages of a step share an interface throughout: each takes as long as if all others of its
interface travelled with it. Here messages that are in transit at once share an interface by max-min fairness
(`simulation/fair_shares.py`). No search uses it yet; beside a price it shows how much of the step is waiting for
messages that never meet.
"""

from collections.abc import Iterator, Sequence

from hexiopt.cost.clock.clock import Clock, lanes_of
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import pipeline_costs, stage_times, static_message_s
from hexiopt.memo import Memo
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import SimulatedLink, Span, Step, link_of


def simulation_s(pricer: PlanPricer, plan: Plan) -> float:
    """The step time of `plan` in seconds over a network of fair shares. Raises InputError as `pricer.price`, and where
    operations wait for each other for ever."""
    return pricer.with_network(FairShares()).price(plan).step_time_s


class FairShares:
    """A network (`NetworkModel`) whose resources are shared by the messages that are in transit at once.

    The clock says when pipelines end; `message_s` are those of static shares. Spans come from the event simulation,
    whose result for the last plan is remembered.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._spans = Memo(_simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        return pipeline_costs(placed, static_message_s(placed), self._clock.ends_s(placed))

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return (span for span in self._spans[tuple(placed)] if span.pipeline == number)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._clock.forget()
        self._spans.clear()


def _simulate(placed: tuple[PlacedPipeline, ...]) -> tuple[Span, ...]:
    """All spans of pipelines that share the network, in the order in which they end."""
    links = [link for p, line in enumerate(placed) for link in _links(p, line)]
    running = {p: (line.num_micro_batches, stage_times(line.stages)) for p, line in enumerate(placed)}
    return tuple(Step(running, placed[0].schedule, links).spans())


def _links(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    for placed, lane in zip(pipeline.messages, lanes_of(pipeline), strict=True):
        yield link_of(p, placed.message, lane.fixed_s, len(pipeline.stages), dict(lane.needs), lane.most)

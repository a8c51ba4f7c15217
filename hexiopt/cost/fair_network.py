"""A finer simulation of one training step: messages share the network while they are under way.

The cost model lets all messages of a step share an interface all the time, each taking as long as if all others of its
interface came along. Here a message shares it with those only that are under way at once, by max-min fairness
(`simulation/fair_shares.py`). Nothing searches with it, as it takes longer than a price; next to a price it says how
much of it is waiting for messages that never meet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import StaticShares, stage_times
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.plan.messages import messages
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import ExecutorId, SimulatedLink, Span, Step, link_of

_MOST_MEETINGS = 1_000_000  # of messages; so many take about a second


def simulated_s(pricer: PlanPricer, plan: Plan) -> float | None:
    """The simulated step of `plan` in seconds; None for sequence layouts, and where it would take long."""
    return simulate_network(pricer, plan).step_time_s if not _has_layouts(plan) and takes_seconds(plan) else None


def simulate_network(pricer: PlanPricer, plan: Plan) -> Cost:
    """The cost of `plan` as `pricer` has it, over a network of fair shares.

    Raises InputError as `pricer.price`, and for sequence layouts.
    """
    if _has_layouts(plan):
        raise InputError("messages of sequence layouts are not simulated; price the plan instead")
    return pricer.with_network(FairShares()).price(plan)


class FairShares:
    """A network (`NetworkModel`) whose resources are shared by those messages that are under way at once.

    The pipelines end as simulated; their `message_s` are those of static shares. The last plan's spans are remembered.
    """

    def __init__(self) -> None:
        self._spans = Memo(_simulate, 1)

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """As of `NetworkModel`."""
        ended: dict[ExecutorId, float] = {}
        for span in self._spans[tuple(placed)]:
            if not span.is_message:
                ended[span.pipeline, span.stage, span.executor] = span.end_s  # later ones come later
        found = []
        for p, cost in enumerate(StaticShares()(placed)):
            ends = tuple([ended[p, s, r] for s, stage in enumerate(cost.stages) for r in range(len(stage.executors))])
            found.append(replace(cost, executor_end_s=ends, end_s=max(ends)))
        return tuple(found)

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        """As of `NetworkModel`."""
        return (span for span in self._spans[tuple(placed)] if span.pipeline == number)

    def forget(self) -> None:
        """As of `NetworkModel`."""
        self._spans.clear()


def _simulate(placed: tuple[PlacedPipeline, ...]) -> tuple[Span, ...]:
    """All spans of pipelines that share the network, in the order in which they end."""
    links = [link for p, line in enumerate(placed) for link in _links(p, line)]
    running = {p: (line.num_micro_batches, stage_times(line.stages)) for p, line in enumerate(placed)}
    return tuple(Step(running, placed[0].schedule, links).spans())


def takes_seconds(plan: Plan) -> bool:
    """Whether the simulation takes no longer: each message may meet one of every link."""
    each = [(len(messages(pipeline)), pipeline.num_chunks * pipeline.num_micro_batches) for pipeline in plan.pipelines]
    return sum(links * times for links, times in each) * sum(links for links, _ in each) <= _MOST_MEETINGS


def _has_layouts(plan: Plan) -> bool:
    return any(
        isinstance(stage.parallelism, SequenceParallel) for pipeline in plan.pipelines for stage in pipeline.stages
    )


def _links(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    """Latency first; inside machines nothing is shared."""
    for placed in pipeline.messages:
        needs = {resource: each * placed.num_bytes for resource, each in placed.route.shared}
        port_s = placed.route.port_s_per_byte * placed.num_bytes
        fixed_s = placed.route.latency_s + (0.0 if needs else port_s)
        yield link_of(p, placed.message, fixed_s, len(pipeline.stages), needs, 1.0 / port_s if port_s else inf)

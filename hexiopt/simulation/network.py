"""A finer simulation of one training step: messages share the network while they are under way.

The cost model lets all messages of a step share an interface all the time: each takes as long as if it met all others
of its interface. Here a message shares an interface only with messages in transit at the same time, by max-min fairness
(`fair_shares.py`). No search uses it, since it takes longer than a price; compared with a price, it says how much of it
is waiting for messages that never meet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import StaticShares
from hexiopt.errors import InputError
from hexiopt.plan.messages import messages
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import ExecutorId, SimulatedLink, Step, link_of

_MOST_MEETINGS = 1_000_000  # of messages; so many take about a second


def simulation_s(pricer: PlanPricer, plan: Plan) -> float | None:
    """The simulated step of `plan` in seconds; None for sequence layouts, and for plans that take long to simulate."""
    return simulate_network(pricer, plan).step_time_s if not _has_layouts(plan) and takes_seconds(plan) else None


def simulate_network(pricer: PlanPricer, plan: Plan) -> Cost:
    """The cost of `plan` as `pricer` has it, over a network of fair shares.

    Raises InputError as `pricer.price`, and for sequence layouts.
    """
    if _has_layouts(plan):
        raise InputError("messages of sequence layouts are not simulated; price the plan instead")
    return pricer.with_network(FairShares()).price(plan)


class FairShares:
    """A network (`NetworkModel`) whose resources are shared by the messages in transit at the same time.

    The pipelines end as simulated; their `message_s` are those of static shares.
    """

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline, as `NetworkModel` requires."""
        ends_s: dict[ExecutorId, float] = {}
        links = [link for p, pipeline in enumerate(placed) for link in _links(p, pipeline)]
        running = {p: (pipeline.num_micro_batches, pipeline.stages) for p, pipeline in enumerate(placed)}
        for event in Step(running, placed[0].schedule, links).events():
            if not event.kind.startswith("send"):
                ends_s[event.pipeline, event.stage, event.replica] = event.end_s  # later ones come later
        costs = []
        for p, cost in enumerate(StaticShares()(placed)):
            ends = tuple([ends_s[p, s, r] for s, stage in enumerate(cost.stages) for r in range(len(stage.executors))])
            costs.append(replace(cost, executor_end_s=ends, end_s=max(ends)))
        return tuple(costs)

    def forget(self) -> None:
        """Do nothing, since nothing is remembered (`NetworkModel`)."""


def takes_seconds(plan: Plan) -> bool:
    """Whether the simulation takes a second or so at most, given that each message may meet one of every link."""
    sizes = [(len(messages(pipeline)), pipeline.num_chunks * pipeline.num_micro_batches) for pipeline in plan.pipelines]
    return sum(links * times for links, times in sizes) * sum(links for links, _ in sizes) <= _MOST_MEETINGS


def _has_layouts(plan: Plan) -> bool:
    return any(
        isinstance(stage.parallelism, SequenceParallel) for pipeline in plan.pipelines for stage in pipeline.stages
    )


def _links(p: int, pipeline: PlacedPipeline) -> Iterator[SimulatedLink]:
    """Latency first; inside machines nothing is shared."""
    for placed in pipeline.messages:
        needs = {resource: s_per_byte * placed.num_bytes for resource, s_per_byte in placed.route.shared}
        port_s = placed.route.port_s_per_byte * placed.num_bytes
        fixed_s = placed.route.latency_s + (0.0 if needs else port_s)
        yield link_of(p, placed.message, len(pipeline.stages), fixed_s, needs, 1.0 / port_s if port_s else inf)

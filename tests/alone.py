"""A network in which no message meets another: what the compiled search estimates plans by."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import Span


class Alone(FairShares):
    """Every message takes as long as it does alone."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        return super().__call__([_fixed(line) for line in placed])

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        return super().spans(number, [_fixed(line) for line in placed], priced)


def _fixed(line: PlacedPipeline) -> PlacedPipeline:
    alone_s = [message.route.alone_s(message.num_bytes) for message in line.messages]
    return replace(line, lanes=PipelineLanes.constant(alone_s))


def network_s(pricer: PlanPricer, plan: Plan) -> float:
    """The most seconds for which a resource of the network is needed by all messages of a step together."""
    load_s = Counter[int]()
    for line in pricer.place_pipelines(plan):
        for _, route, num_bytes in line.messages:
            for resource, s_per_byte in route.shared:
                load_s[resource] += line.num_micro_batches * s_per_byte * num_bytes  # type: ignore[assignment]
    return max(load_s.values(), default=0.0)

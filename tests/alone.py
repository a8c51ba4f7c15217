"""A network in which no message meets another."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.sharing import FairShares
from hexiopt.simulation.engine import Span


class Alone(FairShares):
    """Every message takes as long as it does alone."""

    def __call__(self, placed: Sequence[PlacedPipeline]) -> tuple[PipelineCost, ...]:
        return super().__call__([_fix_lanes(line) for line in placed])

    def spans(self, number: int, placed: Sequence[PlacedPipeline], priced: Sequence[PipelineCost]) -> Iterator[Span]:
        return super().spans(number, [_fix_lanes(line) for line in placed], priced)


def _fix_lanes(line: PlacedPipeline) -> PlacedPipeline:
    alone_s = [message.route.alone_s(message.num_bytes) for message in line.messages]
    return replace(line, lanes=PipelineLanes.constant(alone_s))

"""What gradient sync takes the interfaces and uplinks of a chain, which depends on the chains used beside it.

A ring over many holders sends every byte twice from each machine: gradients as they are scattered and gathered, or
gradients once and weights once in ZeRO-1 (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009), and as often from
each of its holders in a machine to the next. Among n holders it is 1 - 1/n of that (`ColumnMaster.predicted_s`). Three
things depend on the other chains (`SharedSync`). The holders of a layer make as many rings as the least connected of
their machines has interfaces at holders (`hexiopt/cost/rings.py`), and a machine of more holders sends by fewer
interfaces where there are fewer rings. A ring begins when its last holder is ready, and late layers are ready before
early ones, by as much as in the chain that drains soonest. And it crosses an uplink only where holders stand on both
sides.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

_STEP = 1.2  # between the drains that are told apart

Load = tuple[tuple[int, int, tuple[float, ...]], ...]  # begin and end of layers, and seconds a layer by rings
LayerSets = tuple[int, ...]  # by uplink, a set of layers as the bits of a number


@dataclass(frozen=True, slots=True)
class SharedSync:
    """What chains that are used together share: by layer, the rings of its all-reduce, which are the fewest that any
    chain makes; how long before a pipeline's end its last layer is ready at the latest; and the layers held behind each
    uplink, and elsewhere.
    """

    rings: tuple[int, ...]
    drain_s: float
    inside: LayerSets
    outside: LayerSets

    @classmethod
    def worst(cls, num_layers: int, num_uplinks: int) -> "SharedSync":
        """The context that any chain can be used in."""
        every = ((1 << num_layers) - 1,) * num_uplinks
        return cls((1,) * num_layers, 0.0, every, every)

    @classmethod
    def of(cls, contexts: Iterable["SharedSync"]) -> "SharedSync":
        """What chains share that share so much with copies of their own."""
        own = list(dict.fromkeys(contexts))
        drain_s = min(context.drain_s for context in own)
        return cls(
            tuple(map(min, zip(*(context.rings for context in own), strict=True))),
            _STEP ** math.floor(math.log(drain_s, _STEP)) if drain_s > 0.0 else 0.0,
            _union(context.inside for context in own),
            _union(context.outside for context in own),
        )

    @property
    def crossing(self) -> tuple[int, ...]:
        """How many layers have holders on both sides of each uplink."""
        return tuple((own & other).bit_count() for own, other in zip(self.inside, self.outside, strict=True))

    def with_sides(self, *sides: tuple[LayerSets, LayerSets]) -> "SharedSync":
        """The same, but for the layers inside and outside, which are those of `sides`."""
        return replace(self, inside=_union(own for own, _ in sides), outside=_union(own for _, own in sides))

    def allows(self, own: "SharedSync") -> bool:
        """Whether a chain that shares `own` with copies of its own can be used in this one."""
        return (
            own.drain_s >= self.drain_s
            and all(map(operator.ge, own.rings, self.rings))
            and not any(layers & ~known for layers, known in zip(own.inside, self.inside, strict=True))
            and not any(layers & ~known for layers, known in zip(own.outside, self.outside, strict=True))
        )


def _union(sets: Iterable[LayerSets]) -> LayerSets:
    return tuple(reduce(operator.or_, of_uplink) for of_uplink in zip(*sets, strict=True))


@dataclass(frozen=True, slots=True)
class ChainSync:
    """What a chain has to sync.

    `alone`: what it shares with copies of its own. `loads`: for each interface, what the layers behind it take it to
    send or to receive; `inner`: for each device, what it takes to send to another in its machine. By uplink, `layer_s`:
    seconds that a layer takes whose holders stand on both sides, and `sequence_s`: seconds that the messages of a
    sequence take.
    """

    alone: SharedSync
    loads: tuple[Load, ...]
    inner: tuple[Load, ...] = ()
    layer_s: tuple[float, ...] = ()
    sequence_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """What the sync takes among copies of its own."""
        return self.seconds(self.alone)

    @property
    def lone_s(self) -> float:
        """What the sync takes where there is no other chain: copies of a layer share a machine."""
        return max([0.0, *(self._load_s(load, self.alone) for load in self.inner)])

    def seconds(self, context: SharedSync) -> float:
        """What the sync takes after the pipelines' ends; infinite where the chain cannot be used in `context`."""
        if not context.allows(self.alone):
            return math.inf
        uplinks_s = map(operator.mul, context.crossing, self.layer_s)
        loads_s = (self._load_s(load, context) for load in (*self.loads, *self.inner))
        slowest_s: float = max([0.0, *uplinks_s, *loads_s])
        return slowest_s

    @staticmethod
    def _load_s(load: Load, context: SharedSync) -> float:
        sent_s = 0.0
        for begin, end, seconds in load:
            own = context.rings[begin:end]
            alike = own.count(own[0]) == len(own)  # as mostly: quicker
            for rings in own[:1] if alike else own:
                sent_s += seconds[min(rings, len(seconds)) - 1] * (len(own) if alike else 1)
        before_s: float = load[0][0] / len(context.rings) * context.drain_s
        return sent_s - before_s

"""What gradient sync takes the interfaces and uplinks of a chain, which depends on the chains used beside it.

A ring over many holders sends every byte twice from each machine: gradients as they are scattered and gathered, or
gradients once and weights once in ZeRO-1 (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009), and as often from
each of its holders in a machine to the next. Three things depend on the other chains (`SharedSync`). The holders of a
layer make as many rings as the least connected of their machines has interfaces at holders (`hexiopt/cost/rings.py`),
and a machine of more holders sends by fewer interfaces where there are fewer rings. A ring begins when its last holder
is ready, and late layers are ready before early ones, by as much as in the chain that drains soonest. And it crosses an
uplink only where holders stand on both sides.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise

from hexiopt.plan.holders import slices
from hexiopt.problem.problem import Problem
from solvers.columns.machine_kinds import MachineKinds, Uplink
from solvers.core.partition import PipelineGroup

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


class SyncLoads:
    """Makes the `ChainSync` of chains of a problem, in one ZeRO stage."""

    def __init__(self, problem: Problem, kinds: MachineKinds, zero_stage: int) -> None:
        model, workload = problem.model, problem.workload
        self._kinds, self._machine_of = kinds, problem.cluster.machine_of.tolist()
        network = problem.cluster.network
        self._interface, self._inside_bytes_per_s = network.transmit_interface, network.pair_bandwidth
        sent_bytes = passed_bytes(problem, zero_stage)
        self._layer_bytes = float(model.layer_params * sent_bytes)
        self._first_bytes, self._last_bytes = (n * sent_bytes for n in (model.embedding_params, model.head_params))
        self._message_bytes = workload.seq_len * model.hidden_size * workload.element_bytes

    def of(self, group: PipelineGroup, layers_of: Sequence[int], drain_s: float) -> ChainSync:
        """Of pipelines with so many layers in their stages, the last of which ends `drain_s` before the first."""
        rings: list[int] = []
        loads: dict[tuple[int, bool], list[tuple[int, int, tuple[float, ...]]]] = defaultdict(list)
        inner: set[Load] = set()
        for s, num_layers in enumerate(layers_of):
            ends_bytes = (s == 0) * self._first_bytes + (s + 1 == len(layers_of)) * self._last_bytes
            most, found, between = self._stage(group.stages[s], self._layer_bytes + ends_bytes / num_layers)
            span = len(rings), len(rings) + num_layers
            for port, seconds in found.items():
                loads[port].append((*span, tuple(seconds)))
            inner |= {((*span, (each_s,)),) for each_s in between}
            rings += [most] * num_layers
        ends = [0, *accumulate(layers_of)]
        uplinks = [self._uplink(group, ends, uplink) for uplink in self._kinds.uplinks]
        inside, outside, sequence_s = zip(*uplinks, strict=True) if uplinks else ((), (), ())
        return ChainSync(
            SharedSync(tuple(rings), drain_s, inside, outside),
            tuple(sorted(set(map(tuple, loads.values())))),
            tuple(sorted(inner)),
            tuple(self._layer_bytes / uplink.bytes_per_s for uplink in self._kinds.uplinks),
            sequence_s,
        )

    def _stage(
        self, slot: tuple[tuple[int, ...], ...], layer_bytes: float
    ) -> tuple[int, Mapping[tuple[int, bool], list[float]], set[float]]:
        """The most rings of a stage's layers; by interface, receiving or sending, seconds a layer by rings; and seconds
        a layer of devices that send to others in their machine."""
        holders = []  # of each slice in each machine: its share of a layer, and who holds it
        widths, ranks = slices(tuple(map(len, slot)))
        for width, ranks_of in zip(widths, ranks.tolist(), strict=True):
            here: dict[int, list[int]] = defaultdict(list)
            for devices, rank in zip(slot, ranks_of, strict=True):
                here[self._machine_of[devices[rank]]].append(devices[rank])
            holders += [(width, sorted(own)) for own in here.values()]
        ports = [list(dict.fromkeys(map(self._interface, own))) for _, own in holders]
        most = min(map(len, ports))
        found: dict[tuple[int, bool], list[float]] = {}
        inner: dict[int, float] = defaultdict(float)
        for (width, own), at in zip(holders, ports, strict=True):
            each_s = width * layer_bytes / self._kinds.interface_bytes_per_s(self._machine_of[own[0]])
            for rings in range(1, most + 1):
                # One ring alone comes in at the first holder and goes out at the last.
                out = at[:rings] if rings > 1 else [self._interface(own[-1])]
                for sends, used in ((False, at[:rings]), (True, out)):
                    for port in used:
                        found.setdefault((port, sends), [0.0] * most)[rings - 1] += each_s / rings
            for sender, receiver in pairwise(own):
                inner[sender] += width * layer_bytes / self._inside_bytes_per_s(sender, receiver)
        return most, found, set(inner.values())

    def _uplink(self, group: PipelineGroup, ends: Sequence[int], uplink: Uplink) -> tuple[int, int, float]:
        """The layers held behind an uplink, those held elsewhere, and its seconds a sequence."""
        inside = outside = 0
        here = [[self._machine_of[own[0]] in uplink.machines for own in slot] for slot in group.stages]
        for (begin, end), behind in zip(pairwise(ends), here, strict=True):
            layers = (1 << end) - (1 << begin)
            inside |= layers if any(behind) else 0
            outside |= 0 if all(behind) else layers
        crossings = sum(a != b for before, after in pairwise(here) for a, b in zip(before, after, strict=True))
        return inside, outside, crossings / len(here[0]) * self._message_bytes / uplink.bytes_per_s


def passed_bytes(problem: Problem, zero_stage: int) -> int:
    """What a ring over many holders sends of each parameter, from each machine."""
    gradient_bytes, weight_bytes = problem.workload.stored_gradient_bytes, problem.workload.element_bytes
    return gradient_bytes + (weight_bytes if zero_stage == 1 else gradient_bytes)

"""What a single stage takes at the place where it runs: seconds, bytes, and the way to the next one.

Everything that repeats is kept: layers by site, hops by their ends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hexiopt.calibration import coefficients as c
from hexiopt.calibration.frameworks import Framework, default_framework
from hexiopt.calibration.gpus import Gpu
from hexiopt.cost.boundary import Hop, hop
from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.compute import Clock, ComputeTimes, embedding_compute, head_compute, layer_compute
from hexiopt.cost.executors.links import WiresKept
from hexiopt.cost.executors.memory import MemoryModel, Shards
from hexiopt.cost.executors.sequence_parallel import SequenceStage
from hexiopt.plan.plan import Ends, SequenceLayout
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Measured, Shape
from hexiopt.problem.space import Recompute, recompute_policies
from hexiopt.schedules.in_flight import InFlight

Crowd = tuple[tuple[int, int], ...]
"""Resources of the network that several sequence stages of a plan use, and how many do."""

_KEPT_STAGES = 4096  # sequence layouts remembered before memory is given back


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where a stage runs, as far as its own time and memory go: one object for all places that cost the same.

    Compared by identity, so that the tables of the cost model look it up fast.
    """

    gpu: Gpu
    tp: int
    bandwidth: float  # slowest link of the TP ring, bytes/s
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of one layer for one micro-batch, TP collectives included: of its forward, of its backward, of its
    forward again where all of it is recomputed, and of attention alone."""

    forward_s: float
    backward_s: float
    again_s: float
    attention_s: float


class Sites:
    """The sites of a problem, and what stages take there."""

    def __init__(self, problem: Problem, framework: Framework | None = None) -> None:
        self.problem = problem
        self.framework = framework or default_framework()
        cluster = problem.cluster
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._index_of: list[int] = cluster.index_in_machine.tolist()
        self._sites: dict[tuple[int, ...], Site] = {}
        self._site_by_place: dict[tuple[object, tuple[int, ...]], Site] = {}
        self._site_by_value: dict[tuple[str, int, float, float], Site] = {}
        self._layers: dict[tuple[Site, int, str], tuple[float, float]] = {}
        self._ends: dict[tuple[Site, int], tuple[ComputeTimes, ComputeTimes]] = {}
        self._memory_models: dict[tuple[str, int, int], MemoryModel] = {}
        self._rooms: dict[tuple[Site, bool, bool, int, str, InFlight, Shards], int] = {}
        self._sequence_stages: dict[tuple[object, ...], SequenceStage] = {}
        self._wires = WiresKept(cluster)
        self._hops: dict[tuple[Ends, Ends], Hop] = {}

    def site(self, devices: tuple[int, ...]) -> Site:
        """The site of a TP group: devices of one machine."""
        found = self._sites.get(devices)
        if found is None:
            machine = self.problem.cluster.machines[self._machine_of[devices[0]]]
            place = (machine.kind, tuple(self._index_of[d] for d in devices))
            found = self._site_by_place.get(place)
            if found is None:
                bandwidth, latency_s = machine.ring(place[1]) if len(devices) > 1 else (float("inf"), 0.0)
                found = self._site_by_place[place] = self._site_of(machine.gpu, len(devices), bandwidth, latency_s)
            self._sites[devices] = found
        return found

    def _site_of(self, gpu: Gpu, tp: int, bandwidth: float, latency_s: float) -> Site:
        key = (gpu.name, tp, bandwidth, latency_s)
        found = self._site_by_value.get(key)
        if found is None:
            found = self._site_by_value[key] = Site(gpu, tp, bandwidth, latency_s)
        return found

    def best_sites(self, machine: int) -> list[Site]:
        """Per TP degree allowed in a machine, a site at least as fast as any group of that many of its devices."""
        spec = self.problem.cluster.machines[machine]
        pairs = [(i, j) for i in range(spec.num_gpus) for j in range(i)]
        bandwidth = max((spec.pair_bandwidth(i, j) for i, j in pairs), default=float("inf"))
        latency_s = min((spec.pair_latency(i, j) for i, j in pairs), default=0.0)
        return [
            self._site_of(spec.gpu, tp, bandwidth if tp > 1 else float("inf"), latency_s if tp > 1 else 0.0)
            for tp in self.problem.space.allowed_tp(spec.num_gpus)
        ]

    def measured(self, site: Site, micro_batch_size: int) -> Measured | None:
        """What the cluster's profile has of the problem's layers at a site."""
        problem = self.problem
        shape = Shape.of(problem.model, problem.workload)
        return problem.cluster.profile.times(shape, site.gpu.name, site.tp, micro_batch_size)

    def _layer(self, site: Site, micro_batch_size: int) -> "_Layer":
        problem, framework = self.problem, self.framework
        compute = layer_compute(problem.model, problem.workload, site.gpu, site.tp, micro_batch_size, framework)
        measured = self.measured(site, micro_batch_size)
        if measured is not None:
            forward_s, backward_s = measured.layer
            return _Layer(forward_s, backward_s, forward_s, min(compute.attention_s, forward_s))
        collective_s = framework.tp_exposed * self._collective_s(site, micro_batch_size)
        backward_collectives = c.TP_BACKWARD_COLLECTIVES if framework.sequence_parallel else c.TP_FORWARD_COLLECTIVES
        forward_s = compute.forward_s + c.TP_FORWARD_COLLECTIVES * collective_s
        backward_s = compute.backward_s + backward_collectives * collective_s
        again_s = forward_s - (compute.last_product_s + collective_s if framework.recompute_stops_early else 0.0)
        forward_s, backward_s, again_s = (max(s, framework.layer_host_s) for s in (forward_s, backward_s, again_s))
        return _Layer(forward_s, backward_s, again_s, compute.attention_s)

    def policies(self) -> tuple[str, ...]:
        """The recompute policies that the workload allows."""
        return recompute_policies(self.problem.workload)

    def layer_s(self, site: Site, micro_batch_size: int, policy: str) -> tuple[float, float]:
        """Forward and backward seconds of one layer for one micro-batch, recompute and TP collectives included."""
        key = (site, micro_batch_size, policy)
        found = self._layers.get(key)
        if found is None:
            times = self._layer(site, micro_batch_size)
            repeated_s = {"none": 0.0, "selective": times.attention_s, "full": times.again_s}[policy]
            found = self._layers[key] = (times.forward_s, times.backward_s + repeated_s)
        return found

    def ends_s(self, site: Site, micro_batch_size: int) -> tuple[ComputeTimes, ComputeTimes]:
        """What the embedding adds to a first stage, and final norm, LM head and loss to a last one."""
        key = (site, micro_batch_size)
        found = self._ends.get(key)
        if found is None:
            measured = self.measured(site, micro_batch_size)
            if measured is None:
                model, workload = self.problem.model, self.problem.workload
                # One collective each way: the embedding's sums are scattered, the head's input is gathered.
                extra_s = self._collective_s(site, micro_batch_size)
                embedding = embedding_compute(model, workload, site.gpu, site.tp, micro_batch_size)
                head = head_compute(model, workload, site.gpu, site.tp, micro_batch_size)
                found = embedding.beside(extra_s), head.beside(extra_s)
            else:
                found = ComputeTimes(*measured.embedding), ComputeTimes(*measured.head)
            self._ends[key] = found
        return found

    def memory_model(self, site: Site, micro_batch_size: int) -> MemoryModel:
        """Bytes of stages of any length at a site."""
        key = (site.gpu.name, site.tp, micro_batch_size)
        found = self._memory_models.get(key)
        if found is None:
            found = self._memory_models[key] = MemoryModel(
                self.problem.model, self.problem.workload, site.gpu, site.tp, micro_batch_size
            )
        return found

    def sequence_stage(
        self, layout: SequenceLayout, micro_batch_size: int, sharers: Mapping[int, int] | None = None
    ) -> SequenceStage:
        """What a stage with a sequence layout takes; `sharers` as in `SequenceStage`."""
        key = (layout, micro_batch_size, tuple(sorted((sharers or {}).items())))
        found = self._sequence_stages.get(key)
        if found is None:
            if len(self._sequence_stages) >= _KEPT_STAGES:
                self._sequence_stages.clear()
            found = self._sequence_stages[key] = SequenceStage(
                self.problem, self.framework, layout, micro_batch_size, sharers, self._wires
            )
        return found

    def crowded_stage(self, layout: SequenceLayout, micro_batch_size: int, crowd: Crowd) -> SequenceStage:
        """As `sequence_stage`, where the stage shares what it uses of `crowd`."""
        crossed = self.sequence_stage(layout, micro_batch_size).crossed
        return self.sequence_stage(layout, micro_batch_size, {r: n for r, n in crowd if r in crossed})

    def stage_s(
        self, site: Site, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage for one micro-batch."""
        forward_s, backward_s = self.layer_s(site, micro_batch_size, policy)
        forward_s, backward_s = num_layers * forward_s, num_layers * backward_s
        if first or last:
            embedding, head = self.ends_s(site, micro_batch_size)
            if first:
                forward_s, backward_s = forward_s + embedding.forward_s, backward_s + embedding.backward_s
            if last:
                forward_s, backward_s = forward_s + head.forward_s, backward_s + head.backward_s
        return forward_s, backward_s

    def layers_s(
        self, site: Site, policies: Sequence[str], first: bool, last: bool, micro_batch_size: int
    ) -> tuple[float, float]:
        """As `stage_s`, of layers with a policy each."""
        forward_s, backward_s = self.stage_s(site, 0, first, last, micro_batch_size, policies[0])
        for policy, count in Counter(policies).items():
            layer_s = self.layer_s(site, micro_batch_size, policy)
            forward_s, backward_s = forward_s + count * layer_s[0], backward_s + count * layer_s[1]
        return forward_s, backward_s

    def recomputing_s(
        self, site: Site, num_layers: int, first: bool, last: bool, micro_batch_size: int, recompute: Recompute
    ) -> tuple[float, float]:
        """As `stage_s`, with one policy for all layers or one for each."""
        if len(recompute) == 1:
            return self.stage_s(site, num_layers, first, last, micro_batch_size, recompute[0])
        return self.layers_s(site, recompute, first, last, micro_batch_size)

    def max_layers(
        self, site: Site, first: bool, last: bool, micro_batch_size: int, policy: str, held: InFlight, shards: Shards
    ) -> int:
        """The most layers whose memory fits a device of `site`; `held` in flight."""
        key = (site, first, last, micro_batch_size, policy, held, shards)
        found = self._rooms.get(key)
        if found is None:
            model = self.memory_model(site, micro_batch_size)
            limit = site.gpu.usable_memory_bytes
            found = self._rooms[key] = model.max_layers(limit, first, last, policy, held, shards)
        return found

    def least_lean(
        self,
        site: Site,
        counts: range,
        first: bool,
        last: bool,
        micro_batch_size: int,
        lean: str,
        rich: str,
        held: InFlight,
        shards: Shards,
    ) -> list[int]:
        """For stages of so many layers, how many must have policy `lean` to fit a device of `site`, the others `rich`:
        one at least, and more than there are where not even all suffice."""
        model, limit = self.memory_model(site, micro_batch_size), site.gpu.usable_memory_bytes
        return model.least_lean(limit, counts, first, last, lean, rich, held, shards)

    def hop(self, senders: Ends, receivers: Ends) -> Hop:
        """The way of a message between two stages."""
        key = (senders, receivers)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = hop(self.problem.cluster, senders, receivers)
        return found

    def hop_s(self, senders: Ends, receivers: Ends, micro_batch_size: int) -> float:
        """Seconds of one message between two stages, the network otherwise idle."""
        return self.hop(senders, receivers).alone_s(self.message_bytes(micro_batch_size))

    def message_bytes(self, micro_batch_size: int) -> float:
        """Bytes of a boundary's message: one micro-batch's hidden states."""
        workload = self.problem.workload
        return float(micro_batch_size * workload.seq_len * self.problem.model.hidden_size * workload.element_bytes)

    def _collective_s(self, site: Site, micro_batch_size: int) -> float:
        gathered, copies = self.message_bytes(micro_batch_size), self.framework.tp_copies
        collective_s = ring_collective_s(gathered, site.tp, site.bandwidth, site.latency_s)
        if copies and site.tp > 1:
            collective_s += Clock(site.gpu, self.problem.workload.precision).memory_s(2 * copies * gathered)
        return collective_s

"""Seconds and bytes of a single stage on the devices where it runs, and the route of its messages to the next.

Everything that repeats is memoised: layers by class of TP groups, routes by their ends.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import assert_never

from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.communicators import RESERVED_GROUPS, Communicators
from hexiopt.cost.executors.compute import (
    ComputeTimes,
    OperatorTimes,
    embedding_compute,
    head_compute,
    layer_compute,
    optimizer_compute_s,
)
from hexiopt.cost.executors.context_parallel import ContextParallel
from hexiopt.cost.executors.executor import ExecutorCost, ParameterCopy, Unit, units_of
from hexiopt.cost.executors.links import LinkTable
from hexiopt.cost.executors.memory import Memory, MemoryModel, StateSharding, most_together
from hexiopt.cost.executors.routes import Route, route
from hexiopt.cost.executors.sequence_parallel import SequenceStage
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework, default_framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.parallelism import Replicated, SequenceParallel, TensorParallel, TokenLayout
from hexiopt.plan.plan import Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Measured, Shape
from hexiopt.problem.space import Recompute, recompute_policies
from hexiopt.problem.workload import JOINED
from hexiopt.schedules.in_flight import InFlight

_KEPT = 50_000  # prices of stages

Contention = tuple[tuple[int, int], ...]
"""Network resources shared by more than one sequence-parallel stage, each with the number of stages that share it."""


@dataclass(frozen=True, slots=True, eq=False)
class TpGroup:
    """A class of tensor-parallel groups that cost the same: GPU type, degree, slowest ring link.

    Interned, so equality is identity and look-ups are fast.
    """

    gpu: Gpu
    tp: int
    bandwidth: float  # slowest link of the TP ring, bytes/s
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of one layer for one micro-batch, TP collectives included: of its forward, of its backward, of its
    forward again where all of it is recomputed, and of attention alone; and what the host takes for a pass."""

    forward_s: float
    backward_s: float
    recompute_s: float
    attention_s: float
    host_s: float = 0.0


def framework_of(problem: Problem, framework: Framework | None = None) -> Framework:
    """`framework`, our own runtime where none is given, as it executes `problem`: without sequence parallelism where
    the workload has none."""
    framework = framework or default_framework()
    return replace(framework, sequence_parallel=framework.sequence_parallel and problem.workload.sequence_parallel)


class StageModel:
    """Prices single stages of a problem. Raises InputError for a model that is not priced."""

    def __init__(
        self, problem: Problem, framework: Framework | None = None, context: ContextParallel | None = None
    ) -> None:
        _check_attention(problem)
        self.problem = problem
        self.context = context
        self.framework = framework_of(problem, framework)
        cluster = problem.cluster
        self.communicators = Communicators(cluster)
        self._room_for = RESERVED_GROUPS
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._index_of: list[int] = cluster.index_in_machine.tolist()
        first_of = dict[Hashable, int]()
        self._first_alike = [first_of.setdefault(machine.kind, m) for m, machine in enumerate(cluster.machines)]
        self._gpus = {gpu.name: gpu for gpu in reversed(cluster.types)}
        self._tp_groups = Memo(self._find_tp_group)
        self._site_by_place = Memo(self._site_at)
        self._site_by_value = Memo(self._new_site)
        self._layers = Memo(self._time_layer)
        self._ends = Memo(self._time_ends)
        self._memory_models = Memo(self._new_memory_model)
        self._rooms, self._limits = Memo(self._count_layers), Memo(self._limit_bytes)
        self._sequence_stages = Memo(self._new_sequence_stage, 4096)
        self._group_costs = Memo(self._price_group, _KEPT)
        self._layout_costs = Memo(self._price_layout, _KEPT)
        self._links = LinkTable(cluster)
        self._hops = Memo(self._new_hop)

    def tp_group(self, devices: tuple[int, ...]) -> TpGroup:
        """The class of a TP group, whose devices are of one machine."""
        return self._tp_groups[devices]

    def _find_tp_group(self, devices: tuple[int, ...]) -> TpGroup:
        machine = self._first_alike[self._machine_of[devices[0]]]
        if len(devices) == 1:
            return self._site_by_value[self.problem.cluster.gpu_of(devices[0]).name, 1, float("inf"), 0.0]
        return self._site_by_place[machine, tuple(self._index_of[d] for d in devices)]

    def _site_at(self, place: tuple[int, tuple[int, ...]]) -> TpGroup:
        machine, indices = self.problem.cluster.machines[place[0]], place[1]
        bandwidth, latency_s = machine.ring(indices)
        return self._site_by_value[machine.slowest(indices).name, len(indices), bandwidth, latency_s]

    def _new_site(self, value: tuple[str, int, float, float]) -> TpGroup:
        return TpGroup(self._gpus[value[0]], *value[1:])

    def best_tp_groups(self, machine: int) -> list[TpGroup]:
        """Per TP degree allowed in a machine, a TP group at least as fast as any group of that many of its devices."""
        spec = self.problem.cluster.machines[machine]
        pairs = [(i, j) for i in range(spec.num_gpus) for j in range(i)]
        bandwidth = max((spec.pair_bandwidth(i, j) for i, j in pairs), default=float("inf"))
        latency_s = min((spec.pair_latency(i, j) for i, j in pairs), default=0.0)
        return [
            self._site_by_value[spec.gpu.name, tp, *((bandwidth, latency_s) if tp > 1 else (float("inf"), 0.0))]
            for tp in self.problem.space.allowed_tp(spec.num_gpus)
        ]

    def measured(self, tp_group: TpGroup, micro_batch_size: int) -> Measured | None:
        """What the cluster's profile has of the problem's layers in a TP group; our runtime, whose profile it is, has
        sequence parallelism."""
        problem = self.problem
        if tp_group.tp > 1 and not problem.workload.sequence_parallel:
            return None
        shape = Shape.of(problem.model, problem.workload)
        gpu = tp_group.gpu
        found = problem.cluster.profile.times(shape, gpu.type_name, tp_group.tp, micro_batch_size)
        return found if found is None or gpu.full_speed is None else found.slower(gpu.speed)

    def _layer(self, tp_group: TpGroup, micro_batch_size: int) -> "_Layer":
        problem, framework, context = self.problem, self.framework, self.context
        model, workload, tp, size = problem.model, problem.workload, tp_group.tp, micro_batch_size
        compute = layer_compute(model, workload, tp_group.gpu, tp, size, framework, context.degree if context else 1)
        measured = self.measured(tp_group, micro_batch_size)
        if measured is not None:
            forward_s, backward_s = measured.layer
            return _Layer(forward_s, backward_s, forward_s, min(compute.attention_s, forward_s))
        collective_s = framework.tp_exposed * self._collective_s(tp_group, micro_batch_size)
        backward_collectives = c.TP_BACKWARD_COLLECTIVES if framework.sequence_parallel else c.TP_FORWARD_COLLECTIVES
        forward_s = compute.forward_s + c.TP_FORWARD_COLLECTIVES * collective_s
        backward_s = compute.backward_s + backward_collectives * collective_s
        if context is not None:
            exposed_s = context.exposed_s(model, workload, tp, size, compute)
            forward_s, backward_s = forward_s + exposed_s[0], backward_s + exposed_s[1]
        recompute_s = forward_s - (compute.last_product_s + collective_s if framework.recompute_stops_early else 0.0)
        return _Layer(forward_s, backward_s, recompute_s, compute.attention_s, framework.layer_host_s)

    def policies(self) -> tuple[str, ...]:
        """The recompute policies that the workload allows."""
        return recompute_policies(self.problem.workload)

    def layer_s(self, tp_group: TpGroup, micro_batch_size: int, policy: str) -> tuple[float, float]:
        """Forward and backward seconds of one layer for one micro-batch, recompute and TP collectives included."""
        return self._layers[tp_group, micro_batch_size, policy]

    def _time_layer(self, key: tuple[TpGroup, int, str]) -> tuple[float, float]:
        tp_group, micro_batch_size, policy = key
        times = self._layer(tp_group, micro_batch_size)
        # Of layers recomputed together the last alone may stop early; in the sum it does not matter which one does.
        again_s = {"none": 0.0, "selective": times.attention_s, "full": times.recompute_s, JOINED: times.forward_s}
        host_s = times.host_s * (2 if policy in ("full", JOINED) else 1)  # another pass
        return max(times.forward_s, times.host_s), max(times.backward_s + again_s[policy], host_s)

    def ends_s(self, tp_group: TpGroup, micro_batch_size: int) -> tuple[ComputeTimes, ComputeTimes]:
        """What the embedding adds to a first stage, and final norm, LM head and loss to a last one."""
        return self._ends[tp_group, micro_batch_size]

    def _time_ends(self, key: tuple[TpGroup, int]) -> tuple[ComputeTimes, ComputeTimes]:
        tp_group, micro_batch_size = key
        measured = self.measured(tp_group, micro_batch_size)
        if measured is not None:
            return ComputeTimes(*measured.embedding), ComputeTimes(*measured.head)
        model, workload = self.problem.model, self.problem.workload
        # One collective each way: the embedding's sums are scattered, the head's input is gathered. Without sequence
        # parallelism, sums are all-reduced, of the embedding forward and of the head backward: as long together.
        extra_s = self._collective_s(tp_group, micro_batch_size)
        embedding = embedding_compute(model, workload, tp_group.gpu, tp_group.tp, micro_batch_size)
        head = head_compute(model, workload, tp_group.gpu, tp_group.tp, micro_batch_size)
        return embedding.beside(extra_s), head.beside(extra_s)

    def memory_model(self, tp_group: TpGroup, micro_batch_size: int) -> MemoryModel:
        """Bytes of stages of any length in a TP group."""
        return self._memory_models[tp_group.gpu.name, tp_group.tp, micro_batch_size]

    def _new_memory_model(self, key: tuple[str, int, int]) -> MemoryModel:
        (name, tp, micro_batch_size), problem = key, self.problem
        gpu = self._gpus[name]
        reserved = self.communicators.reserved(gpu, tp)
        return MemoryModel(problem.model, problem.workload, gpu, tp, micro_batch_size, reserved)

    def sequence_stage(
        self, layout: SequenceParallel, micro_batch_size: int, sharers: Mapping[int, int] | None = None
    ) -> SequenceStage:
        """What a stage with a sequence layout takes; `sharers` as in `SequenceStage`."""
        return self._sequence_stages[layout, micro_batch_size, tuple(sorted((sharers or {}).items()))]

    def _new_sequence_stage(self, key: tuple[SequenceParallel, int, Contention]) -> SequenceStage:
        layout, micro_batch_size, sharers = key
        return SequenceStage(self.problem, self.framework, layout, micro_batch_size, dict(sharers), self._links)

    def contended_stage(self, layout: SequenceParallel, micro_batch_size: int, contention: Contention) -> SequenceStage:
        """As `sequence_stage`, where the stage shares what it uses of `contention`."""
        crossed = self.sequence_stage(layout, micro_batch_size).crossed
        return self.sequence_stage(layout, micro_batch_size, {r: n for r, n in contention if r in crossed})

    def stage_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, recompute: Recompute
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage for one micro-batch. `recompute` is one policy, or one per layer."""
        forward_s = backward_s = 0.0
        for policy, count in ((recompute[0], num_layers),) if len(recompute) == 1 else Counter(recompute).items():
            layer_s = self.layer_s(tp_group, micro_batch_size, policy)
            forward_s, backward_s = forward_s + count * layer_s[0], backward_s + count * layer_s[1]
        if first or last:
            embedding, head = self.ends_s(tp_group, micro_batch_size)
            if first:
                forward_s, backward_s = forward_s + embedding.forward_s, backward_s + embedding.backward_s
            if last:
                forward_s, backward_s = forward_s + head.forward_s, backward_s + head.backward_s
        return forward_s, backward_s

    def executors(
        self,
        stage: Stage,
        micro_batch_size: int,
        first: bool,
        last: bool,
        in_flight: InFlight,
        zero_stage: int,
        holders: Sequence[tuple[float, ...]],
        contention: Contention,
    ) -> tuple[ExecutorCost, ...]:
        """What each executor of a stage takes and holds.

        The states of each copy of its parameters are spread by ZeRO stage `zero_stage` over `holders` devices [copies],
        one number for all layers or one for each.
        """
        match stage.parallelism:
            case SequenceParallel() as layout:
                (policies,) = stage.policies()
                key = (
                    layout,
                    policies,
                    micro_batch_size,
                    first,
                    last,
                    in_flight,
                    zero_stage,
                    tuple(holders),
                    contention,
                )
                return (self._layout_costs[key],)
            case TensorParallel(devices):
                lengths, recompute = tuple([end - start for start, end in stage.layers]), stage.recompute
                group, size = self.tp_group(devices), micro_batch_size
                return (
                    self._group_costs[group, lengths, recompute, size, first, last, in_flight, zero_stage, holders[0]],
                )
            case Replicated(replicas):
                lengths, recompute = tuple([end - start for start, end in stage.layers]), stage.recompute
                return tuple(
                    [
                        self._group_costs[
                            self.tp_group(replica.devices),
                            lengths,
                            recompute,
                            samples,
                            first,
                            last,
                            in_flight,
                            zero_stage,
                            own,
                        ]
                        for replica, samples, own in zip(
                            replicas, stage.samples(micro_batch_size), holders, strict=True
                        )
                    ]
                )
            case never:
                assert_never(never)

    def _price_group(
        self,
        key: tuple[TpGroup, tuple[int, ...], Recompute, int, bool, bool, InFlight, int, tuple[float, ...]],
    ) -> ExecutorCost:
        tp_group, lengths, recompute, samples, first, last, in_flight, zero_stage, holders = key
        model, final = self.memory_model(tp_group, samples), len(lengths) - 1
        ranges = [recompute] * (final + 1)
        if len(recompute) > 1:
            ranges = [recompute[start:end] for start, end in pairwise([0, *accumulate(lengths)])]
        chunk_s, counts = [], []
        for k, (count, policies) in enumerate(zip(lengths, ranges, strict=True)):
            at = first and k == 0, last and k == final
            chunk_s.append(self.stage_s(tp_group, count, *at, samples, policies))
            counts.append({policies[0]: count} if len(policies) == 1 else Counter(policies))
        sharding = StateSharding(zero_stage, model.mean_holders(holders, first, last))
        memory = model.stage_of_ranges(counts, first, last, in_flight, sharding, most_together(ranges))
        num_params = model.num_params(sum(lengths), first, last)
        units: tuple[Unit, ...] = ()
        if zero_stage >= 2:
            each = recompute * sum(lengths) if len(recompute) == 1 else recompute
            layer_s = partial(self.layer_s, tp_group, samples)
            units = units_of(
                self.problem.model, tp_group.tp, self.ends_s(tp_group, samples), layer_s, each, first, last
            )
        return ExecutorCost(tuple(chunk_s), (self._copy(memory, tp_group.gpu, num_params, sharding),), units)

    def _price_layout(
        self,
        key: tuple[
            SequenceParallel, Recompute, int, bool, bool, InFlight, int, tuple[tuple[float, ...], ...], Contention
        ],
    ) -> ExecutorCost:
        layout, policies, size, first, last, in_flight, zero_stage, holders, contention = key
        ((count,),) = in_flight
        stage = self.contended_stage(layout, size, contention)
        spread = {same: StateSharding(zero_stage, stage.alone.mean_holders(same, first, last)) for same in set(holders)}
        memories = {
            shards: stage.memory.each(stage.memory.stage((policies,), first, last, (count,), shards))
            for shards in set(spread.values())
        }
        params = stage.alone.num_params(len(policies), first, last)
        gpus = [self.tp_group((device,)).gpu for device in layout.devices]
        copies = tuple(
            [
                self._copy(memories[shards][k], gpus[k], params, shards)
                for k, shards in enumerate(map(spread.__getitem__, holders))
            ]
        )
        units: tuple[Unit, ...] = ()
        if zero_stage >= 2:
            units = units_of(self.problem.model, 1, stage.ends_s, stage.layer_s, policies, first, last)
        return ExecutorCost((stage.stage_s(policies, first, last),), copies, units)

    def _copy(self, memory: Memory, gpu: Gpu, num_params: float, shards: StateSharding) -> ParameterCopy:
        optimizer_s = optimizer_compute_s(self.problem.workload, gpu, num_params / shards.spread)
        return ParameterCopy(memory, gpu.usable_memory_bytes, num_params, optimizer_s)

    def forget_stages(self) -> None:
        """Give back the prices of whole stages; layers, routes and memory models stay."""
        self._group_costs.clear()
        self._layout_costs.clear()

    def with_room_for(self, num_sums: int) -> "StageModel":
        """The same model, but `max_layers` and `least_recomputed` leave room for so many groups that sum gradients; no
        price changes, and all else that is known is shared."""
        other = copy(self)
        other._room_for = num_sums
        other._rooms, other._limits = Memo(other._count_layers), Memo(other._limit_bytes)
        return other

    def _limit_bytes(self, name: str) -> float:
        gpu, held = self._gpus[name], self.communicators.held
        return gpu.usable_memory_bytes - (held(gpu, 0.0, self._room_for) - held(gpu, 0.0))

    def max_layers(
        self,
        tp_group: TpGroup,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """The most layers whose memory fits a device of `tp_group`; `held` in flight."""
        return self._rooms[tp_group, first, last, micro_batch_size, policy, held, shards]

    def _count_layers(self, key: tuple[TpGroup, bool, bool, int, str, InFlight, StateSharding]) -> int:
        tp_group, first, last, micro_batch_size, policy, held, shards = key
        model = self.memory_model(tp_group, micro_batch_size)
        return model.max_layers(self._limits[tp_group.gpu.name], first, last, policy, held, shards)

    def least_recomputed(
        self,
        tp_group: TpGroup,
        counts: range,
        first: bool,
        last: bool,
        micro_batch_size: int,
        smaller: str,
        faster: str,
        held: InFlight,
        shards: StateSharding,
    ) -> list[int]:
        """As `MemoryModel.least_recomputed`, for the usable memory of a device of `tp_group`."""
        model, limit = self.memory_model(tp_group, micro_batch_size), self._limits[tp_group.gpu.name]
        return model.least_recomputed(limit, counts, first, last, smaller, faster, held, shards)

    def route(self, senders: TokenLayout, receivers: TokenLayout) -> Route:
        """The way of a message between two stages."""
        return self._hops[senders, receivers]

    def _new_hop(self, ends: tuple[TokenLayout, TokenLayout]) -> Route:
        return route(self.problem.cluster, *ends, divided=self.problem.workload.sequence_parallel)

    def message_s(self, senders: TokenLayout, receivers: TokenLayout, micro_batch_size: int) -> float:
        """Seconds of one message between two stages, the network otherwise idle."""
        return self.route(senders, receivers).alone_s(self.message_bytes(micro_batch_size))

    def message_bytes(self, micro_batch_size: int) -> float:
        """Bytes of a boundary's message: one micro-batch's hidden states."""
        workload = self.problem.workload
        return float(micro_batch_size * workload.seq_len * self.problem.model.hidden_size * workload.element_bytes)

    def _collective_s(self, tp_group: TpGroup, micro_batch_size: int) -> float:
        gathered, copies = self.message_bytes(micro_batch_size), self.framework.tp_copies
        collective_s = ring_collective_s(gathered, tp_group.tp, tp_group.bandwidth, tp_group.latency_s)
        if copies and tp_group.tp > 1:
            collective_s += OperatorTimes(tp_group.gpu, self.problem.workload.precision).memory_s(2 * copies * gathered)
        return collective_s


def _check_attention(problem: Problem) -> None:
    """Refuse a window shorter than the sequence: full attention is priced, which would take longer.

    GPT-Neo computes all scores and masks them, as its authors' code does, so that its windows save nothing.
    """
    model, seq_len, window = problem.model, problem.workload.seq_len, problem.model.attention_window
    if window is None or window >= seq_len or model.architecture == "gpt_neo":
        return
    remedy = "use_sliding_window=false" if model.architecture.startswith("qwen") else "sliding_window=null"
    raise InputError(
        f"model: sliding_window: {model.name} attends to {window} tokens at a time, fewer than seq_len {seq_len}, and "
        f"only full attention is priced; choose workload.seq_len={window} or less, or full attention: model.{remedy}"
    )

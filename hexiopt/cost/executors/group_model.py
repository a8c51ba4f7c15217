"""Seconds and bytes of layers in TP groups, of replicas that share experts too, and of what stages begin and end with.

Results that recur are memoised by class of TP groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import mul

from hexiopt.cost.executors.adapters import adapter_times
from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.communicators import Communicators
from hexiopt.cost.executors.compute import (
    ComputeTimes,
    LayerTimes,
    OperatorTimes,
    dense_times,
    embedding_compute,
    head_compute,
    layer_compute,
    quantization_s,
)
from hexiopt.cost.executors.executor import ParameterCopy
from hexiopt.cost.executors.experts.times import ExpertSharing, ExpertTimes, exchange_s
from hexiopt.cost.executors.memory import Memory, MemoryModel, StateSharding, most_together, tokens_between
from hexiopt.cost.executors.sequence.context_parallel import ContextParallel
from hexiopt.cost.executors.states import Layers, products_s
from hexiopt.cost.executors.tp_groups import TpGroup, TpGroups
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework, default_framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.numbers.messages import TRAINING
from hexiopt.problem.kinds import Experts
from hexiopt.problem.model import largest_shard
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Measured, Shape
from hexiopt.problem.space import Recompute
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.split import Footprint


def framework_of(problem: Problem, framework: Framework | None = None) -> Framework:
    """`framework`, by default our runtime, as it executes `problem`: without sequence parallelism where the workload
    has none."""
    framework = framework or default_framework()
    return replace(framework, sequence_parallel=framework.sequence_parallel and problem.workload.sequence_parallel)


class GroupModel:
    """Prices layers in TP groups for a problem. Raises InputError for a model that is not priced: see
    `_check_attention`."""

    def __init__(
        self, problem: Problem, framework: Framework | None = None, context: ContextParallel | None = None
    ) -> None:
        _check_attention(problem)
        self.problem = problem
        self.context = context
        self.framework = framework_of(problem, framework)
        cluster = problem.cluster
        self.communicators, self.tp_groups = Communicators(cluster), TpGroups(cluster, problem.model.shares_experts)
        self._layers = Memo(self._time_layer)
        self._cells = Memo(self._choose_cell)
        self._ends = Memo(self._time_ends)
        self._weights = Memo(self._time_weights)
        self._clocks = Memo(self._new_clock)
        self._quantization = Memo(self._time_quantization)
        self.memory_models = Memo(self._new_memory_model)  # by GPU type, TP degree, samples, and what has which experts
        self.expert_times = Memo(self._new_expert_times)  # by GPU type

    def tp_group(self, devices: tuple[int, ...]) -> TpGroup:
        """The class of a TP group, whose devices are of one machine."""
        return self.tp_groups.of(devices)

    def measurement(self, tp_group: TpGroup, micro_batch_size: int) -> Measured | None:
        """The times of the problem's layers in a TP group by the cluster's profile; None where it has none, with
        adapters, or where several devices lack the sequence parallelism with which our runtime measures profiles."""
        problem = self.problem
        if problem.workload.adapters is not None or (tp_group.tp > 1 and not problem.workload.sequence_parallel):
            return None
        shape = Shape.of(problem.model, problem.workload)
        gpu = tp_group.gpu
        times = problem.cluster.profile.times(shape, gpu.type_name, tp_group.tp, micro_batch_size)
        return times if times is None or gpu.full_speed is None else times.slower(gpu.speed)

    def cell(self, tp_group: TpGroup, micro_batch_size: int) -> TpGroup:
        """`tp_group` with its TP degree: where that is open, the fastest one of which a layer fits, or the one of which
        most does."""
        return tp_group if tp_group.degree else self._cells[tp_group, micro_batch_size]

    def _choose_cell(self, key: tuple[TpGroup, int]) -> TpGroup:
        group, size = key

        def rank(cell: TpGroup) -> tuple[float, float]:
            used = self.memory_model(cell, size).stage(1, False, False, "full", holding(1)).total
            excess = max(0.0, used - cell.gpu.usable_memory_bytes)
            return excess, sum(self.layer_s(cell, size, "none"))

        return min(self.cells(group, size), key=rank)

    def cells(self, tp_group: TpGroup, micro_batch_size: int) -> list[TpGroup]:
        """`tp_group` with each TP degree that it may have: replicas that share experts divide the sequences of a
        micro-batch evenly, and experts cut by columns are those of one replica."""
        if tp_group.degree:
            return [tp_group]
        devices = tp_group.tp
        if self.framework.expert_columns:
            return [self.tp_groups.with_degree(tp_group, devices)]
        heads = min(kind.attention.heads for kind in self.problem.model.kinds if kind.attention is not None)
        degrees = [t for t in range(1, devices + 1) if devices % t == 0 and micro_batch_size % (devices // t) == 0]
        return [self.tp_groups.with_degree(tp_group, t) for t in degrees if t <= heads or t == devices]

    def _layer(self, tp_group: TpGroup, micro_batch_size: int, number: int) -> LayerTimes:
        """Of a layer of kind `number` of the model."""
        size = micro_batch_size // tp_group.replicas
        times, experts = self.layer_apart(tp_group, size, number), self.problem.model.kinds[number].experts
        if experts is None or self.measurement(tp_group, micro_batch_size) is not None:
            return times
        return times.with_experts(*self._experts_s(experts, tp_group, micro_batch_size))

    def layer_apart(self, tp_group: TpGroup, size: int, number: int) -> LayerTimes:
        """Of a layer of kind `number` of the model, its experts aside, for the `size` sequences of a replica."""
        problem, framework, context = self.problem, self.framework, self.context
        model, workload, tp = problem.model, problem.workload, tp_group.degree
        layer = model.layer_of(model.kinds[number])
        compute = layer_compute(layer, workload, tp_group.gpu, tp, size, framework, context.degree if context else 1)
        measured = self.measurement(tp_group, size * tp_group.replicas)
        if measured is not None:
            forward_s, backward_s = measured.layer
            return LayerTimes(forward_s, backward_s, forward_s, min(compute.attention_s, forward_s))
        collective_s = framework.tp_exposed * self._collective_s(tp_group, size)
        kind = layer.kind
        # Around what mixes tokens, and around what TP divides of what mixes channels.
        routed = kind.experts is not None and (kind.experts.shared > 0 or framework.expert_columns)
        blocks = bool(kind.mixers) + (kind.dense is not None or routed)
        backward_collectives = c.TP_BACKWARD_COLLECTIVES if framework.sequence_parallel else c.TP_FORWARD_COLLECTIVES
        sums_s = [framework.tp_exposed * self._sums_s(tp_group, size, count) for count in kind.norm_sums(tp)]
        forward_s = compute.forward_s + c.TP_FORWARD_COLLECTIVES // 2 * blocks * collective_s + sum(sums_s)
        backward_s = compute.backward_s + backward_collectives // 2 * blocks * collective_s
        backward_s += sums_s[0] + 2 * sums_s[1]  # what is between projections of a recurrence is computed again
        clock, shard = self._clocks[tp_group.gpu.name], layer.shard(tp, model.vocab_size)
        tokens, traffic = float(size * workload.seq_len), framework.adapter_traffic
        extra_s = adapter_times(model, kind, workload, clock, shard, tokens, traffic)
        forward_s, backward_s = forward_s + extra_s[0], backward_s + extra_s[1]
        if context is not None:
            extra_s = context.extra_s(model, workload, tp, size, compute)
            forward_s, backward_s = forward_s + extra_s[0], backward_s + extra_s[1]
        recompute_s = forward_s - (compute.last_product_s + collective_s if framework.recompute_stops_early else 0.0)
        return LayerTimes(forward_s, backward_s, recompute_s, compute.attention_s, framework.layer_host_s)

    def _experts_s(self, part: Experts, tp_group: TpGroup, micro_batch_size: int) -> tuple[float, float]:
        """Forward and backward seconds of experts, the all-to-alls to them and back included."""
        workload = self.problem.workload
        sharing = self._sharing(tp_group, micro_batch_size)
        routed_tokens = float(micro_batch_size * workload.seq_len) / (1 if sharing.by_columns else tp_group.tp)
        forward_s, backward_s = self.expert_times[tp_group.gpu.name].seconds(*sharing.on_device(part), routed_tokens)
        both_s = self.exchanges_s(part, tp_group, micro_batch_size)
        return forward_s + both_s, backward_s + both_s

    def exchanges_s(self, part: Experts, tp_group: TpGroup, micro_batch_size: int) -> float:
        """Seconds of both all-to-alls of a pass through the experts of a layer, those hidden left out."""
        workload, hidden, framework = self.problem.workload, self.problem.model.hidden_size, self.framework
        if framework.expert_columns:
            return 0.0
        there_s = exchange_s(part, workload, hidden, tp_group, micro_batch_size, framework.copies_to_machines)
        return 2 * framework.exchange_exposed * there_s

    def _sharing(self, tp_group: TpGroup, micro_batch_size: int) -> ExpertSharing:
        """How the devices of a group divide experts."""
        by_columns = self.framework.expert_columns
        assert not by_columns or tp_group.replicas == 1, "experts cut by columns are those of one replica"
        return ExpertSharing(tp_group.tp, tp_group.replicas, micro_batch_size, by_columns=by_columns)

    def layer_s(
        self, tp_group: TpGroup, micro_batch_size: int, policy: str, kind: int | None = None
    ) -> tuple[float, float]:
        """Forward and backward seconds of a layer for one micro-batch, recompute and communication of the group
        included: of the layers of the model's kind `kind`, by default of the mean layer."""
        return self._layers[tp_group, micro_batch_size, policy, kind]

    def _time_layer(self, key: tuple[TpGroup, int, str, int | None]) -> tuple[float, float]:
        open_group, micro_batch_size, policy, kind = key
        tp_group, shares = self.cell(open_group, micro_batch_size), self.problem.model.weight_of_kinds
        if kind is None and len(shares) > 1:
            kinds_s = [self.layer_s(tp_group, micro_batch_size, policy, k) for k in range(len(shares))]
            forward_s, backward_s = (sum(map(mul, shares, column)) for column in zip(*kinds_s, strict=True))
            return forward_s, backward_s
        return self._layer(tp_group, micro_batch_size, kind or 0).under(policy)

    def layer_weights_s(self, tp_group: TpGroup, micro_batch_size: int) -> float:
        """Seconds of a layer's backward that make gradients of its weights: a product for each of the forward, and
        gathers of what products have read."""
        return self._weights[tp_group, micro_batch_size]

    def _time_weights(self, key: tuple[TpGroup, int]) -> float:
        tp_group, size = key
        problem, framework = self.problem, self.framework
        clock, shard = self._clocks[tp_group.gpu.name], largest_shard(problem.model, tp_group.tp)
        tokens = float(size * problem.workload.seq_len)
        dense = dense_times(problem.model.layer, problem.workload, clock, shard, tokens, framework)
        late_s = (c.GEMM_BACKWARD_PASSES - 1) * (dense.gemms_before_s + dense.gemms_after_s)
        if framework.sequence_parallel:
            gathers = c.TP_BACKWARD_COLLECTIVES - c.TP_FORWARD_COLLECTIVES
            late_s += gathers * framework.tp_exposed * self._collective_s(tp_group, size // tp_group.replicas)
        _, backward_s = self.layer_s(tp_group, size, "none")
        measurement = self.measurement(tp_group, size)
        if measurement is not None:  # the share of a whole backward is that of the model
            late_s *= (
                backward_s
                / layer_compute(problem.model.layer, problem.workload, tp_group.gpu, tp_group.tp, size).backward_s
            )
        return min(late_s, 0.5 * backward_s)

    def footprint(
        self, tp_group: TpGroup, micro_batch_size: int, policies: Sequence[Recompute], first: bool, last: bool
    ) -> Footprint:
        """What a stage whose backwards are split holds, in bytes, with `policies` of the layers of each range."""
        model, final = self.memory_model(tp_group, micro_batch_size), len(policies) - 1
        stored = [
            model.activations.of_range(Counter(policies_of_range), first and at == 0, last and at == final)
            for at, policies_of_range in enumerate(policies)
        ]
        together = most_together(policies)
        working = max(model.activations.working_set(policy, last, together) for policy in set(chain(*policies)))
        return Footprint(tuple(stored), model.late_bytes, working, max(0.0, working - model.product_input_bytes))

    def ends_s(self, tp_group: TpGroup, micro_batch_size: int) -> tuple[ComputeTimes, ComputeTimes]:
        """The times of the embedding on a first stage, and of final norm, LM head and loss on a last one."""
        return self._ends[tp_group, micro_batch_size]

    def _time_ends(self, key: tuple[TpGroup, int]) -> tuple[ComputeTimes, ComputeTimes]:
        tp_group, micro_batch_size = self.cell(*key), key[1]
        measured = self.measurement(tp_group, micro_batch_size)
        if measured is not None:
            return ComputeTimes(*measured.embedding), ComputeTimes(*measured.head)
        model, workload = self.problem.model, self.problem.workload
        # One collective each way: the embedding's sums are scattered, the head's input is gathered. Without sequence
        # parallelism sums are all-reduced, the embedding's in the forward and the head's in the backward: equally long
        # in total.
        size = micro_batch_size // tp_group.replicas
        extra_s = self._collective_s(tp_group, size)
        embedding = embedding_compute(model, workload, tp_group.gpu, tp_group.degree, size)
        head = head_compute(model, workload, tp_group.gpu, tp_group.degree, size)
        head = head.then(self._further_compute(tp_group, micro_batch_size, head))
        if workload.adapters is not None:  # no gradient flows into a frozen embedding
            return replace(embedding, forward_s=embedding.forward_s + extra_s), head.plus(extra_s)
        return embedding.plus(extra_s), head.plus(extra_s)

    def _further_compute(self, tp_group: TpGroup, micro_batch_size: int, head: ComputeTimes) -> ComputeTimes:
        """The times of the layers that predict further tokens: of each the projection of two hidden states to one, the
        layer, and the head once more."""
        model, workload, size = self.problem.model, self.problem.workload, micro_batch_size // tp_group.replicas
        clock, flops = self._clocks[tp_group.gpu.name], 4.0 * size * workload.seq_len * model.hidden_size**2
        further = ComputeTimes(0.0, 0.0)
        for kind in model.extra_layers:
            layer_s = self.layer_s(tp_group, micro_batch_size, "none", model.kinds.index(kind))
            projection_s = clock.gemm_s(flops / tp_group.degree)
            projection = ComputeTimes(projection_s, c.GEMM_BACKWARD_PASSES * projection_s)
            further = further.then(ComputeTimes(*layer_s)).then(projection).then(head)
        return further

    def memory_model(self, tp_group: TpGroup, micro_batch_size: int) -> MemoryModel:
        """The memory of stages of any length in a TP group."""
        cell = self.cell(tp_group, micro_batch_size)
        sharing = self._sharing(cell, micro_batch_size)
        return self.memory_models[cell.gpu.name, cell.degree, micro_batch_size // cell.replicas, sharing]

    def _new_memory_model(self, key: tuple[str, int, int, ExpertSharing]) -> MemoryModel:
        (name, tp, size, sharing), problem = key, self.problem
        gpu = self.tp_groups.gpus[name]
        reserved = self.communicators.least_bytes(gpu, sharing.devices)
        return MemoryModel(problem.model, problem.workload, gpu, tp, size, reserved, sharing)

    def stage_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, recompute: Recompute
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage for one micro-batch; `recompute` is one policy, or one per layer."""
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
        message_s = (2 - first - last) * self.quantization_s(tp_group, micro_batch_size)
        return forward_s + message_s, backward_s + message_s

    def quantization_s(self, tp_group: TpGroup, micro_batch_size: int) -> float:
        """Seconds in which a TP group quantises a message of a micro-batch, or dequantises one; 0 where messages keep
        the precision of training."""
        if self.problem.workload.message_precision == TRAINING:
            return 0.0
        return self._quantization[tp_group.gpu.name, tp_group.tp, micro_batch_size]

    def _time_quantization(self, key: tuple[str, int, int]) -> float:
        (gpu, tp, micro_batch_size), problem = key, self.problem
        tokens = micro_batch_size * tokens_between(problem.workload, tp)
        return quantization_s(self._clocks[gpu], problem.model, problem.workload, float(tokens))

    def whole_group(self, devices: tuple[int, ...]) -> TpGroup:
        """The class of a TP group whose devices all divide each head's work."""
        return self.tp_groups.with_degree(self.tp_groups.of(devices), len(devices))

    def clock(self, gpu: Gpu) -> OperatorTimes:
        """The seconds of operators on a GPU of the cluster."""
        return self._clocks[gpu.name]

    def _new_clock(self, gpu: str) -> OperatorTimes:
        return OperatorTimes(self.tp_groups.gpus[gpu], self.problem.workload.precision)

    def _new_expert_times(self, gpu: str) -> ExpertTimes:
        problem = self.problem
        return ExpertTimes(self.tp_groups.gpus[gpu], problem.workload, self.framework, problem.model.hidden_size)

    def optimizer_s(
        self, tp_group: TpGroup, num_layers: Layers, first: bool, last: bool, shards: StateSharding
    ) -> float:
        """Seconds of the optimizer step of a stage of so many mean layers, or layers of each kind: memory traffic, and
        products of whole matrices where the optimizer has any."""
        memory = self.memory_model(tp_group, tp_group.replicas)
        return self._step_s(memory, tp_group.gpu, num_layers, (first, last), shards)

    def copy_of(
        self,
        model: MemoryModel,
        memory: Memory,
        gpu: Gpu,
        num_layers: Layers,
        ends: tuple[bool, bool],
        shards: StateSharding,
    ) -> ParameterCopy:
        """A parameter copy with `memory` on a GPU, of so many layers of a stage whose states are sharded; `ends`:
        whether the stage is first, and last."""
        params, clock = model.num_params(num_layers, *ends), self._clocks[gpu.name]
        optimizer_s = self._step_s(model, gpu, num_layers, ends, shards)
        converted = params * self.problem.workload.quantization_bytes(shards.stage)
        quantization_s = clock.memory_s(converted) if converted else 0.0
        return ParameterCopy(memory, gpu.usable_memory_bytes, params, optimizer_s, quantization_s)

    def _step_s(
        self, model: MemoryModel, gpu: Gpu, num_layers: Layers, ends: tuple[bool, bool], shards: StateSharding
    ) -> float:
        clock, states = self._clocks[gpu.name], model.sharded_states if shards.stage else model.rank_states
        seconds = clock.memory_s(shards.share(states.step_bytes, num_layers, *ends))
        count = num_layers if isinstance(num_layers, int) else sum(num_layers)
        return seconds + count * products_s(self.problem.parameters, clock.gemm_s)

    def _collective_s(self, tp_group: TpGroup, size: int) -> float:
        model, workload = self.problem.model, self.problem.workload
        gathered = float(size * workload.seq_len * model.hidden_size * workload.element_bytes)
        copies = self.framework.tp_copies
        collective_s = ring_collective_s(gathered, tp_group.degree, tp_group.bandwidth, tp_group.latency_s)
        if copies and tp_group.degree > 1:
            collective_s += self._clocks[tp_group.gpu.name].memory_s(2 * copies * gathered)
        return collective_s

    def _sums_s(self, tp_group: TpGroup, size: int, count: int) -> float:
        """Seconds of the all-reduce of so many FP32 values a token."""
        if not count:
            return 0.0
        num_bytes = float(size * self.problem.workload.seq_len * count * c.ACCUMULATOR_BYTES)
        return 2 * ring_collective_s(num_bytes, tp_group.degree, tp_group.bandwidth, tp_group.latency_s)

    def _stage_of_kinds_s(
        self, tp_group: TpGroup, counts: Sequence[Mapping[str, int]], first: bool, last: bool, micro_batch_size: int
    ) -> tuple[float, float]:
        """As `stage_s`, with the number of layers of each kind and policy [kinds]."""
        forward_s, backward_s = self.stage_s(tp_group, 0, first, last, micro_batch_size, ("none",))
        for kind, policies in enumerate(counts):
            for policy, count in policies.items():
                layer_s = self.layer_s(tp_group, micro_batch_size, policy, kind)
                forward_s, backward_s = forward_s + count * layer_s[0], backward_s + count * layer_s[1]
        return forward_s, backward_s

    def count_by_kind(self, layers: tuple[int, int], policies: Recompute) -> list[Counter[str]]:
        """The number of layers of each kind and policy in a range of layers [kinds]."""
        depth, (start, end) = self.problem.model.depth, layers
        by_layer = policies * (end - start) if len(policies) == 1 else policies
        counts = [Counter[str]() for _ in self.problem.model.kinds]
        for number, policy in zip(depth[start:end], by_layer, strict=True):
            counts[number][policy] += 1
        return counts


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

"""FlashFlex's own cost formulas, as a pricer that our solvers can search under.

Written from the formulas of the released scheduler, github.com/Relaxed-System-Lab/FlashFlex, folder
`experimental/`; the functions cited below are methods of `TimeCost` and `MemoryCost` in `cost_modeling.py`
unless another file is named. With H, L, V, S the model's hidden size, layers, vocabulary and sequence length,
b the sequences of a micro-batch, t a stage's TP degree, and 2 bytes an element (`Config.B_type`):

- layer, one micro-batch, forward and backward with full recompute (`mb_tp_layer_comp_cost`): 96·b·S·H²·(1 +
  S/(6H) + V/(16·L·H)) FLOP on t devices;
- its TP collectives (`mb_tp_layer_comm_cost`): 12·(t−1)/t messages of 2·b·S·H bytes on the machine's links;
- a stage boundary (`mb_pp_comm_cost`): twice (there and back) one message to the next stage and its scatter
  there, (t−1)/t of a message. It keeps the *sender* busy: it adds to the sending stage's seconds;
- a pipeline (`gen_gpipe_map`, `pipeline_cost`): columns of a GPipe diagram, each as long as its slowest busy
  stage;
- gradients of one layer (`gen_dp_devices_matrix`, `dp_layer_comm_cost`): with n pipelines and t_min, t_max
  the least and largest TP degree that hold the layer, ⌊t_max/t_min⌋ rounds, one after the other, each twice
  the slowest holder's transfers of 12·H²·2/(t_min·n) bytes to every other holder; layers follow each other,
  and embedding and LM head are not counted;
- a step (`overall_cost`): 1.8 × the slowest pipeline + 1.1 × the gradients;
- memory of a device (`param_memory`, `activation_memory`, `if_oom`): four times the 2-byte parameters,
  embedding and head whole on every TP rank, and *one* micro-batch's activations with full recompute, against
  the nameplate memory.

Rates (`create_specs` in `utils.py`): FLOPS and GB/s count in powers of 1024, a convention that lives in this
file only. Nothing is shared or overlapped, and latencies are zero.

Generalised, where the released search keeps one value for all: every pipeline has its own number and size of
micro-batches. Every time above but the gradients' is proportional to b, so small micro-batches, whose bubbles
are small, are always best.

Its micro-batch rule (`Config` in `config.py`) holds instead with `micro_batch_rule`: N_MB = GLB_B // GLB_MB
micro-batches of GLB_MB // n sequences in each of n pipelines. The figures in `experiments/data/flashflex_rows.yaml` are
with GLB_B = 256 and GLB_MB = 32: run so, counting the sequences that it really processes, the released search
gives six of the seven again exactly, and the one at 5 GB/s within 1 % (it draws at random). Where n does not
divide GLB_MB, a step processes less than the global batch; the step time here is that of the global batch at
the same tokens/s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.cost import Cost, PipelineCost, StageCost
from hexiopt.cost.executors.memory import Memory, StateSharding
from hexiopt.cost.pricer import PricerFeatures
from hexiopt.memo import Memo
from hexiopt.plan.messages import messages_of
from hexiopt.plan.plan import Pipeline, Plan, feature_without_price
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight
from hexiopt.units import GB, TFLOP

BINARY_TERA = 1024.0**4  # FLOP/s of its "TFLOPS"
BINARY_GIGA = 1024.0**3  # bytes/s of its "GB/s"
INTRA_GB_PER_S = 20.0  # of its machine table, for machines not named below
A800_INTRA_GB_PER_S = 400.0  # A800 and A100 by NVLink, as its experiments state them

LAYER_FLOP_FACTOR = 96.0  # 24 forward, 48 backward, 24 recomputed, in units of b·S·H²
LAYER_MESSAGES = 12.0  # a layer's TP transfers, four of them recomputed
PARAMETERS_PER_LAYER = 12.0  # in units of H²
ELEMENT_BYTES = 2.0
STATES_PER_PARAMETER = 4.0  # weight, gradient, two moments, each as wide as a weight
PIPELINE_WEIGHT = 1.8  # `overall_cost`; unexplained there
GRADIENT_WEIGHT = 1.1  # `overall_cost`; unexplained there
RULE_MICRO_BATCHES = 8  # N_MB of the stated figures: GLB_B // GLB_MB = 256 // 32
FORWARD_SHARE = 0.25  # of a layer with full recompute; only the sum is FlashFlex's

_MAX_PIPELINES = 20_000


def published_intra_gb_per_s(gpu: str) -> float:
    """The GB/s inside a machine of `gpu` devices that FlashFlex's experiments state."""
    return A800_INTRA_GB_PER_S if gpu.startswith(("a800", "a100")) else INTRA_GB_PER_S


@dataclass(frozen=True, slots=True)
class FlashFlexTpGroup:
    """A TP group, as far as its own time and memory go."""

    flops: float  # of one device
    memory_bytes: float
    tp: int
    link_s_per_byte: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A pipeline apart from the others; its layers' machines, one-hot [L, machines], and TP degrees [L]."""

    pipeline: Pipeline  # keeps its id alive
    cost: PipelineCost
    num_sequences: int
    excess_bytes: float
    machines: NDArray[np.float64]
    tp: NDArray[np.int64]


class FlashFlexPricer:
    """Prices plans of one problem as FlashFlex does; implements `Pricer`.

    `intra_gb_per_s` overrides the GB/s inside machines by GPU type. Between machines the cluster's bandwidths
    hold. With `micro_batch_rule` the micro-batches are those of FlashFlex's rule, whatever a plan says. All
    seconds of `stage_s` and `message_s` include the factor 1.8, so that they add up to `Cost.pipeline_s`.
    Schedule, sharding, micro-batches in flight and latencies have no part in its formulas.
    """

    features = PricerFeatures(sends_occupy_stages=True)

    def __init__(
        self,
        problem: Problem,
        *,
        intra_gb_per_s: Mapping[str, float] | None = None,
        micro_batch_rule: bool = False,
    ) -> None:
        self.problem = problem
        self.micro_batch_rule = micro_batch_rule
        cluster, model, workload = problem.cluster, problem.model, problem.workload
        stated = intra_gb_per_s or {}
        rates = cluster.network.bandwidth / GB * BINARY_GIGA
        for m, machine in enumerate(cluster.machines):
            name = machine.gpu.name
            rates[m, m] = stated.get(name, published_intra_gb_per_s(name)) * BINARY_GIGA
        self._s_per_byte = 1.0 / rates
        self._link_s: list[list[float]] = self._s_per_byte.tolist()
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._flops = [
            (machine.gpu.peak_flops(workload.precision) or 0.0) / TFLOP * BINARY_TERA for machine in cluster.machines
        ]
        hidden, layers, vocab = float(model.hidden_size), model.num_layers, model.vocab_size
        seq_len = workload.seq_len
        self._layer_flop = (
            LAYER_FLOP_FACTOR
            * seq_len
            * hidden**2
            * (1.0 + seq_len / (6.0 * hidden) + vocab / (16.0 * layers * hidden))
        )
        self._message_bytes = ELEMENT_BYTES * seq_len * hidden
        self._layer_params = PARAMETERS_PER_LAYER * hidden**2
        self._first_params = hidden * (vocab + seq_len)
        self._last_params = hidden + vocab * hidden
        self._num_layers = layers
        self._eye = np.eye(len(cluster.machines))
        self._tp_groups: Memo[tuple[int, int], FlashFlexTpGroup] = Memo(lambda key: self._tp_group(*key))
        self._stages: Memo[tuple[FlashFlexTpGroup, int, bool, bool, int], StageCost] = Memo(
            lambda key: self._stage_cost(*key)
        )
        self._parts: dict[tuple[int, int], _Part] = {}

    # What a search asks of one stage.

    def tp_group(self, devices: tuple[int, ...]) -> FlashFlexTpGroup:
        """The TP group that devices of one machine form."""
        machine, *others = {self._machine_of[d] for d in devices}
        if others:
            raise ValueError(f"devices {devices} are in different machines; a TP group stays inside one")
        return self._tp_groups[machine, len(devices)]

    def _tp_group(self, m: int, tp: int) -> FlashFlexTpGroup:
        gpu = self.problem.cluster.machines[m].gpu
        memory_bytes = gpu.memory_bytes * (1.0 - gpu.memory_headroom)
        return FlashFlexTpGroup(self._flops[m], memory_bytes, tp, self._link_s[m][m])

    def stage_s(
        self, tp_group: FlashFlexTpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """Forward and backward seconds of a stage for one micro-batch, without its sends, times 1.8."""
        _only_full(policy)
        compute_s = self._layer_flop / (tp_group.flops * tp_group.tp)
        collective_s = LAYER_MESSAGES * (tp_group.tp - 1) / tp_group.tp * self._message_bytes * tp_group.link_s_per_byte
        total_s = PIPELINE_WEIGHT * micro_batch_size * num_layers * (compute_s + collective_s)
        return FORWARD_SHARE * total_s, (1.0 - FORWARD_SHARE) * total_s

    def message_s(self, senders: tuple[int, ...], receivers: tuple[int, ...], micro_batch_size: int) -> float:
        """One of a boundary's two messages, times 1.8; both keep the *sending* stage busy."""
        here, there, tp = self._machine_of[senders[0]], self._machine_of[receivers[0]], len(receivers)
        scatter_s = (tp - 1) / tp * self._link_s[there][there]
        return PIPELINE_WEIGHT * micro_batch_size * self._message_bytes * (self._link_s[here][there] + scatter_s)

    def max_layers(
        self,
        tp_group: FlashFlexTpGroup,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """The most layers that fit; `held` and `shards` have no part in its formula. May be negative."""
        _only_full(policy)
        limit = tp_group.memory_bytes
        zero = self._memory(tp_group, 0, first, last, micro_batch_size).total
        single = self._memory(tp_group, 1, first, last, micro_batch_size).total
        count = int((limit - zero) // (single - zero))
        while count >= 0 and self._memory(tp_group, count, first, last, micro_batch_size).total > limit:
            count -= 1
        while self._memory(tp_group, count + 1, first, last, micro_batch_size).total <= limit:
            count += 1
        return count

    def policies(self) -> tuple[str, ...]:
        """Full recompute only."""
        return ("full",)

    def refuse(self, policy: str) -> None:
        """Raises ValueError for recompute policies that have no price here."""
        _only_full(policy)

    def _num_params(self, tp_group: FlashFlexTpGroup, num_layers: int, first: bool, last: bool) -> float:
        return (
            num_layers * self._layer_params / tp_group.tp
            + (self._first_params if first else 0.0)
            + (self._last_params if last else 0.0)
        )

    def _memory(
        self, tp_group: FlashFlexTpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int
    ) -> Memory:
        state = ELEMENT_BYTES * self._num_params(tp_group, num_layers, first, last)
        message = micro_batch_size * self._message_bytes
        return Memory(
            weights=state,
            gradients=state,
            master=0.0,
            optimizer=(STATES_PER_PARAMETER - 2.0) * state,
            activations=num_layers * message / tp_group.tp,
            logits=0.0,
            buffers=2.0 * message,
            communicators=0.0,
            reserve=0.0,
        )

    # The price of a plan.

    def pipelines(self, plan: Plan) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline; they do not share anything. Raises as `price`."""
        return tuple(part.cost for part in self._all_parts(plan))

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The cost of `plan` by FlashFlex's formulas, whatever its schedule and sharding.

        `pipelines` are not needed: they are kept. Raises ValueError for what the formulas do not cover:
        replicated stages, recompute other than full.
        """
        parts = self._all_parts(plan)
        sequences = sum(part.num_sequences for part in parts)
        steps, too_many = 1.0, False
        if self.micro_batch_rule:
            whole = self.problem.workload.global_batch
            too_many = sequences > whole
            steps, sequences = whole / sequences, whole
        tokens = sequences * self.problem.workload.seq_len
        pipeline_s = steps * max(part.cost.end_s for part in parts)
        gradient_sync_s = steps * GRADIENT_WEIGHT * self._gradients_s(parts) if len(parts) > 1 else 0.0
        step_s = pipeline_s + gradient_sync_s
        return Cost(
            step_time_s=step_s,
            pipeline_s=pipeline_s,
            gradient_sync_s=gradient_sync_s,
            optimizer_s=0.0,
            tokens_per_s=tokens / step_s,
            mfu=tokens * self._flops_per_token / (step_s * self._peak_flops),
            excess_bytes=inf if too_many else max(part.excess_bytes for part in parts),
            pipelines=tuple(part.cost for part in parts),
        )

    def _all_parts(self, plan: Plan) -> list[_Part]:
        if not self.micro_batch_rule:
            return [self._part(p, p.num_micro_batches, p.micro_batch_size) for p in plan.pipelines]
        micro = self.problem.workload.global_batch // RULE_MICRO_BATCHES // len(plan.pipelines)
        return [self._part(p, RULE_MICRO_BATCHES, max(micro, 1)) for p in plan.pipelines]

    def _part(self, pipeline: Pipeline, num_micro_batches: int, size: int) -> _Part:
        before = self._parts.get((id(pipeline), size))
        if before is not None and before.pipeline is pipeline:
            return before
        feature = feature_without_price(pipeline)
        if any(len(stage.parallelism.replicas) > 1 for stage in pipeline.stages):
            feature = "a replicated stage has no price in FlashFlex's formulas"
        if feature is not None:
            raise ValueError(feature)
        count = len(pipeline.stages)
        costs, sends, busy = [], [], []
        machines = np.zeros(self._num_layers, np.int64)
        tp = np.zeros(self._num_layers, np.int64)
        for k, stage in enumerate(pipeline.stages):
            for policy in set(stage.recompute):
                self.refuse(policy)
            tp_group = self.tp_group(stage.devices)
            cost = self._stages[tp_group, stage.num_layers, k == 0, k == count - 1, size]
            send_s = 0.0
            if k < count - 1:
                send_s = self.message_s(stage.devices, pipeline.stages[k + 1].devices, size)
                sends.append(send_s)
            costs.append(cost)
            busy.append(cost.forward_s + cost.backward_s + 2.0 * send_s)
            for first, end in stage.layers:
                machines[first:end] = self._machine_of[stage.devices[0]]
                tp[first:end] = tp_group.tp
        ends = stage_ends_s(busy, num_micro_batches)
        message_s = tuple([send_s for send_s in sends for _ in ("forward", "backward")])
        excess = max(stage.excess_bytes for stage in costs)
        if len(self._parts) >= _MAX_PIPELINES:
            self._parts.clear()
        part = self._parts[id(pipeline), size] = _Part(
            pipeline,
            PipelineCost(tuple(costs), messages_of(((size,),) * count, False), message_s, ends, ends[-1]),
            num_micro_batches * size,
            excess,
            self._eye[machines],
            tp,
        )
        return part

    def _stage_cost(self, tp_group: FlashFlexTpGroup, num_layers: int, first: bool, last: bool, size: int) -> StageCost:
        return StageCost.of(
            *self.stage_s(tp_group, num_layers, first, last, size, "full"),
            self._memory(tp_group, num_layers, first, last, size),
            tp_group.memory_bytes,
            self._num_params(tp_group, num_layers, first, last),
        )

    def _gradients_s(self, parts: list[_Part]) -> float:
        """Seconds of all layers' gradients, without the factor 1.1.

        A round's devices are one of each pipeline, and which of a TP group's makes no difference inside a
        machine: the holder in machine m sends to the others of m and to those elsewhere.
        """
        holders_lm = sum((part.machines for part in parts[1:]), start=parts[0].machines)
        degrees = np.array([part.tp for part in parts])
        least, largest = degrees.min(axis=0), degrees.max(axis=0)
        sends_lm = holders_lm @ self._s_per_byte - self._s_per_byte.diagonal()
        slowest = np.where(holders_lm > 0.0, sends_lm, 0.0).max(axis=1)
        rounds = largest // least / least
        bytes_to_each = ELEMENT_BYTES * self._layer_params / len(parts)
        return 2.0 * bytes_to_each * float(rounds @ slowest)

    @cached_property
    def _flops_per_token(self) -> float:
        return float(self.problem.model.model_flops_per_token(self.problem.workload.seq_len))

    @cached_property
    def _peak_flops(self) -> float:
        return self.problem.cluster.total_peak_flops(self.problem.workload.precision)


def stage_ends_s(busy_s: list[float], num_micro_batches: int) -> tuple[float, ...]:
    """When each stage ends, in a GPipe diagram whose columns last as long as their slowest busy stage.

    Stage k is busy in the columns k to k + M − 1. While the pipeline fills, the columns' lengths are prefix
    maxima of the stages, then the largest of all, and suffix maxima while it drains; with fewer micro-batches
    than stages, maxima of a window of M stages instead of the largest.
    """
    count = len(busy_s)
    prefix, suffix = list(busy_s), list(busy_s)
    for k in range(1, count):
        prefix[k] = max(prefix[k], prefix[k - 1])
        suffix[-1 - k] = max(suffix[-1 - k], suffix[-k])
    width = min(num_micro_batches, count)
    end_s = sum(prefix[: width - 1])  # columns 0 to width − 2
    if num_micro_batches >= count:
        end_s += (num_micro_batches - count + 1) * prefix[-1]
    else:
        end_s += max(busy_s[:width])  # column M − 1, the last one of stage 0
    ends = [end_s]
    for k in range(1, count):  # column k + M − 1
        end_s += suffix[k] if k + num_micro_batches >= count else max(busy_s[k : k + num_micro_batches])
        ends.append(end_s)
    return tuple(ends)


def _only_full(policy: str) -> None:
    if policy != "full":
        raise ValueError(f"recompute {policy!r} has no price here; FlashFlex's figures are with full recompute")

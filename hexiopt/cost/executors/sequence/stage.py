"""The cost of a stage with a sequence layout: seconds of a layer, of embedding and head, and bytes on every device.

Every device holds all weights of the stage's layers and runs norms, projections and MLP on its tokens. For a layer's
attention,
- an all-to-all in the device's group turns queries, keys and values of its tokens, for all heads, into those of the
  group's tokens for its heads; keys and values go to every device that reads their head (`kv_range`);
- in G steps the keys and values of the G groups pass along the sub-rings, while attention runs over those that have
  come. What the causal mask hides is not computed, and keys travel as long as a device behind needs them. Partial
  results are merged in FP32 by their log-sum-exp;
- another all-to-all brings the results back to their tokens.
The backward mirrors the forward. Keys and values travel once more, and one step behind each block the gradients of its
keys and values: every device adds its part in FP32 and sends the sum on in the workload's element type; after G steps
the sums are home, where an all-to-all adds those that several devices hold of a head. Selective recompute repeats the
steps of the forward, full recompute the whole layer. Layers do not overlap: a layer begins when the one before has
ended on all devices. A layout of a single group of a single device costs what TP 1 costs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np

from hexiopt.cost.executors.communicators import Communicators
from hexiopt.cost.executors.compute import (
    Blocks,
    ComputeTimes,
    DenseTimes,
    OperatorTimes,
    attention_times,
    dense_times,
    embedding_compute,
    head_compute,
    quantization_s,
)
from hexiopt.cost.executors.memory import MemoryModel
from hexiopt.cost.executors.network_load import LinkLoads, LinkTable, RingLinks
from hexiopt.cost.executors.sequence.memory import SequenceMemory
from hexiopt.cost.executors.sequence.phases import Exchange, Phase, RingSteps, SequencePeers, Work, ends_s
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.numbers.messages import TRAINING
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.token_layout import Floats, Ints, RingSchedule, kv_heads_of, members, misfit, ring_holders
from hexiopt.problem.model import largest_shard
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import JOINED

_CELLS = 2**21  # of a table of steps and devices that is computed at once


class SequenceStage:
    """Prices one layout at one micro-batch size.

    `users`: the number of sequence stages of a plan that use a network resource, for resources that other stages than
    this one use; each has an equal share. Raises InputError where the layout does not fit the problem: see `misfit`.
    """

    def __init__(
        self,
        problem: Problem,
        framework: Framework,
        layout: SequenceParallel,
        micro_batch_size: int,
        users: Mapping[int, int] | None = None,
        links: LinkTable | None = None,
    ) -> None:
        self.problem, self.framework, self.size = problem, framework, micro_batch_size
        model = problem.model
        wrong = misfit(layout, problem.workload.seq_len, model.num_heads)
        if wrong is not None:
            raise InputError(f"sequence layout: {wrong}")
        self.members = members(layout)
        self._ring_schedule = RingSchedule(self.members, layout.order)
        self.peers = SequencePeers.of(self.members, ring_holders(self.members, model.num_heads, model.num_kv_heads))
        self.kv_heads = kv_heads_of(self.members, model.num_heads, model.num_kv_heads)
        self._users, self._links = users or {}, links or LinkTable(problem.cluster)
        self._last_step = self._ring_schedule.last_step()
        self._all_steps = Memo(self._steps_at_once)
        self._layers = Memo(self._time_layer)

    # ---------------------------------------------------------------- what a layer takes

    def layer_s(self, policy: str) -> tuple[float, float]:
        """Forward and backward seconds of one layer for a micro-batch, recompute included."""
        return self._layers[policy]

    def _time_layer(self, policy: str) -> tuple[float, float]:
        floor_s = self.framework.layer_host_s
        forward_s, backward_s = self._ends_s(self.forward()), self._ends_s(self.backward(policy))
        recompute_s = floor_s if policy in ("full", JOINED) else 0.0
        return max(floor_s, forward_s), max(floor_s + recompute_s, backward_s)

    def parts_s(self, policy: str) -> dict[str, Floats]:
        """Seconds of a layer's forward and backward on each device [devices], by part: outside attention, in attention,
        in the all-to-alls of its group. For the rest of the layer it waits for keys and other devices."""
        count = len(self.members.device)
        parts_s = {part: np.zeros(count) for part in ("outside attention", "attention", "all-to-all")}
        for phase in chain(self.forward(), self.backward(policy)):
            if isinstance(phase, Work):
                parts_s["outside attention"] += phase.seconds
            elif isinstance(phase, RingSteps):
                parts_s["attention"] += phase.compute_s.sum(axis=0)[phase.device_class]
            else:
                slowest = np.zeros(len(self.members.starts))
                np.maximum.at(slowest, self.members.group[self.peers.senders], phase.message_s)
                parts_s["all-to-all"] += slowest[self.members.group]
        return parts_s

    def _ends_s(self, phases: Iterator[Phase]) -> float:
        return float(ends_s(self.members, self.peers, phases).max())

    def forward(self, again: bool = False) -> Iterator[Phase]:
        """The phases of a layer's forward, or of its recompute where `again`."""
        leave_out = again and self.framework.recompute_stops_early
        yield Work(self._dense.before_s())
        yield self._exchanges["qkv"]
        yield from self._ring(backward=False)
        yield self._exchanges["out_back"]
        yield Work(self._dense.after_s() - (self._dense.last_product_s if leave_out else 0.0))

    def backward(self, policy: str) -> Iterator[Phase]:
        """The phases of a layer's backward under a recompute policy."""
        passes = c.GEMM_BACKWARD_PASSES, c.MEMORY_BACKWARD_PASSES
        if policy in ("full", JOINED):
            # Of layers recomputed together only the last may stop early.
            yield from self.forward(again=policy == "full")
        yield Work(self._dense.after_s(*passes))
        yield self._exchanges["out"]
        if policy == "selective":
            yield from self._ring(backward=False)
        yield from self._ring(backward=True)
        yield self._exchanges["qkv_back"]
        yield Work(self._dense.before_s(*passes))

    @cached_property
    def ends_s(self) -> tuple[ComputeTimes, ComputeTimes]:
        """The times on the slowest device of the embedding, and of final norm, LM head and loss."""
        model, workload = self.problem.model, self.problem.workload
        most = [int(self.members.tokens[self._type_of == k].max()) for k in range(len(self._types))]
        ends = []
        for function in (embedding_compute, head_compute):
            times = [
                function(model, replace(workload, seq_len=tokens), gpu, 1, self.size)
                for gpu, tokens in zip(self._types, most, strict=True)
            ]
            ends.append(ComputeTimes(max(t.forward_s for t in times), max(t.backward_s for t in times)))
        return ends[0], ends[1]

    def stage_s(self, policies: Sequence[str], first: bool, last: bool) -> tuple[float, float]:
        """Forward and backward seconds of layers with `policies` [layers], of a `first` stage with the embedding, of a
        `last` one with the head."""
        forward_s = backward_s = 0.0
        for policy, count in Counter(policies).items():
            times = self.layer_s(policy)
            forward_s, backward_s = forward_s + count * times[0], backward_s + count * times[1]
        for times_s, present in zip(self.ends_s if first or last else (), (first, last), strict=False):
            if present:
                forward_s, backward_s = forward_s + times_s.forward_s, backward_s + times_s.backward_s
        message_s = (2 - first - last) * self.quantization_s
        return forward_s + message_s, backward_s + message_s

    @cached_property
    def quantization_s(self) -> float:
        """Seconds in which the slowest device quantises its part of a message, or dequantises it; 0 where messages keep
        the precision of training."""
        if self.problem.workload.message_precision == TRAINING:
            return 0.0
        tokens = self.size * self.members.tokens.astype(float)
        clock = self._clock(np.arange(len(self.members.device)))
        return float(quantization_s(clock, self.problem.model, self.problem.workload, tokens).max())

    @cached_property
    def network_resources(self) -> frozenset[int]:
        """The network resources that its messages cross."""
        resources = set(self.exchange_links.network.tolist())
        if self._ring_schedule.num_groups > 1:
            resources.update(self.ring_links.network.tolist())
        return frozenset(resources - {-1})

    # ---------------------------------------------------------------- memory

    @cached_property
    def alone(self) -> MemoryModel:
        """The memory of a single device that holds all heads and tokens, whose states are those of every device."""
        return MemoryModel(self.problem.model, self.problem.workload, self._types[0], 1, self.size)

    @cached_property
    def memory(self) -> SequenceMemory:
        """The memory of all devices."""
        model, workload = self.problem.model, self.problem.workload
        fused = np.array([float(gpu.flash_attention) for gpu in self._types])[self._type_of]
        communicators, sizes = Communicators(self.problem.cluster), np.bincount(self.members.group).tolist()
        held = [
            communicators.total_bytes(gpu, communicators.layout_bytes(gpu, sizes[group], len(sizes)))
            for group, gpu in zip(
                self.members.group.tolist(), map(self.problem.cluster.gpu_of, self.members.device.tolist()), strict=True
            )
        ]
        rings, heads = self.peers.rings, self.kv_heads
        return SequenceMemory(model, workload, self.alone, self.members, rings, heads, fused, np.array(held), self.size)

    @cached_property
    def limit_bytes(self) -> Floats:
        """Usable bytes of every device [devices]."""
        return np.array([gpu.usable_memory_bytes for gpu in self._types])[self._type_of]

    # ---------------------------------------------------------------- phases

    @cached_property
    def _type_numbers(self) -> tuple[Ints, Ints]:
        types, numbers = np.unique(self.problem.cluster.type_of[self.members.device], return_inverse=True)
        return types, numbers

    @cached_property
    def _types(self) -> tuple[Gpu, ...]:
        """The GPU types of the devices."""
        return tuple(self.problem.cluster.types[k] for k in self._type_numbers[0].tolist())

    @property
    def _type_of(self) -> Ints:
        """The number of each device's type [devices]."""
        return self._type_numbers[1]

    def _clock(self, places: Ints) -> OperatorTimes:
        """The clock of the devices at `places`."""
        clocks = [OperatorTimes(gpu, self.problem.workload.precision) for gpu in self._types]
        return OperatorTimes.of_devices(clocks, self._type_of[places])

    @cached_property
    def _dense(self) -> DenseTimes[Floats]:
        """Seconds of operators outside attention."""
        model, places = self.problem.model, np.arange(len(self.members.device))
        tokens = self.size * self.members.tokens.astype(float)
        clock, shard = self._clock(places), largest_shard(model, 1)
        return dense_times(model.layer, self.problem.workload, clock, shard, tokens, self.framework)

    @property
    def _head_bytes(self) -> float:
        """Bytes of a head of a token position, in all sequences of a micro-batch."""
        return float(self.size * self.problem.model.head_dim * self.problem.workload.element_bytes)

    @cached_property
    def exchange_links(self) -> LinkLoads:
        """The links of the all-to-alls."""
        device = self.members.device
        return self._links.loads(device[self.peers.senders], device[self.peers.receivers], self._users)

    @cached_property
    def ring_links(self) -> RingLinks:
        """The links along the sub-rings."""
        rings = self.peers.rings
        return self._links.rings(self.members.device[rings.place], rings.kv_heads, self._users)

    @cached_property
    def _exchanges(self) -> dict[str, Exchange]:
        """The all-to-alls of queries, keys and values, and of results: from tokens to heads, and back."""
        tokens, senders, receivers = self.members.tokens, self.peers.senders, self.peers.receivers
        rows = [
            held[at] * heads[other]
            for heads in (self.members.heads + 2 * self.kv_heads, self.members.heads)
            for held, at, other in ((tokens, senders, receivers), (tokens, receivers, senders))
        ]
        message_s = self.exchange_links.seconds(self._head_bytes * np.array(rows, float))
        return dict(zip(("qkv", "qkv_back", "out", "out_back"), map(Exchange, message_s), strict=True))

    @cached_property
    def _classes(self) -> tuple[Ints, Ints]:
        """Classes of devices that compute equally long: an example of each [classes], the class of a device
        [devices]."""
        model, code = self.problem.model, self.members.group
        for column, most in (
            (self._type_of, len(self._types)),
            (self.members.heads, model.num_heads + 1),
            (self.kv_heads, model.num_kv_heads + 1),
        ):
            code = code * most + column
        _, example, of = np.unique(code, return_index=True, return_inverse=True)
        return example, of

    def _num_steps(self, backward: bool) -> int:
        groups = self._ring_schedule.num_groups
        return groups + (backward and groups > 1)

    def _steps_at_once(self, backward: bool) -> RingSteps:
        return self._some_steps(np.arange(self._num_steps(backward)), backward)

    def _ring(self, backward: bool) -> Iterator[RingSteps]:
        """The steps of the rings; the backward has one more, in which the last gradients go home."""
        last, together = self._num_steps(backward), max(1, _CELLS // len(self._classes[0]))
        if together >= last:
            yield self._all_steps[backward]
            return
        for first in range(0, last, together):
            yield self._some_steps(np.arange(first, min(first + together, last)), backward)

    def _some_steps(self, steps: Ints, backward: bool) -> RingSteps:
        tokens, source = self._ring_schedule.tokens, self._ring_schedule.source(steps)
        # A block stays after the last step that meets queries; its gradients go all the way round, one step behind.
        moved = np.where(steps[:, None] < self._last_step[source], tokens[source], 0)
        if backward:
            moved = moved + np.where(steps[:, None] > 0, tokens[self._ring_schedule.source(steps - 1)], 0)
        if self._ring_schedule.num_groups == 1:
            moved = np.zeros_like(moved)
        message_s = self.ring_links.seconds(2.0 * self._head_bytes * moved)
        return RingSteps(self._attention_s(steps, backward), message_s, self._classes[1], self.ring_links.kind)

    def _attention_s(self, steps: Ints, backward: bool) -> Floats:
        """Seconds of attention at every step, with the sums of its parts [steps, classes]; 0 at the step in which the
        last gradients go home."""
        model, width, groups = self.problem.model, self.problem.workload.element_bytes, self._ring_schedule.num_groups
        classes = self._classes[0]
        total_s = np.zeros((len(steps), len(classes)))
        steps = steps[steps < groups]
        causal, whole, kernels, rows = self._ring_schedule.blocks(steps)
        held = self._ring_schedule.tokens[self._ring_schedule.source(steps)]
        fused_types = np.array([gpu.flash_attention for gpu in self._types])
        for fused in set(fused_types.tolist()):
            which = np.flatnonzero(fused_types[self._type_of[classes]] == fused)
            places = classes[which]
            group, heads, clock = self.members.group[places], self.members.heads[places], self._clock(places)
            rows_per_token, launches = float(self.size) * heads, kernels[:, group]
            blocks = Blocks(causal[:, group] * rows_per_token, whole[:, group] * rows_per_token, launches)
            speed = self.framework.block_attention_speed
            seconds: Floats = attention_times(clock, fused, 4 * model.head_dim, width, blocks, speed)[backward]
            if groups > 1:
                runs, elements = np.minimum(launches, 1.0), float(self.size * model.head_dim)
                moved = rows[:, group] * (elements * (2 * c.ACCUMULATOR_BYTES + width) * heads)
                if backward:
                    moved += runs * held[:, group] * (elements * 3 * width * 2 * self.kv_heads[places])
                sums = c.GRADIENT_SUM_KERNELS if backward else c.MERGE_KERNELS
                seconds = seconds + clock.memory_s(moved, sums * runs)
            total_s[: len(steps), which] = seconds
        return total_s

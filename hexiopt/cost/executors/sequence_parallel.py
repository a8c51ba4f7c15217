"""What a stage with a sequence layout takes: seconds of a layer, of embedding and head, and bytes on every device.

Every device holds all weights of the stage's layers and runs norms, projections and MLP on its own tokens. For a
layer's attention,
- an all-to-all in its group turns queries, keys and values of its own tokens, all heads, into those of the group's
  tokens, its own heads; keys and values go to every device that reads their head (`kv_range`);
- in G steps the keys and values of the G groups come by along the sub-rings, while attention runs over those that are
  there. What the causal mask hides is not computed, and keys travel on as long as somebody behind needs them. Partial
  results are merged in FP32 by their log-sum-exp;
- another all-to-all brings the results back to their tokens.
The backward mirrors it. Keys and values travel once more, and with each block, one step behind, the gradients of its
keys and values: every device adds its own in FP32 and sends the sum on in the workload's element type; after G steps
they are home, where an all-to-all sums what several devices hold of a head. Selective recompute repeats the steps of
the forward, full recompute the whole layer. Layers do not overlap: one begins when the one before has ended on all
devices. A layout of one group of one device takes what TP 1 takes.
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
)
from hexiopt.cost.executors.memory import MemoryModel
from hexiopt.cost.executors.network_load import LinkLoads, LinkTable, RingLinks
from hexiopt.cost.executors.quantization import quantization_s
from hexiopt.cost.executors.sequence_memory import SequenceMemory
from hexiopt.cost.executors.sequence_phases import Exchange, Phase, RingSteps, SequencePeers, Work, ends_s
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

_CELLS = 2**21  # of a table of steps and devices that is worked through at once


class SequenceStage:
    """Prices one layout at one micro-batch size.

    `sharers`: how many sequence stages of a plan use a resource of the network, where more than this one; each has an
    equal part of it.
    Raises InputError where the layout does not fit the problem: see `misfit`.
    """

    def __init__(
        self,
        problem: Problem,
        framework: Framework,
        layout: SequenceParallel,
        micro_batch_size: int,
        sharers: Mapping[int, int] | None = None,
        links: LinkTable | None = None,
    ) -> None:
        self.problem, self.framework, self.size = problem, framework, micro_batch_size
        model = problem.model
        wrong = misfit(layout, problem.workload.seq_len, model.num_heads)
        if wrong is not None:
            raise InputError(f"sequence layout: {wrong}")
        self.own = members(layout)
        self._ring_schedule = RingSchedule(self.own, layout.order)
        self.peers = SequencePeers.of(self.own, ring_holders(self.own, model.num_heads, model.num_kv_heads))
        self.kv_heads = kv_heads_of(self.own, model.num_heads, model.num_kv_heads)
        self._sharers, self._links = sharers or {}, links or LinkTable(problem.cluster)
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
        """Seconds of a layer's forward and backward of each device [devices]: outside attention, in attention, in its
        group's all-to-alls. What lacks to those of the layer it waits for keys and other devices."""
        count = len(self.own.device)
        found = {part: np.zeros(count) for part in ("outside attention", "attention", "all-to-all")}
        for phase in chain(self.forward(), self.backward(policy)):
            if isinstance(phase, Work):
                found["outside attention"] += phase.seconds
            elif isinstance(phase, RingSteps):
                found["attention"] += phase.compute_s.sum(axis=0)[phase.device_class]
            else:
                slowest = np.zeros(len(self.own.starts))
                np.maximum.at(slowest, self.own.group[self.peers.senders], phase.message_s)
                found["all-to-all"] += slowest[self.own.group]
        return found

    def _ends_s(self, phases: Iterator[Phase]) -> float:
        return float(ends_s(self.own, self.peers, phases).max())

    def forward(self, again: bool = False) -> Iterator[Phase]:
        """The phases of a layer's forward; `again` for recompute."""
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
            # Of layers recomputed together, only one may stop early: the last.
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
        """What the embedding adds to a first stage, and final norm, LM head and loss to a last one: on the slowest."""
        model, workload = self.problem.model, self.problem.workload
        most = [int(self.own.tokens[self._type_of == k].max()) for k in range(len(self._types))]
        found = []
        for function in (embedding_compute, head_compute):
            each = [
                function(model, replace(workload, seq_len=tokens), gpu, 1, self.size)
                for gpu, tokens in zip(self._types, most, strict=True)
            ]
            found.append(ComputeTimes(max(t.forward_s for t in each), max(t.backward_s for t in each)))
        return found[0], found[1]

    def stage_s(self, policies: Sequence[str], first: bool, last: bool) -> tuple[float, float]:
        """Forward and backward seconds of layers with `policies`, with the embedding (`first`), the head (`last`)."""
        forward_s = backward_s = 0.0
        for policy, count in Counter(policies).items():
            times = self.layer_s(policy)
            forward_s, backward_s = forward_s + count * times[0], backward_s + count * times[1]
        for times_s, held in zip(self.ends_s if first or last else (), (first, last), strict=False):
            if held:
                forward_s, backward_s = forward_s + times_s.forward_s, backward_s + times_s.backward_s
        message_s = (2 - first - last) * self.quantization_s
        return forward_s + message_s, backward_s + message_s

    @cached_property
    def quantization_s(self) -> float:
        """Seconds in which the slowest device quantises its part of a message, or dequantises it; 0 where messages keep
        the precision of training."""
        if self.problem.workload.message_precision == TRAINING:
            return 0.0
        tokens = self.size * self.own.tokens.astype(float)
        clock = self._clock(np.arange(len(self.own.device)))
        return float(quantization_s(clock, self.problem.model, self.problem.workload, tokens).max())

    @cached_property
    def crossed(self) -> frozenset[int]:
        """The resources of the network that its messages cross."""
        found = set(self.exchange_links.network.tolist())
        if self._ring_schedule.num_groups > 1:
            found.update(self.ring_links.network.tolist())
        return frozenset(found - {-1})

    # ---------------------------------------------------------------- memory

    @cached_property
    def alone(self) -> MemoryModel:
        """Bytes of one device that holds all heads and tokens: its states are those of every device."""
        return MemoryModel(self.problem.model, self.problem.workload, self._types[0], 1, self.size)

    @cached_property
    def memory(self) -> SequenceMemory:
        """Bytes on every device."""
        model, workload = self.problem.model, self.problem.workload
        fused = np.array([float(gpu.flash_attention) for gpu in self._types])[self._type_of]
        communicators, sizes = Communicators(self.problem.cluster), np.bincount(self.own.group).tolist()
        held = [
            communicators.held(gpu, communicators.layout(gpu, sizes[group], len(sizes)))
            for group, gpu in zip(
                self.own.group.tolist(), map(self.problem.cluster.gpu_of, self.own.device.tolist()), strict=True
            )
        ]
        rings, heads = self.peers.rings, self.kv_heads
        return SequenceMemory(model, workload, self.alone, self.own, rings, heads, fused, np.array(held), self.size)

    @cached_property
    def limit_bytes(self) -> Floats:
        """Usable memory of every device."""
        return np.array([gpu.usable_memory_bytes for gpu in self._types])[self._type_of]

    # ---------------------------------------------------------------- phases

    @cached_property
    def _numbered_types(self) -> tuple[Ints, Ints]:
        found, numbers = np.unique(self.problem.cluster.type_of[self.own.device], return_inverse=True)
        return found, numbers

    @cached_property
    def _types(self) -> tuple[Gpu, ...]:
        """The GPU types of the devices."""
        return tuple(self.problem.cluster.types[k] for k in self._numbered_types[0].tolist())

    @property
    def _type_of(self) -> Ints:
        """The number of each device's type [devices]."""
        return self._numbered_types[1]

    def _clock(self, places: Ints) -> OperatorTimes:
        """The clock of some of the devices."""
        clocks = [OperatorTimes(gpu, self.problem.workload.precision) for gpu in self._types]
        return OperatorTimes.each(clocks, self._type_of[places])

    @cached_property
    def _dense(self) -> DenseTimes[Floats]:
        """Operators outside attention."""
        model, places = self.problem.model, np.arange(len(self.own.device))
        tokens = self.size * self.own.tokens.astype(float)
        clock, shard = self._clock(places), largest_shard(model, 1)
        return dense_times(model, self.problem.workload, clock, shard, tokens, self.framework)

    @property
    def _head_bytes(self) -> float:
        """Of a head of a token position, in all sequences of a micro-batch."""
        return float(self.size * self.problem.model.head_dim * self.problem.workload.element_bytes)

    @cached_property
    def exchange_links(self) -> LinkLoads:
        """The links of the all-to-alls."""
        device = self.own.device
        return self._links.loads(device[self.peers.senders], device[self.peers.receivers], self._sharers)

    @cached_property
    def ring_links(self) -> RingLinks:
        """The links along the sub-rings."""
        rings = self.peers.rings
        return self._links.rings(self.own.device[rings.place], rings.kv_heads, self._sharers)

    @cached_property
    def _exchanges(self) -> dict[str, Exchange]:
        """All-to-alls that bring queries, keys and values, or results, from the tokens to their heads, and back."""
        tokens, senders, receivers = self.own.tokens, self.peers.senders, self.peers.receivers
        rows = [
            own[at] * heads[other]
            for heads in (self.own.heads + 2 * self.kv_heads, self.own.heads)
            for own, at, other in ((tokens, senders, receivers), (tokens, receivers, senders))
        ]
        each = self.exchange_links.seconds(self._head_bytes * np.array(rows, float))
        return dict(zip(("qkv", "qkv_back", "out", "out_back"), map(Exchange, each), strict=True))

    @cached_property
    def _classes(self) -> tuple[Ints, Ints]:
        """Devices that compute alike: an example of each class, and the class of each device."""
        model, code = self.problem.model, self.own.group
        for column, most in (
            (self._type_of, len(self._types)),
            (self.own.heads, model.num_heads + 1),
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
        """The steps of the rings: in the backward one more, in which the last gradients go home."""
        last, together = self._num_steps(backward), max(1, _CELLS // len(self._classes[0]))
        if together >= last:
            yield self._all_steps[backward]
            return
        for first in range(0, last, together):
            yield self._some_steps(np.arange(first, min(first + together, last)), backward)

    def _some_steps(self, steps: Ints, backward: bool) -> RingSteps:
        tokens, source = self._ring_schedule.tokens, self._ring_schedule.source(steps)
        # A block stays where the last step is that meets queries; its gradients go all the way round, one step behind.
        moved = np.where(steps[:, None] < self._last_step[source], tokens[source], 0)
        if backward:
            moved = moved + np.where(steps[:, None] > 0, tokens[self._ring_schedule.source(steps - 1)], 0)
        if self._ring_schedule.num_groups == 1:
            moved = np.zeros_like(moved)
        message_s = self.ring_links.seconds(2.0 * self._head_bytes * moved)
        return RingSteps(self._attention_s(steps, backward), message_s, self._classes[1], self.ring_links.kind)

    def _attention_s(self, steps: Ints, backward: bool) -> Floats:
        """Attention at every step, and what sums up its parts [steps, classes of devices]; nothing at the step in which
        the last gradients go home."""
        model, width, groups = self.problem.model, self.problem.workload.element_bytes, self._ring_schedule.num_groups
        classes = self._classes[0]
        found = np.zeros((len(steps), len(classes)))
        steps = steps[steps < groups]
        causal, whole, kernels, rows = self._ring_schedule.blocks(steps)
        held = self._ring_schedule.tokens[self._ring_schedule.source(steps)]
        fused_types = np.array([gpu.flash_attention for gpu in self._types])
        for fused in set(fused_types.tolist()):
            which = np.flatnonzero(fused_types[self._type_of[classes]] == fused)
            places = classes[which]
            own, heads, clock = self.own.group[places], self.own.heads[places], self._clock(places)
            each, some = float(self.size) * heads, kernels[:, own]
            blocks = Blocks(causal[:, own] * each, whole[:, own] * each, some)
            seconds: Floats = attention_times(clock, fused, model, width, blocks, self.framework)[backward]
            if groups > 1:
                some, elements = np.minimum(some, 1.0), float(self.size * model.head_dim)
                moved = rows[:, own] * (elements * (2 * c.ACCUMULATOR_BYTES + width) * heads)
                if backward:
                    moved += some * held[:, own] * (elements * 3 * width * 2 * self.kv_heads[places])
                launches = c.GRADIENT_SUM_KERNELS if backward else c.MERGE_KERNELS
                seconds = seconds + clock.memory_s(moved, launches * some)
            found[: len(steps), which] = seconds
        return found

"""Times and memory of devices at a resolution: tokens come in *quanta*, heads one by one.

All costs of a sequence stage are made of a few functions of a device's number of quanta, and of products of quanta and
heads (`hexiopt/cost/executors/sequence/stage.py`, `sequence_memory.py`). This module tabulates these functions and
coefficients from the cost model's own functions.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hexiopt.cost.executors.activations import Activations, MicroBatchShare
from hexiopt.cost.executors.compute import (
    Blocks,
    OperatorTimes,
    attention_times,
    dense_times,
    embedding_compute,
    head_compute,
)
from hexiopt.cost.executors.memory import transient
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.model import largest_shard
from hexiopt.problem.problem import Problem

_MANY = 1e18


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of some kernels: at least `launch_s` for each, and `slope_s` for each unit of work."""

    slope_s: float
    launch_s: float


@dataclass(frozen=True)
class DenseSeconds:
    """Seconds of a layer outside attention [quanta]: before and after it, forward and backward; and forward again."""

    before_s: Floats
    after_s: Floats
    before_back_s: Floats
    after_back_s: Floats
    after_again_s: Floats


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of a device under a policy: per quantum of its own; per quantum of its group and each of its query heads,
    each key-value head that these read, and each further copy of one; and per byte in transit. Each pair is without and
    with the working set of recomputation, of which the larger counts.
    """

    own: tuple[float, float]
    head: tuple[float, float]
    kv_head: tuple[float, float]
    copy: tuple[float, float]
    travelling: tuple[float, float]


def default_resolution(seq_len: int, least: int) -> int:
    """Quanta per sequence: the largest divisor up to 16 with an even number of tokens per quantum.

    Where none of these is at least 2 and `least`, the smallest such divisor above, or one quantum for each token.
    """
    even = [n for n in range(1, seq_len + 1) if seq_len % (2 * n) == 0]
    few = [n for n in even if max(2, least) <= n <= 16]
    return few[-1] if few else next((n for n in even if n >= max(2, least)), seq_len)


class QuantaGrid:
    """Tables of one problem at one resolution (quanta in a sequence) and micro-batch size."""

    def __init__(self, problem: Problem, framework: Framework, resolution: int, size: int) -> None:
        self.problem, self.framework = problem, framework
        self.resolution, self.size = resolution, size
        self.quantum = problem.workload.seq_len // resolution
        self.dense: Memo[Gpu, DenseSeconds] = Memo(self._dense)
        self.ends: Memo[Gpu, tuple[Floats, ...]] = Memo(self._ends)
        self._bytes: Memo[tuple[Gpu, str, int, bool], DeviceBytes] = Memo(lambda key: self._bytes_of(*key))

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of a head of a quantum, in all sequences of a micro-batch."""
        return float(self.size * self.quantum * self.problem.model.head_dim * self.problem.workload.element_bytes)

    def gpu(self, device: int) -> Gpu:
        """The type of a device."""
        return self.problem.cluster.gpu_of(device)

    def _dense(self, gpu: Gpu) -> DenseSeconds:
        """Seconds outside attention of 0 to `resolution` quanta."""
        problem, many = self.problem, np.arange(self.resolution + 1)
        clock = OperatorTimes.of_devices([OperatorTimes(gpu, problem.workload.precision)], np.zeros_like(many))
        tokens: Floats = self.size * self.quantum * many.astype(float)
        shard = largest_shard(problem.model, 1)
        times = dense_times(problem.model.layer, problem.workload, clock, shard, tokens, self.framework)
        back = c.GEMM_BACKWARD_PASSES, c.MEMORY_BACKWARD_PASSES
        less = times.last_product_s if self.framework.recompute_stops_early else 0.0
        return DenseSeconds(
            times.before_s(), times.after_s(), times.before_s(*back), times.after_s(*back), times.after_s() - less
        )

    def _ends(self, gpu: Gpu) -> tuple[Floats, ...]:
        """Seconds [quanta] of the embedding, forward and backward, and of final norm, head and loss, forward and
        backward.
        """
        model, workload = self.problem.model, self.problem.workload
        rows = []
        for function in (embedding_compute, head_compute):
            each = [
                function(model, replace(workload, seq_len=max(1, n * self.quantum)), gpu, 1, self.size)
                for n in range(self.resolution + 1)
            ]
            rows += [np.array([t.forward_s for t in each]), np.array([t.backward_s for t in each])]
        return tuple(rows)

    def attention(self, gpu: Gpu, backward: bool) -> tuple[tuple[KernelSeconds, bool], ...]:
        """The kernels of attention per quantum of queries, quantum of keys and head; and whether they also run over the
        pairs that the causal mask hides. Launch times are those of one kernel.
        """
        model, width = self.problem.model, self.problem.workload.element_bytes
        clock = OperatorTimes(gpu, self.problem.workload.precision)
        pairs = float(self.size) * self.quantum**2
        whole = not gpu.flash_attention
        blocks = Blocks(_MANY, _MANY, 0.0)
        fused = gpu.flash_attention
        speed = self.framework.block_attention_speed
        seconds = attention_times(clock, fused, 4 * model.head_dim, width, blocks, speed)
        slope = seconds[backward] / _MANY
        if not whole:
            return ((KernelSeconds(slope * pairs, clock.attention_s(0.0)), False),)
        passes = c.MEMORY_BACKWARD_PASSES if backward else 1
        scores = passes * clock.memory_s(_MANY * (width * c.SCORE_PASSES), 0.0) / _MANY
        return (
            (KernelSeconds((slope - scores) * pairs, clock.attention_s(0.0)), True),
            (KernelSeconds(scores * pairs, passes * clock.memory_s(0.0, c.SCORE_PASSES)), True),
        )

    def merging(self, gpu: Gpu, backward: bool) -> tuple[KernelSeconds, float]:
        """The kernels that merge parts of attention, per quantum of queries and query head; and, in the backward pass,
        seconds per quantum of keys and key-value head.
        """
        model, width = self.problem.model, self.problem.workload.element_bytes
        clock = OperatorTimes(gpu, self.problem.workload.precision)
        byte_s = clock.memory_s(_MANY) / _MANY
        elements = float(self.size * self.quantum * model.head_dim)
        kernels = c.GRADIENT_SUM_KERNELS if backward else c.MERGE_KERNELS
        term = KernelSeconds(byte_s * elements * (2 * c.ACCUMULATOR_BYTES + width), clock.memory_s(0.0, kernels))
        return term, byte_s * elements * 6 * width if backward else 0.0

    def bytes_of(self, gpu: Gpu, policy: str, held: int, parted: bool) -> DeviceBytes:
        """The memory of a device with `held` micro-batches in flight, in a group of its own or `parted` among several
        devices.
        """
        return self._bytes[gpu, policy, held, parted]

    def _bytes_of(self, gpu: Gpu, policy: str, held: int, parted: bool) -> DeviceBytes:
        problem, fused = self.problem, float(gpu.flash_attention)
        model, workload = problem.model, problem.workload
        quantum, scores = float(self.size * self.quantum), (1.0 - fused) * problem.workload.seq_len
        policies = (policy,) * model.num_layers

        def of(
            own: float = 0,
            attended: float = 0,
            heads: float = 0,
            kv: float = 0,
            copied: float = 0,
            travelling: float = 0,
        ) -> tuple[float, float]:
            amounts = MicroBatchShare(
                between=own * quantum,
                tokens=own * quantum,
                positions=own * float(self.quantum),
                attended=attended * quantum,
                heads=heads,
                kv_heads=kv,
                copied_kv_heads=copied,
                gathered=0.0,
                scores=attended * quantum * scores,
                fused=fused,
                parted=float(parted),
                travelling=travelling,
                routed=0.0,
                combined=0.0,
            )
            kept = Activations.of(model, workload, largest_shard(model, 1), amounts)
            stored = held * kept.of_range(Counter(policies), True, False)
            working = kept.working_set(policy) - kept.final_norm if policy != "none" else 0.0
            plain, more = (sum(transient(kept, stored + some, True, held, 0.0)) for some in (0.0, working))
            return plain, more

        return DeviceBytes(
            of(own=1), of(attended=1, heads=1), of(attended=1, kv=1), of(attended=1, copied=1), of(travelling=1)
        )

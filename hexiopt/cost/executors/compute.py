"""Seconds of compute: one layer, the embedding, the LM head, the optimiser, on the busiest rank of a TP group.

FLOPs come from the true shapes (grouped queries, gated MLP, causal half of attention). GEMMs follow the efficiency
curve of the GPU type, memory-bound operators its HBM bandwidth, and no operator takes less than its launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework, default_framework
from hexiopt.numbers.gpus import Gpu, outside_products
from hexiopt.problem.kinds import Recurrent
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.operators import Layer, Shard
from hexiopt.problem.workload import JOINED, Workload


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer for one micro-batch, TP collectives included: of its forward, of its backward, of its full
    recompute, and of attention alone; and the seconds of the host for a pass."""

    forward_s: float
    backward_s: float
    recompute_s: float
    attention_s: float
    host_s: float = 0.0

    def with_experts(self, forward_s: float, backward_s: float) -> "LayerTimes":
        """The same layer with the seconds of its experts, all-to-alls included; a full recompute repeats both."""
        return replace(
            self,
            forward_s=self.forward_s + forward_s,
            backward_s=self.backward_s + backward_s,
            recompute_s=self.recompute_s + forward_s,
        )

    def under(self, policy: str) -> tuple[float, float]:
        """Forward and backward seconds under a recompute policy."""
        # Of layers recomputed together only the last may stop early; the sum is the same for any of them.
        again_s = {"none": 0.0, "selective": self.attention_s, "full": self.recompute_s, JOINED: self.forward_s}
        host_s = self.host_s * (2 if policy in ("full", JOINED) else 1)  # another pass
        return max(self.forward_s, self.host_s), max(self.backward_s + again_s[policy], host_s)


Floats = NDArray[np.float64]
# A number, or an array [devices].
Amount = TypeVar("Amount", float, Floats)


def at_least(low: float | Floats, value: Amount) -> Amount:
    """`value`, or `low` where that is more."""
    if isinstance(value, np.ndarray):
        return np.maximum(low, value)
    assert not isinstance(low, np.ndarray), "a number has a single limit"
    return max(low, value)


class OperatorTimes:
    """Seconds of operators on one GPU type at one precision, or on many devices (`of_devices`)."""

    # Numbers, or arrays [devices].
    _gemm_s_per_flop: Any
    _gemm_half_flops: Any
    _attention_s_per_flop: Any
    _s_per_byte: Any
    _launch_s: Any

    def __init__(self, gpu: Gpu, precision: str) -> None:
        peak = gpu.peak_flops(precision)
        assert peak is not None, "Problem refuses a GPU without the workload's arithmetic"
        efficiency = gpu.efficiency
        self._gemm_s_per_flop = 1.0 / (peak * efficiency.product_max(precision))
        self._gemm_half_flops = efficiency.gemm_half_flops
        attention_peak = gpu.peak_flops(outside_products(precision))
        assert attention_peak is not None, "a GPU with FP8 has BF16"
        self._attention_s_per_flop = 1.0 / (attention_peak * efficiency.attention_max)
        self._s_per_byte = 1.0 / (gpu.hbm_bytes_per_s * efficiency.memory_max)
        self._launch_s = efficiency.launch_s

    @classmethod
    def of_devices(cls, clocks: "Sequence[OperatorTimes]", which: NDArray[np.int64]) -> "OperatorTimes":
        """The clock of devices of several types, `clocks[which[d]]` for device d; it takes arrays [devices]."""
        joint = object.__new__(cls)
        for name in cls.__annotations__:
            setattr(joint, name, np.array([getattr(clock, name) for clock in clocks])[which])
        return joint

    def gemm_s(self, flops: Amount) -> Amount:
        """Seconds of one matrix product: F / (peak · e(F)) with e(F) = gemm_max · F / (F + gemm_half_flops)."""
        seconds: Amount = (flops + self._gemm_half_flops) * self._gemm_s_per_flop
        return at_least(self._launch_s, seconds)

    def attention_s(self, flops: Amount, kernels: Amount | None = None) -> Amount:
        """Seconds of attention kernels, `flops` in all; of a single kernel without `kernels`."""
        seconds: Amount = flops * self._attention_s_per_flop
        return at_least(self._launch_s if kernels is None else kernels * self._launch_s, seconds)

    def memory_s(self, num_bytes: Amount, kernels: float | Floats = 1) -> Amount:
        """Seconds of memory-bound kernels that move `num_bytes` in all."""
        seconds: Amount = num_bytes * self._s_per_byte
        return at_least(kernels * self._launch_s, seconds)


@dataclass(frozen=True)
class ComputeTimes:
    """Forward and backward seconds of a piece of the model, without communication; `attention_s` is the part
    of the forward that selective recompute repeats, `attention_backward_s` its backward, `last_product_s` the MLP's
    second product.
    """

    forward_s: float
    backward_s: float
    attention_s: float = 0.0
    attention_backward_s: float = 0.0
    last_product_s: float = 0.0

    def then(self, other: "ComputeTimes") -> "ComputeTimes":
        """The same with the forward and backward seconds of `other` besides."""
        forward_s, backward_s = self.forward_s + other.forward_s, self.backward_s + other.backward_s
        return replace(self, forward_s=forward_s, backward_s=backward_s)

    def plus(self, more_s: float) -> "ComputeTimes":
        """The same with `more_s` more seconds in the forward and in the backward."""
        return replace(self, forward_s=self.forward_s + more_s, backward_s=self.backward_s + more_s)


@dataclass(frozen=True)
class Blocks(Generic[Amount]):
    """The work of attention kernels over all heads and sequences: (query, key) pairs that the causal mask leaves (a
    query and the key of its token count half), the `whole` pairs, masked ones included, and the number of kernels."""

    causal: Amount
    whole: Amount
    kernels: Amount


@dataclass(frozen=True)
class DenseTimes(Generic[Amount]):
    """Forward seconds of a layer's operators outside attention: matrix products before and after it, element-wise
    operators, of which `share_before` precede it, and the MLP's second product, one of the products after it."""

    gemms_before_s: Amount
    gemms_after_s: Amount
    elementwise_s: Amount
    share_before: float
    last_product_s: Amount

    def before_s(self, gemm_passes: float = 1.0, memory_passes: float = 1.0) -> Amount:
        """Seconds of norm and query, key and value projection: of the forward, or of a backward by its passes."""
        return gemm_passes * self.gemms_before_s + memory_passes * self.share_before * self.elementwise_s

    def after_s(self, gemm_passes: float = 1.0, memory_passes: float = 1.0) -> Amount:
        """Seconds of output projection, norm, MLP and residuals: of the forward, or of a backward by its passes."""
        return gemm_passes * self.gemms_after_s + memory_passes * (1.0 - self.share_before) * self.elementwise_s


def dense_times(
    layer: Layer, workload: Workload, clock: OperatorTimes, shard: Shard, tokens: Amount, framework: Framework
) -> DenseTimes[Amount]:
    """The times of a layer outside attention, recurrences and experts, for `tokens` tokens of a micro-batch, on a rank
    that holds `shard`."""
    divided = shard.tp if framework.sequence_parallel else 1
    gemms_s: tuple[list[Amount], list[Amount]] = ([], [])
    moved, cast = [0.0, 0.0], 0.0
    share_of = layer.on(shard)
    for product in share_of.products:
        flops = 2.0 * tokens * product.weights
        gemms_s[product.after].append(clock.gemm_s(flops / divided if product.divided else flops))
    for row in share_of.elementwise:
        share = divided if row.divided else 1
        moved[row.after] += row.moves / share
        cast += row.casts / share
    cast_bytes = tokens * cast * framework.cast_bytes.get(workload.precision, 0.0)
    moved_bytes = framework.memory_traffic * (tokens * workload.element_bytes * sum(moved)) + cast_bytes
    elementwise_s = clock.memory_s(moved_bytes, share_of.kernels)
    none_s = 0.0 * tokens
    before_s, after_s = (sum(products_s, none_s) for products_s in gemms_s)
    last_product_s = gemms_s[True][-1] if layer.kind.dense else none_s
    return DenseTimes(before_s, after_s, elementwise_s, moved[0] / sum(moved), last_product_s)


def attention_times(
    clock: OperatorTimes, fused: bool, pair_flops: int, width: int, pairs: Blocks[Amount], speed: float
) -> tuple[Amount, Amount]:
    """Forward and backward seconds of attention over blocks of queries and keys; 0 where there is no block.

    softmax(QK')V is two products, of `pair_flops` FLOPs a pair. Fused kernels compute only what the causal mask leaves,
    at `speed` times that of FlashAttention-2; others materialise the scores of whole blocks, `width` bytes each.
    """
    if fused:
        flops = float(pair_flops) * pairs.causal / speed
        return (
            clock.attention_s(flops, pairs.kernels),
            clock.attention_s(flops * c.FUSED_ATTENTION_BACKWARD_PASSES, pairs.kernels),
        )
    flops = float(pair_flops) * pairs.whole
    scores_s = clock.memory_s(pairs.whole * (width * c.SCORE_PASSES), c.SCORE_PASSES * pairs.kernels)
    return (
        clock.attention_s(flops, pairs.kernels) + scores_s,
        clock.attention_s(flops * c.UNFUSED_ATTENTION_BACKWARD_PASSES, pairs.kernels)
        + c.MEMORY_BACKWARD_PASSES * scores_s,
    )


def gemm_backward_passes(workload: Workload) -> int:
    """Matrix products of the backward for one of the forward: frozen matrices need only the gradient of the input."""
    return c.GEMM_BACKWARD_PASSES if workload.adapters is None else 1


def layer_compute(
    layer: Layer,
    workload: Workload,
    gpu: Gpu,
    tp: int,
    micro_batch_size: int,
    framework: Framework | None = None,
    parts: int = 1,
) -> ComputeTimes:
    """The times of a decoder layer without routed experts (`experts.py`) and adapters (`adapters.py`) on the busiest
    rank, for a micro-batch of `micro_batch_size` sequences.

    With `parts` each sequence of the workload is one of so many parts of a longer sequence, to all of which its tokens
    attend; other devices hold the other parts.
    """
    framework = framework or default_framework()
    clock, shard = OperatorTimes(gpu, workload.precision), layer.shard(tp, 0)
    tokens = float(micro_batch_size * workload.seq_len)
    dense = dense_times(layer, workload, clock, shard, tokens, framework)
    mixing_s = [0.0, 0.0]
    attention, attention_s = layer.kind.attention, (0.0, 0.0)
    if attention is not None:
        squares = tokens * workload.seq_len * parts * shard.heads
        computed = 0.5 * squares
        if attention.window is not None:
            # A kernel computes whole blocks of keys at the ends of windows; chunks are sequences of their own.
            beyond = 0.0 if attention.chunked else 0.5 * c.ATTENTION_BLOCK
            pairs = attention.pairs(workload.seq_len) / workload.seq_len
            computed = min(computed, tokens * shard.heads * (pairs + beyond))
            if attention.chunked:
                squares = 2.0 * computed
        blocks = Blocks(computed, squares, 1.0)
        attention_s = attention_times(
            clock, gpu.flash_attention, attention.pair_flops, workload.element_bytes, blocks, framework.attention_speed
        )
        mixing_s = list(attention_s)
    if layer.kind.recurrent is not None:
        for k, seconds in enumerate(scan_times(layer.kind.recurrent, clock, shard, tokens)):
            mixing_s[k] += seconds
    passes = gemm_backward_passes(workload), c.MEMORY_BACKWARD_PASSES
    return ComputeTimes(
        forward_s=dense.before_s() + mixing_s[0] + dense.after_s(),
        backward_s=dense.after_s(*passes) + mixing_s[1] + dense.before_s(*passes),
        attention_s=attention_s[0],
        attention_backward_s=attention_s[1],
        last_product_s=dense.last_product_s,
    )


def scan_times(part: Recurrent, clock: OperatorTimes, shard: Shard, tokens: float) -> tuple[float, float]:
    """Forward and backward seconds of a chunked scan of a rank's heads: products at the rate of attention kernels, and
    FP32 states between chunks, each written, passed on, and read, which is assumed of kernels that nobody has measured
    for us."""
    share = shard.state_heads / part.heads
    flops = tokens * share * part.scan_flops_per_token
    state_bytes = c.STATE_PASSES * c.ACCUMULATOR_BYTES * shard.state_heads * part.key_dim * part.value_dim / part.chunk
    moved_s = clock.memory_s(tokens * state_bytes, c.SCAN_KERNELS)
    products_s = clock.attention_s(flops)
    return products_s + moved_s, c.GEMM_BACKWARD_PASSES * products_s + c.MEMORY_BACKWARD_PASSES * moved_s


def embedding_compute(model: ModelSpec, workload: Workload, gpu: Gpu, tp: int, micro_batch_size: int) -> ComputeTimes:
    """The times of the embedding look-up (a gather) and of its backward (a scatter-add into the gradient), which a
    frozen embedding has not."""
    clock = OperatorTimes(gpu, workload.precision)
    tokens = micro_batch_size * workload.seq_len
    moved = 2.0 * tokens * model.hidden_size * workload.element_bytes
    gather_s, projection_s = clock.memory_s(moved), _projection_s(model, clock, tokens)
    if workload.adapters is not None:
        return ComputeTimes(projection_s + gather_s, 0.0)
    return ComputeTimes(
        projection_s + gather_s, c.GEMM_BACKWARD_PASSES * projection_s + c.MEMORY_BACKWARD_PASSES * gather_s
    )


def _projection_s(model: ModelSpec, clock: OperatorTimes, tokens: int) -> float:
    """Seconds of the product between hidden states and a narrower embedding, at either end of a model with one."""
    if model.projected_embedding is None:
        return 0.0
    return clock.gemm_s(2.0 * tokens * model.hidden_size * model.projected_embedding)


def head_compute(model: ModelSpec, workload: Workload, gpu: Gpu, tp: int, micro_batch_size: int) -> ComputeTimes:
    """The times of final norm, LM head and cross-entropy over the rank's part of the vocabulary."""
    # The head runs in BF16 where layers run in FP8.
    clock, shard = OperatorTimes(gpu, outside_products(workload.precision)), largest_shard(model, tp)
    tokens = micro_batch_size * workload.seq_len
    gemm_s = clock.gemm_s(2.0 * tokens * model.embedding_size * shard.vocab)
    gemm_s += _projection_s(model, clock, tokens)
    normed = 2.0 * tokens * model.hidden_size * workload.element_bytes
    norm_s = clock.memory_s(normed / tp if workload.sequence_parallel else normed)
    loss_s = clock.memory_s(
        float(tokens) * shard.vocab * (workload.element_bytes + c.LOSS_BYTES) * c.LOSS_PASSES, c.LOSS_PASSES
    )
    return ComputeTimes(
        gemm_s + norm_s + loss_s, gemm_backward_passes(workload) * gemm_s + c.MEMORY_BACKWARD_PASSES * norm_s + loss_s
    )


def optimizer_compute_s(workload: Workload, gpu: Gpu, num_params: float) -> float:
    """Seconds of an optimizer step over `num_params` parameters of layers on a device: memory traffic only."""
    return OperatorTimes(gpu, workload.precision).memory_s(num_params * workload.states.step_bytes)


def quantization_s(clock: OperatorTimes, model: ModelSpec, workload: Workload, tokens: Amount) -> Amount:
    """Seconds for a message of so many `tokens`: a memory-bound kernel reads one form and writes the other."""
    hidden = model.hidden_size
    return clock.memory_s(tokens * float(hidden * workload.element_bytes + workload.message_bytes(hidden)))

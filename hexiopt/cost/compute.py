"""Seconds of compute: one layer, the embedding, the LM head, the optimiser, on the busiest rank of a TP group.

FLOPs come from the true shapes (grouped queries, gated MLP, causal half of attention). A GEMM runs at the
type's efficiency curve, memory-bound work at its HBM bandwidth, no operator faster than its launch.
"""

from dataclasses import dataclass, replace
from math import ceil

from hexiopt.cost import coefficients as c
from hexiopt.frameworks import Framework, default_framework
from hexiopt.gpus import Gpu
from hexiopt.model import ModelSpec
from hexiopt.workload import Workload


@dataclass(frozen=True)
class Shard:
    """The largest share of a layer that a rank of a TP group holds: heads, MLP columns, rows of the vocabulary."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tp: int


def largest_shard(model: ModelSpec, tp: int) -> Shard:
    """The share of the busiest rank when heads and columns are split as evenly as whole heads allow.

    Key-value heads are replicated where several ranks' query heads meet them.
    """
    group = model.num_heads // model.num_kv_heads
    low, extra = divmod(model.num_heads, tp)
    kv, start = 1, 0
    for rank in range(tp):
        end = start + low + (rank < extra)
        if end > start:
            kv = max(kv, (end - 1) // group - start // group + 1)
        start = end
    return Shard(ceil(model.num_heads / tp), kv, ceil(model.ffn_size / tp), ceil(model.vocab_size / tp), tp)


class Clock:
    """Times operators on one GPU type at one precision. All times in seconds."""

    def __init__(self, gpu: Gpu, precision: str) -> None:
        peak = gpu.peak_flops(precision)
        assert peak is not None, "Problem refuses a GPU without the workload's arithmetic"
        efficiency = gpu.efficiency
        self._gemm_s_per_flop = 1.0 / (peak * efficiency.gemm_max)
        self._gemm_half_flops = efficiency.gemm_half_flops
        # FP8 is for matrix products alone.
        attention_peak = gpu.peak_flops("bf16" if precision == "fp8" else precision)
        assert attention_peak is not None, "a GPU with FP8 has BF16"
        self._attention_s_per_flop = 1.0 / (attention_peak * efficiency.attention_max)
        self._s_per_byte = 1.0 / (gpu.hbm_bytes_per_s * efficiency.memory_max)
        self._launch_s = efficiency.launch_s

    def gemm_s(self, flops: float) -> float:
        """One matrix product: F / (peak · e(F)) with e(F) = gemm_max · F / (F + gemm_half_flops)."""
        return max(self._launch_s, (flops + self._gemm_half_flops) * self._gemm_s_per_flop)

    def attention_s(self, flops: float) -> float:
        """One attention kernel."""
        return max(self._launch_s, flops * self._attention_s_per_flop)

    def memory_s(self, num_bytes: float, kernels: int = 1) -> float:
        """Memory-bound kernels that move `num_bytes` together."""
        return max(kernels * self._launch_s, num_bytes * self._s_per_byte)


@dataclass(frozen=True)
class ComputeTimes:
    """Forward and backward seconds of a piece of the model, without communication; `attention_s` is the part
    of the forward that selective recompute repeats, `last_product_s` the MLP's second product.
    """

    forward_s: float
    backward_s: float
    attention_s: float = 0.0
    last_product_s: float = 0.0

    def beside(self, more_s: float) -> "ComputeTimes":
        """The same with `more_s` seconds in the forward and in the backward."""
        return replace(self, forward_s=self.forward_s + more_s, backward_s=self.backward_s + more_s)


def layer_compute(
    model: ModelSpec,
    workload: Workload,
    gpu: Gpu,
    tp: int,
    micro_batch_size: int,
    framework: Framework | None = None,
) -> ComputeTimes:
    """One decoder layer on the busiest rank, for a micro-batch of `micro_batch_size` sequences."""
    framework = framework or default_framework()
    clock, shard, width = Clock(gpu, workload.precision), largest_shard(model, tp), workload.element_bytes
    seq, hidden = workload.seq_len, model.hidden_size
    tokens = micro_batch_size * seq
    q, kv = shard.heads * model.head_dim, shard.kv_heads * model.head_dim
    matrices = [
        hidden * (q + 2 * kv),
        q * hidden,
        (2 if model.gated_mlp else 1) * hidden * shard.ffn,
        shard.ffn * hidden,
    ]
    gemms_s = [clock.gemm_s(2.0 * tokens * size) for size in matrices]
    gemm_forward_s = sum(gemms_s)

    # softmax(QK')V: two products of tokens × seq × q, of which the causal mask needs half.
    attention_flops = 4.0 * tokens * seq * q * (0.5 if gpu.flash_attention else 1.0)
    if gpu.flash_attention:
        attention_flops /= framework.attention_speed
        attention_forward_s = clock.attention_s(attention_flops)
        attention_backward_s = clock.attention_s(attention_flops * c.FUSED_ATTENTION_BACKWARD_PASSES)
    else:
        score_bytes = float(tokens) * seq * shard.heads * width * c.SCORE_PASSES
        scores_s = clock.memory_s(score_bytes, c.SCORE_PASSES)
        attention_forward_s = clock.attention_s(attention_flops) + scores_s
        attention_backward_s = (
            clock.attention_s(attention_flops * c.UNFUSED_ATTENTION_BACKWARD_PASSES)
            + c.MEMORY_BACKWARD_PASSES * scores_s
        )
    moved = (
        tokens
        * width
        * (
            c.LAYER_HIDDEN_PASSES * hidden / (tp if framework.sequence_parallel else 1)
            + 2 * (q + kv)
            + (3 if model.gated_mlp else 2) * shard.ffn
        )
    )
    elementwise_s = clock.memory_s(framework.memory_traffic * moved, c.LAYER_MEMORY_KERNELS)
    return ComputeTimes(
        forward_s=gemm_forward_s + attention_forward_s + elementwise_s,
        backward_s=c.GEMM_BACKWARD_PASSES * gemm_forward_s
        + attention_backward_s
        + c.MEMORY_BACKWARD_PASSES * elementwise_s,
        attention_s=attention_forward_s,
        last_product_s=gemms_s[-1],
    )


def embedding_compute(model: ModelSpec, workload: Workload, gpu: Gpu, tp: int, micro_batch_size: int) -> ComputeTimes:
    """The embedding look-up (a gather) and its backward (a scatter-add into the gradient)."""
    clock = Clock(gpu, workload.precision)
    tokens = micro_batch_size * workload.seq_len
    moved = 2.0 * tokens * model.hidden_size * workload.element_bytes
    gather_s, projection_s = clock.memory_s(moved), _projection_s(model, clock, tokens)
    return ComputeTimes(
        projection_s + gather_s,
        c.GEMM_BACKWARD_PASSES * projection_s + c.MEMORY_BACKWARD_PASSES * gather_s,
    )


def _projection_s(model: ModelSpec, clock: Clock, tokens: int) -> float:
    """The product between hidden states and a narrower embedding, at either end of a model that has one."""
    if model.projected_embedding is None:
        return 0.0
    return clock.gemm_s(2.0 * tokens * model.hidden_size * model.projected_embedding)


def head_compute(model: ModelSpec, workload: Workload, gpu: Gpu, tp: int, micro_batch_size: int) -> ComputeTimes:
    """Final norm, LM head and cross-entropy over the rank's part of the vocabulary."""
    # The head stays in BF16 beside layers in FP8.
    clock, shard = Clock(gpu, "bf16" if workload.precision == "fp8" else workload.precision), largest_shard(model, tp)
    tokens = micro_batch_size * workload.seq_len
    gemm_s = clock.gemm_s(2.0 * tokens * model.embedding_size * shard.vocab)
    gemm_s += _projection_s(model, clock, tokens)
    norm_s = clock.memory_s(2.0 * tokens * model.hidden_size * workload.element_bytes / tp)
    loss_s = clock.memory_s(
        float(tokens) * shard.vocab * (workload.element_bytes + c.LOSS_BYTES) * c.LOSS_PASSES, c.LOSS_PASSES
    )
    return ComputeTimes(
        gemm_s + norm_s + loss_s, c.GEMM_BACKWARD_PASSES * gemm_s + c.MEMORY_BACKWARD_PASSES * norm_s + loss_s
    )


def optimizer_compute_s(workload: Workload, gpu: Gpu, num_params: float) -> float:
    """One Adam step over `num_params` parameters of a device: memory traffic only."""
    per_param = c.ADAM_STATE_TRAFFIC_BYTES + workload.stored_gradient_bytes + workload.element_bytes
    return Clock(gpu, workload.precision).memory_s(num_params * per_param)

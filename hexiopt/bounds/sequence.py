"""The compute bound where stages may have sequence layouts, which divide tokens and attention freely among devices."""

from collections.abc import Sequence

from hexiopt.cost.executors.compute import (
    Blocks,
    OperatorTimes,
    attention_times,
    dense_times,
    head_compute,
)
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.model import largest_shard

_MANY = 1e9  # tokens, beyond every launch
_HEADS = 10**9  # sequences, likewise


def sequence_bound_s(model: PlanPricer, devices: Sequence[tuple[Gpu, int, float]]) -> float:
    """A lower bound on the step time in seconds. `devices` has GPU types, their numbers, and the most layers times
    sequences that each device runs per second in a TP group.

    A device of a sequence layout takes a share x of the tokens of a sequence and a share y of its (query, key) pairs
    through a layer in at least x · A + y · B seconds. A and B are the forward and backward times of all operators
    outside attention, and of causal attention, at their asymptotic rates. All shares of a layer sum to 1. So in a step
    of T seconds that runs W = global_batch · layers of both, for any price λ between 0 and 1,

        W = λ·Σx + (1-λ)·Σy ≤ T · Σ max(λ / A, (1-λ) / B, r),

    where r is the rate in a TP group, for which x = y. Final norm, head and loss of a sequence take at least C seconds,
    wherever they run; at the price λ' = min C · max(...) they add global_batch · λ' to the left and nothing to the
    right. Every price gives a bound. The best is at a price where two terms of a device are equal, since the sum is
    convex and piecewise linear in λ with breakpoints only there.
    """
    problem = model.problem
    batch, layers = problem.workload.global_batch, problem.model.num_layers
    limits = [(*_limits_s(model, gpu), count, rate) for gpu, count, rate in devices]
    prices = {0.0, 1.0}
    for a, b, _, _, rate in limits:
        prices |= {a / (a + b), min(1.0, a * rate), max(0.0, 1.0 - b * rate)}
    best_s = 0.0
    for price in prices:
        rates = [max(price / a, (1.0 - price) / b, rate) for a, b, _, _, rate in limits]
        # measured times may be below calculated ones
        head = 0.0 if problem.cluster.profile.entries else min(m * row[2] for m, row in zip(rates, limits, strict=True))
        total = sum(m * row[3] for m, row in zip(rates, limits, strict=True))
        best_s = max(best_s, batch * (layers + head) / total)
    return best_s


def _limits_s(model: PlanPricer, gpu: Gpu) -> tuple[float, float, float]:
    """Least forward and backward seconds of a sequence on a device: of a layer without attention, of its attention, and
    of final norm, head and loss. The time per token of an operator is at least its marginal time at infinite size."""
    problem, framework = model.problem, model.framework
    spec, workload = problem.model, problem.workload
    clock, shard = OperatorTimes(gpu, workload.precision), largest_shard(spec, 1)
    seconds = []
    for tokens in (_MANY, 2 * _MANY):
        dense = dense_times(spec.layer, workload, clock, shard, tokens, framework)
        passes = 1.0 + c.GEMM_BACKWARD_PASSES, 1.0 + c.MEMORY_BACKWARD_PASSES
        seconds.append(dense.before_s(*passes) + dense.after_s(*passes))
    head = [head_compute(spec, workload, gpu, 1, n * _HEADS) for n in (1, 2)]
    pairs = 0.5 * float(workload.seq_len) ** 2 * spec.num_heads
    # unfused kernels process at least the pairs that the mask leaves
    blocks = Blocks(pairs, pairs, 0.0)
    width, fused = workload.element_bytes, gpu.flash_attention
    speed = framework.block_attention_speed
    attention_s = sum(attention_times(clock, fused, 4 * spec.head_dim, width, blocks, speed))
    head_s = (head[1].forward_s + head[1].backward_s - head[0].forward_s - head[0].backward_s) / _HEADS
    return (seconds[1] - seconds[0]) / _MANY * workload.seq_len, attention_s, head_s

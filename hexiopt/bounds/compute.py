"""The compute bound on the step time of every plan in the space."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from hexiopt.bounds.stage_cells import stage_cells
from hexiopt.cost.executors.compute import Blocks, OperatorTimes, attention_times, dense_times, head_compute
from hexiopt.cost.executors.experts.times import ExpertSharing
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.machine import Machine
from hexiopt.problem.model import largest_shard
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies


def compute_bound_s(model: PlanPricer) -> float:
    """The compute bound in seconds: the step time if every device always computed at its best rate.

    In a step of T seconds a TP group of t devices runs at most T / l micro-batches of b sequences through a layer whose
    forward and backward take l. Summed over devices, global_batch · layers ≤ T · Σ max over (t, b, policy) of
    b / (t · l). Bubbles, messages, embedding, head, gradient sync, optimiser and memory only add time. All TP groups of
    a size in a machine are bounded by its best TP ring. Layers of several kinds count as if a device ran none but the
    kind at which it is best beside the others: for any weights of kinds, the sum over kinds of layers times weight is
    at most T · Σ max over kinds of weight times rate. Where the space has sequence layouts, `sequence_bound_s` bounds
    what devices can do in them; where replicas may share experts in any numbers, `experts_bound_s` does.
    """
    if model.problem.space.uneven_experts and model.problem.model.shares_experts:
        return experts_bound_s(model, usable_by_kind(model.problem))
    problem, rates = model.problem, device_rates(model)
    if problem.space.sequence:
        return sequence_bound_s(model, [(machine.gpu, count, rate) for machine, count, rate in rates])
    return problem.workload.global_batch * problem.model.num_layers / sum(count * rate for _, count, rate in rates)


def device_rates(model: PlanPricer) -> list[tuple[Machine, int, float]]:
    """Of each machine kind: an example, the number of usable devices in all, and the most sequences that a device takes
    through a mean layer per second."""
    problem, by_kind = model.problem, usable_by_kind(model.problem)
    weights = kind_weights(model)
    rates: list[tuple[Machine, int, float]] = []
    for example, count in by_kind:
        machine = problem.cluster.machines[example]
        best = max(
            weight * size / (cell.tp * sum(model.stages.layer_s(cell, size, policy, number)))
            for size in problem.space.micro_batch_sizes(problem.workload.global_batch)
            for cell in stage_cells(model.stages, example, size)
            for number, weight in weights.items()
            for policy in recompute_policies(problem.workload)
        )
        rates.append((machine, count, best))
    return rates


def usable_by_kind(problem: Problem) -> list[tuple[int, int]]:
    """A machine of each kind, and the number of usable devices in all machines like it."""
    counts, example = dict[object, int](), dict[object, int]()
    for m, devices in problem.usable_by_machine.items():
        kind = problem.cluster.machines[m].kind
        counts[kind] = counts.get(kind, 0) + len(devices)
        example.setdefault(kind, m)
    return [(example[kind], count) for kind, count in counts.items() if count]


def kind_weights(model: PlanPricer) -> dict[int, float]:
    """What a layer of each kind that the model's layers have counts, the mean layer being 1: as it takes a device of
    the first machine."""
    shares = {kind: share for kind, share in enumerate(model.problem.model.weight_of_kinds) if share}
    (alone,) = model.stages.tp_groups.fastest(next(iter(model.problem.usable_by_machine)), (1,))
    seconds = {kind: sum(model.stages.layer_s(alone, 1, "none", kind)) for kind in shares}
    mean_s = sum(share * seconds[kind] for kind, share in shares.items())
    return {kind: layer_s / mean_s if len(shares) > 1 else 1.0 for kind, layer_s in seconds.items()}


def compute_shares(model: PlanPricer) -> dict[int, float]:
    """The share of each usable machine in the throughput of the compute bound without sequence layouts."""
    cluster, rates = model.problem.cluster, device_rates(model)
    total = sum(count * rate for _, count, rate in rates)
    of_kind = {machine.kind: rate / total for machine, _, rate in rates}
    return {
        m: len(devices) * of_kind[cluster.machines[m].kind] for m, devices in model.problem.usable_by_machine.items()
    }


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


_ROUNDING = 1e-9  # of the programme, by which the bound is less


def experts_bound_s(model: PlanPricer, devices: Sequence[tuple[int, int]]) -> float:
    """A lower bound in seconds on the step of every plan whose stages may share experts in any numbers.

    `devices`: a machine of each kind and the number of its usable devices. Of each kind of layer there are two works,
    that of its experts and all else, for every sequence; a device of a type takes no less for either than alone at its
    best TP degree and micro-batch size, without exchanges and with tokens spread evenly. The least step in which the
    devices, each dividing its time among works as it likes, do all of them is a linear programme: with experts on
    the one hand and all else on the other, the sum over devices of time through the work at which each is best.
    """
    from scipy.optimize import linprog  # here, because scipy.optimize is slow to import

    problem = model.problem
    layers, kinds = Counter(problem.model.depth), problem.model.kinds
    works = [(k, False) for k in layers] + [(k, True) for k in layers if kinds[k].experts is not None]
    least_s = np.array([[_least_s(model, machine, *work) for work in works] for machine, _ in devices])
    rows, columns = least_s.shape
    needed = np.array([problem.workload.global_batch * layers[k] for k, _ in works], float)
    # Seconds of each device kind for each work, then the step.
    done = np.concatenate([np.diag(1.0 / row) for row in least_s] + [np.zeros((columns, 1))], axis=1)
    spent = np.zeros((rows, rows * columns + 1))
    for d, (_, count) in enumerate(devices):
        spent[d, d * columns : (d + 1) * columns], spent[d, -1] = 1.0, -float(count)
    objective = np.zeros(rows * columns + 1)
    objective[-1] = 1.0
    scale = float(needed.sum() * least_s.max())  # seconds, so that the programme's numbers are near 1
    done *= scale / needed[:, None]
    limits = np.concatenate([-np.ones(columns), np.zeros(rows)])
    solution = linprog(objective, A_ub=np.concatenate([-done, spent]), b_ub=limits, method="highs")
    return 0.0 if solution.fun is None else float(solution.fun) * scale * (1 - _ROUNDING)


def _least_s(model: PlanPricer, machine: int, kind: int, of_experts: bool) -> float:
    """Device seconds of a layer's experts, or of all else, for a sequence on devices of `machine`, at least."""
    return min(_of_experts(model, machine, kind) if of_experts else _apart(model, machine, kind))


def _apart(model: PlanPricer, machine: int, kind: int) -> Iterator[float]:
    problem, stages = model.problem, model.stages
    spec = problem.cluster.machines[machine]
    for group in stages.tp_groups.fastest(machine, problem.space.allowed_tp(spec.num_gpus)):
        whole = stages.tp_groups.with_degree(group, group.tp)
        for size in range(1, _most_samples(model) + 1):
            yield group.tp * sum(stages.layer_apart(whole, size, kind).under("none")) / size


def _of_experts(model: PlanPricer, machine: int, kind: int) -> Iterator[float]:
    (alone,), part = model.stages.tp_groups.fastest(machine, (1,)), model.problem.model.kinds[kind].experts
    assert part is not None
    for size in range(1, _most_samples(model) + 1):
        sharing = ExpertSharing(1, 1, size, part.count)
        yield sum(model.stages.expert_times[alone.gpu.name].seconds(part, sharing, 0.0)) / size


def _most_samples(model: PlanPricer) -> int:
    return model.problem.space.micro_batch_sizes(model.problem.workload.global_batch)[-1]

"""The compute bound on the step time of every plan in the space."""

from hexiopt.bounds.experts import experts_bound_s
from hexiopt.bounds.sequence import sequence_bound_s
from hexiopt.bounds.stage_cells import stage_cells
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.machine import Machine
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

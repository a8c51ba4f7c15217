"""The compute bound where replicas share experts in any numbers: what mixes tokens and what experts do are apart."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from hexiopt.cost.executors.experts.times import ExpertSharing
from hexiopt.cost.pricer import PlanPricer

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

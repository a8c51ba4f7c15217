"""The plan space of Metis (see `metis_atc24.py`): which devices a stage may have beside those before it."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from solvers.baselines._estimates import GridEstimates
from solvers.baselines._published_space import REPLICATED_STAGES, TP_PER_STAGE, PublishedSpace, Rule

Types = Counter[str]  # GPUs of each type


def _follows_ranks(problem: Problem, plan: Plan) -> bool:
    """Whether stages are device groups of ranks in order, and idle devices those whose share rounds to no sample."""
    pipelines, count = plan.pipelines, len(plan.pipelines[0].stages)
    used = [[d for pipeline in pipelines for d in pipeline.stages[s].devices] for s in range(count)]
    name_of = {d: problem.cluster.gpu_of(d).name for d in problem.usable_devices}
    machine_of = problem.cluster.machine_of.tolist()
    for name in set(name_of.values()):
        machines = [ordered for devices in used if (ordered := [machine_of[d] for d in devices if name_of[d] == name])]
        if any(max(before) > min(after) for before, after in pairwise(machines)):
            return False
    types = [Counter(name_of[d] for d in devices) for devices in used]
    idle = Counter(name_of.values()) - sum(types, Types())
    samples = sum(pipeline.micro_batch_size for pipeline in pipelines)
    most = [samples * pipelines[0].stages[s].tp for s in range(count)]
    slower = [_slower(_estimates(problem), pipelines, s, set(idle)) for s in range(count)]
    return _are_groups(types, idle, slower, most)


@lru_cache(maxsize=1)
def _estimates(problem: Problem) -> GridEstimates:
    return GridEstimates(PlanPricer(problem))


SPACE = PublishedSpace(
    stages=REPLICATED_STAGES,
    tp=TP_PER_STAGE,
    devices=Rule(
        "all by type, powers of two a stage, slow ones may idle",
        "stages that are no powers of two of ranks in order, GPU types one after another, slow replicas idle or none",
        _follows_ranks,
    ),
)


def _slower(estimates: GridEstimates, pipelines: Sequence[Pipeline], stage: int, names: set[str]) -> set[str]:
    """The types of `names` that get no sample beside a stage's replicas: one takes them at least as long as any."""
    problem, pricer = estimates.problem, estimates.pricer
    first = pipelines[0].stages[stage]

    def layer_s(devices: tuple[int, ...], samples: int) -> float:
        tp_group = frozenset([pricer.tp_group(devices)])
        return estimates.stage_s(tp_group, 1, False, False, samples, first.policy)

    slowest_s = min(
        max(
            layer_s(replica.devices, samples)
            for replica, samples in zip(
                pipeline.stages[stage].parallelism.replicas,
                pipeline.stages[stage].parallelism.samples(pipeline.micro_batch_size),
                strict=True,
            )
        )
        for pipeline in pipelines
    )
    slower = set()
    for machine, devices in problem.usable_by_machine.items():
        name = problem.cluster.machines[machine].gpu.name
        if name in names and len(devices) >= first.tp and layer_s(devices[: first.tp], 1) >= slowest_s:
            slower.add(name)
    return slower


def _are_groups(types: Sequence[Types], idle: Types, slower: Sequence[set[str]], most: Sequence[int]) -> bool:
    """Whether the stages, with idle GPUs added where faster ones leave them idle, are groups of ranks in order.

    A stage has at most `most` GPUs: on average a sample for each replica.
    """
    if not idle:
        powers = all(stage.total() & (stage.total() - 1) == 0 for stage in types)
        return powers and not _alternate([set(stage) for stage in types])
    for s, stage in enumerate(types):
        for name in slower[s] & set(idle):
            # Either all of them, or as many as make the stage a power of two.
            sizes = {1 << k for k in range((stage.total() + idle[name]).bit_length())}
            for more in sorted({size - stage.total() for size in sizes} | {idle[name]}):
                if 0 < more <= min(idle[name], most[s] - stage.total()):
                    here = Counter({name: more})
                    if _are_groups([*types[:s], stage + here, *types[s + 1 :]], idle - here, slower, most):
                        return True
    return False


def _alternate(names: Sequence[set[Any]]) -> bool:
    """Whether a name returns after another, or two names share more than one stage, so that neither comes first."""
    spans = {name: [s for s, stage in enumerate(names) if name in stage] for stage in names for name in stage}
    if any(span[-1] - span[0] + 1 != len(span) for span in spans.values()):
        return True
    return any(
        min(a[-1], b[-1]) > max(a[0], b[0]) for k, a in enumerate(spans.values()) for b in list(spans.values())[:k]
    )

"""The plan space of Metis (see `metis_atc24.py`), as rules on a plan."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import GPIPE
from solvers.baselines.estimate import Estimates

Types = Counter[str]  # GPUs of each type


def broken_rule(problem: Problem, plan: Plan, estimates: Estimates) -> str | None:
    """The first rule that `plan`, valid for `problem`, breaks, in words; None if none."""
    lanes, count = plan.pipelines, len(plan.pipelines[0].stages)
    stages = [stage for lane in lanes for stage in lane.stages]
    if plan.schedule == GPIPE:
        return f"schedule {plan.schedule}"
    if plan.sharding.stage > 1 or plan.sharding.groups != "all":
        return "sharding other than of the optimizer"
    if any(len(stage.layers) != 1 for stage in stages):
        return "interleaved stages"
    if len({policy for stage in stages for policy in stage.recompute}) > 1:
        return "several recompute policies"
    if len({(lane.num_micro_batches, lane.micro_batch_size) for lane in lanes}) > 1:
        return "lanes of different batches"
    if len({tuple(stage.layers for stage in lane.stages) for lane in lanes}) > 1:
        return "lanes of different layers"
    if any(len({len(r.devices) for lane in lanes for r in lane.stages[s].replicas}) > 1 for s in range(count)):
        return "a stage of several TP degrees"
    used = [[d for lane in lanes for d in lane.stages[s].all_devices()] for s in range(count)]
    machine_of = problem.cluster.machine_of.tolist()
    if _alternate([{machine_of[d] for d in devices} for devices in used]):
        return "machines that alternate along the pipeline"
    name_of = {d: problem.cluster.gpu_of(d).name for d in problem.usable_devices}
    types = [Counter(name_of[d] for d in devices) for devices in used]
    idle = Counter(name_of.values()) - sum(types, Types())
    samples = sum(lane.micro_batch_size for lane in lanes)
    most = [samples * lanes[0].stages[s].tp for s in range(count)]
    if not _are_groups(types, idle, [_slower(estimates, lanes, s, set(idle)) for s in range(count)], most):
        return "stages that are no powers of two of ranks, GPU types one after another, slow replicas idle or none"
    return None


def _slower(estimates: Estimates, lanes: Sequence[Pipeline], stage: int, names: set[str]) -> set[str]:
    """The types of `names` whose replicas would have no sample beside those of a stage: slower with one than any."""
    problem, pricer = estimates.problem, estimates.pricer
    first = lanes[0].stages[stage]

    def layer_s(devices: tuple[int, ...], samples: int) -> float:
        site = frozenset([pricer.site(devices)])
        return estimates.stage_s(site, 1, False, False, samples, first.policy)

    slowest_s = min(
        max(
            layer_s(replica.devices, samples)
            for replica, samples in zip(
                lane.stages[stage].replicas, lane.stages[stage].samples(lane.micro_batch_size), strict=True
            )
        )
        for lane in lanes
    )
    found = set()
    for machine, devices in problem.usable_by_machine.items():
        name = problem.cluster.machines[machine].gpu.name
        if name in names and len(devices) >= first.tp and layer_s(devices[: first.tp], 1) >= slowest_s:
            found.add(name)
    return found


def _are_groups(types: Sequence[Types], idle: Types, slower: Sequence[set[str]], most: Sequence[int]) -> bool:
    """Whether the stages, with the idle GPUs beside others that make them idle, are groups of ranks in order.

    At most `most` GPUs a stage: a sample for each replica on average.
    """
    if not idle:
        powers = all(own.total() & (own.total() - 1) == 0 for own in types)
        return powers and not _alternate([set(own) for own in types])
    for s, own in enumerate(types):
        for name in slower[s] & set(idle):
            # Either all of them, or as many as make the stage a power of two.
            sizes = {1 << k for k in range((own.total() + idle[name]).bit_length())}
            for more in sorted({size - own.total() for size in sizes} | {idle[name]}):
                if 0 < more <= min(idle[name], most[s] - own.total()):
                    here = Counter({name: more})
                    if _are_groups([*types[:s], own + here, *types[s + 1 :]], idle - here, slower, most):
                        return True
    return False


def _alternate(names: Sequence[set[Any]]) -> bool:
    """Whether two names that stages use have more than one stage in common, so that neither comes first."""
    spans = {name: [s for s, own in enumerate(names) if name in own] for own in names for name in own}
    if any(span[-1] - span[0] + 1 != len(span) for span in spans.values()):
        return True
    return any(
        min(a[-1], b[-1]) > max(a[0], b[0]) for k, a in enumerate(spans.values()) for b in list(spans.values())[:k]
    )

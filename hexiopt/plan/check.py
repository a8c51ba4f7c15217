"""Checks a plan against a problem, rule by rule, without trusting whoever made it.

What can be judged without a problem, the plan's constructors have refused already.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage, feature_without_price
from hexiopt.plan.token_layout import misfit
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, recompute_policies, sharding_stages, with_equal_chunks
from hexiopt.problem.workload import AUTO, JOINED


@dataclass(frozen=True)
class Violation:
    """One broken rule; `rule` is a word for programs (`memory` for a device that does not fit), `text` for people."""

    rule: str
    text: str

    def __str__(self) -> str:
        return self.text


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules that `plan` breaks, but for memory, which takes its cost (`hexiopt.cost.cost.violations`)."""
    violations = [*_devices(problem, plan), *_batch(problem, plan), *_choices(problem, plan)]
    for p, pipeline in enumerate(plan.pipelines):
        violations += _layers(problem, p, pipeline)
        violations += _chunks(problem, p, pipeline)
        violations += _sequences(problem, p, pipeline)
        violations += _experts(problem, p, pipeline)
    if not violations:
        violations += _switches(problem, plan)
    for p, pipeline in enumerate(plan.pipelines):
        if feature := feature_without_price(pipeline):
            violations.append(Violation("unpriced", f"pipeline {p}: {feature}"))
    return violations


def _devices(problem: Problem, plan: Plan) -> list[Violation]:
    cluster, usable, violations = problem.cluster, set(problem.usable_devices), []
    for device in plan.devices():
        if device >= cluster.num_devices:
            violations.append(Violation("device", f"device {device} is not in the cluster"))
        elif device not in usable:
            violations.append(Violation("exclude", f"device {cluster.device_name(device)} is excluded"))
    if violations:
        return violations
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for replica in stage.parallelism.replicas:
                machines = {int(cluster.machine_of[d]) for d in replica.devices}
                if len(machines) > 1 and _shares_across(problem, stage):
                    continue
                if len(machines) > 1:
                    names = ", ".join(cluster.machines[m].name for m in sorted(machines))
                    violations.append(
                        Violation(
                            "tp",
                            f"stage {s} of pipeline {p} spans machines {names}; tensor parallelism stays inside one",
                        )
                    )
                elif len(replica.devices) not in problem.space.allowed_tp(cluster.machines[machines.pop()].num_gpus):
                    violations.append(
                        Violation("tp", f"stage {s} of pipeline {p} has TP degree {len(replica.devices)}, not allowed")
                    )
    return violations


def _shares_across(problem: Problem, stage: Stage) -> bool:
    """Whether a stage is several replicas that share experts, each in a machine of its own or with others, all of one
    GPU type."""
    cluster, group = problem.cluster, stage.parallelism
    if not problem.model.shares_experts or not isinstance(group, TensorParallel) or group.degree is None:
        return False
    inside = all(len({int(cluster.machine_of[d]) for d in devices}) == 1 for devices in group.parameter_copies)
    return inside and len({cluster.gpu_of(device).type_name for device in group.devices}) == 1


def _batch(problem: Problem, plan: Plan) -> list[Violation]:
    workload, violations = problem.workload, []
    sizes = problem.space.micro_batch_sizes(workload.global_batch)
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.micro_batch_size not in sizes:
            allowed = ", ".join(map(str, sizes))
            violations.append(
                Violation("batch", f"pipeline {p} has micro-batch size {pipeline.micro_batch_size}; allowed: {allowed}")
            )
    total = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    if total != workload.global_batch:
        violations.append(
            Violation("batch", f"the pipelines process {total} sequences, the global batch is {workload.global_batch}")
        )
    return violations


def _choices(problem: Problem, plan: Plan) -> list[Violation]:
    violations = []
    if plan.schedule not in problem.schedules:
        allowed = ", ".join(map(str, problem.schedules))
        free = plan.schedule.splits and problem.workload.schedule == AUTO
        remedy = ", with space.split_backward=true this one too" if free else ""
        violations.append(Violation("schedule", f"schedule {plan.schedule}; the workload allows {allowed}{remedy}"))
    if plan.sharding.stage not in sharding_stages(problem.workload):
        allowed = ", ".join(map(str, sharding_stages(problem.workload)))
        violations.append(Violation("sharding", f"sharding stage {plan.sharding.stage}; the workload allows {allowed}"))
    policies = recompute_policies(problem.workload)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for policy in set(stage.recompute):
                if ("full" if policy == JOINED else policy) not in policies:
                    violations.append(
                        Violation(
                            "recompute",
                            f"stage {s} of pipeline {p} has recompute {policy}; allowed: {', '.join(policies)}",
                        )
                    )
    space = problem.space
    if space.num_pipelines is not None and len(plan.pipelines) != space.num_pipelines:
        violations.append(
            Violation(
                "constraints", f"{len(plan.pipelines)} pipelines; constraints.num_pipelines={space.num_pipelines}"
            )
        )
    if space.num_stages is not None:
        for p, pipeline in enumerate(plan.pipelines):
            if len(pipeline.stages) != space.num_stages:
                violations.append(
                    Violation(
                        "constraints",
                        f"pipeline {p} has {len(pipeline.stages)} stages; constraints.num_stages={space.num_stages}",
                    )
                )
    return violations


def _layers(problem: Problem, p: int, pipeline: Pipeline) -> list[Violation]:
    if pipeline.num_layers != problem.model.num_layers:
        fault = f"pipeline {p} holds {pipeline.num_layers} layers, the model has {problem.model.num_layers}"
        return [Violation("layers", fault)]
    if problem.space.uneven_chunks:
        return []
    equal = with_equal_chunks([stage.layers for stage in pipeline.stages])
    for s, (stage, ranges) in enumerate(zip(pipeline.stages, equal, strict=True)):
        lengths, expected = ([end - first for first, end in layer_ranges] for layer_ranges in (stage.layers, ranges))
        if lengths != expected:
            fault = f"stage {s} of pipeline {p} has layer ranges of {_as_sum(lengths)}"
            remedy = f"divide them equally, longer ones first: {_as_sum(expected)}"
            return [Violation("layers", f"{fault}; {remedy}, or allow others with space.uneven_chunks=true")]
    return []


def _as_sum(numbers: Iterable[int]) -> str:
    return " + ".join(map(str, numbers))


def _chunks(problem: Problem, p: int, pipeline: Pipeline) -> list[Violation]:
    """The limit on layer ranges."""
    most = problem.space.max_chunks
    if pipeline.num_chunks <= most:
        return []
    fault = f"pipeline {p} has {pipeline.num_chunks} layer ranges a stage"
    return [Violation("interleaved", f"{fault}; space.max_chunks allows {most}")]


def _sequences(problem: Problem, p: int, pipeline: Pipeline) -> list[Violation]:
    """What sequence layouts break: the switch, tokens, heads, orders."""
    violations = []
    for s, stage in enumerate(pipeline.stages):
        if not isinstance(stage.parallelism, SequenceParallel):
            continue
        where = f"stage {s} of pipeline {p} has a sequence layout"
        if not problem.space.sequence:
            violations.append(Violation("space.sequence", f"{where}; allow them with space.sequence=true"))
        elif wrong := misfit(stage.parallelism, problem.workload.seq_len, problem.model.num_heads):
            violations.append(Violation("sequence", f"{where}: {wrong}"))
    return violations


def _experts(problem: Problem, p: int, pipeline: Pipeline) -> list[Violation]:
    """What stages break whose replicas share experts: the switch, and the model's number of experts."""
    violations = []
    counts = sorted({kind.experts.count for kind in problem.model.kinds if kind.experts is not None})
    for s, stage in enumerate(pipeline.stages):
        group = stage.parallelism
        if not isinstance(group, ExpertParallel):
            continue
        where = f"stage {s} of pipeline {p}"
        if not problem.space.uneven_experts:
            what = f"{where} states experts; allow that with space.uneven_experts=true"
            violations.append(Violation("space.uneven_experts", what))
        elif counts != [group.num_experts]:
            have = f"layers of {problem.model.name} have {' or '.join(map(str, counts)) or 'none'}"
            violations.append(Violation("experts", f"{where} has {group.num_experts} experts; {have}"))
        elif 0 in group.shares and not _has_experts(problem.model, stage):
            what = f"{where} has devices for experts alone, and no layer with experts; give it one"
            violations.append(Violation("experts", what))
    return violations


def _has_experts(model: ModelSpec, stage: Stage) -> bool:
    return any(model.kinds[kind].experts for layers in stage.layers for kind in model.depth[slice(*layers)])


def _switches(problem: Problem, plan: Plan) -> list[Violation]:
    space, violations = problem.space, []
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if not space.replicas and any(
        len(stage.parallelism.replicas) > 1 and not isinstance(stage.parallelism, ExpertParallel) for stage in stages
    ):
        violations.append(Violation("space.replicas", "a stage is replicated"))
    if not space.uneven_layers:
        for p, pipeline in enumerate(plan.pipelines):
            if _spread([stage.num_layers for stage in pipeline.stages]) > 1:
                violations.append(
                    Violation("space.uneven_layers", f"stages of pipeline {p} differ by more than one layer")
                )
    degrees = {len(replica.devices) for stage in stages for replica in stage.parallelism.replicas}
    if not space.uneven_tp and len(degrees) > 1:
        violations.append(Violation("space.uneven_tp", "stages differ in TP degree"))
    if not space.uneven_batch and _spread([p.num_sequences for p in plan.pipelines]) > max(
        p.micro_batch_size for p in plan.pipelines
    ):
        violations.append(Violation("space.uneven_batch", "pipelines differ by more than one micro-batch"))
    if not space.uneven_structure and len({tuple(map(_shape, p.stages)) for p in plan.pipelines}) > 1:
        violations.append(Violation("space.uneven_structure", "pipelines differ in TP degrees or layers"))
    if not space.recompute_per_stage and len({policy for stage in stages for policy in stage.recompute}) > 1:
        violations.append(Violation("space.recompute_per_stage", "stages differ in recompute policy"))
    if not space.recompute_per_layer and any(len(set(stage.recompute)) > 1 for stage in stages):
        violations.append(Violation("space.recompute_per_layer", "layers of a stage differ in recompute policy"))
    if not space.depth:
        for p, s in islice(plan.other_depths(), 1):
            where = f"stage {s} of pipeline {p} has {plan.pipelines[p].stages[s].in_flight} micro-batches in flight"
            remedy = f"the {plan.schedule} schedule has another number; allow others with space.depth=true"
            violations.append(Violation("space.depth", f"{where}; {remedy}"))
    return violations + coarse_violations(space, plan)


def coarse_violations(space: Space, plan: Plan) -> list[Violation]:
    """The violations of the two switches that steer no search, but refuse plans that searches find."""
    violations = []
    exact = not (space.batch_remainder or space.uneven_batch)
    if exact and len({(p.num_micro_batches, p.micro_batch_size) for p in plan.pipelines}) > 1:
        violations.append(Violation("space.batch_remainder", "pipelines differ in micro-batches"))
    if not space.machine_sharding and plan.sharding.stage and plan.sharding.groups != "all":
        violations.append(Violation("space.machine_sharding", "the optimizer is sharded within groups of devices"))
    return violations


def _spread(values: list[int]) -> int:
    return max(values) - min(values)


def _shape(stage: Stage) -> tuple[object, ...]:
    sizes = tuple(len(devices) for devices in stage.parallelism.executors)
    return sizes, isinstance(stage.parallelism, SequenceParallel), stage.layers

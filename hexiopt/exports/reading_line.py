"""A note of one line on what was read from another trainer's file."""

from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_groups
from hexiopt.problem.workload import JOINED


def _ep_degree(stage: Stage, model: ModelSpec) -> int:
    return len(stage.parallelism.executors[0]) if model.shares_experts else 1


def _replica_samples(stage: Stage, micro_batch_size: int) -> int:
    group = stage.parallelism
    return group.samples(micro_batch_size)[0] * len(group.executors) // len(group.parameter_copies)


def reading_note(problem: Problem, plan: Plan) -> str:
    """The model, the degrees, the batch and the choices that an imported problem and its plan have."""
    model, workload, first = problem.model, problem.workload, plan.pipelines[0]
    degrees = {
        "TP": [
            len(devices) for p in plan.pipelines for stage in p.stages for devices in stage.parallelism.parameter_copies
        ],
        "EP": [_ep_degree(stage, model) for p in plan.pipelines for stage in p.stages],
        "PP": [len(pipeline.stages) for pipeline in plan.pipelines],
        "VP": [pipeline.num_chunks for pipeline in plan.pipelines],
        "DP": [sum(len(pipeline.stages[0].parallelism.parameter_copies) for pipeline in plan.pipelines)],
        "micro-batch": [_replica_samples(stage, p.micro_batch_size) for p in plan.pipelines for stage in p.stages],
    }
    degrees_in_words = {name: "/".join(map(str, sorted(set(values)))) for name, values in degrees.items()}
    layers = " + ".join(str(stage.num_layers) for stage in first.stages)
    same = len({stage.num_layers for stage in first.stages}) == 1
    policies = {policy for p in plan.pipelines for stage in p.stages for policy in stage.recompute}
    groups = [n for stage in first.stages for n in recompute_groups(stage.recompute)]
    recompute = f"full of {max(groups)} layers together" if JOINED in policies else " and ".join(sorted(policies))
    gradients = f"gradients of {workload.states.gradient} bytes"
    parts = [
        f"{model.name} of {model.num_params / 1e9:.2f} B parameters in {model.num_layers} layers",
        *(f"{name} {degrees_in_words[name]}" for name in ("TP", "PP", "VP", "DP", "EP")),
        "CP 1",
        *([] if same else [f"stages of {layers} layers"]),
        f"micro-batch {degrees_in_words['micro-batch']}",
        f"batch {workload.global_batch}",
        f"sequence {workload.seq_len}",
        f"recompute {recompute}",
        f"{workload.precision} with {gradients}",
        f"ZeRO-{plan.sharding.stage}",
        *(
            [f"sequence parallelism {'on' if workload.sequence_parallel else 'off'}"]
            if degrees_in_words["TP"] != "1"
            else []
        ),
        "no offload",
    ]
    return f"read: {', '.join(parts)}"

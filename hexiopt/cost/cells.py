"""Plans whose groups of devices that share experts do not say how many replicas they are: the fastest way is taken."""

from dataclasses import replace

from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage


def with_degrees(plan: Plan, stages: StageModel) -> Plan:
    """`plan`, whose groups of devices state their TP degrees where the model has experts that they may share."""
    if not stages.problem.model.shares_experts:
        return plan
    pipelines = tuple([_pipeline(pipeline, stages) for pipeline in plan.pipelines])
    return plan if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _pipeline(pipeline: Pipeline, stages: StageModel) -> Pipeline:
    completed = tuple([_stage(stage, pipeline.micro_batch_size, stages) for stage in pipeline.stages])
    return replace(pipeline, stages=completed)


def _stage(stage: Stage, micro_batch_size: int, stages: StageModel) -> Stage:
    group = stage.parallelism
    if not isinstance(group, TensorParallel) or len(group.devices) == 1 or group.degree or group.heads:
        return stage
    cell = stages.cell(stages.tp_group(group.devices), micro_batch_size)
    return replace(stage, parallelism=replace(group, degree=cell.degree))

"""What owners of unequal cards do without a planner: split layers by memory, equal batches, the best card alone."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import ONE_F_ONE_B

MAP, EQUAL, BEST = OTHERS = ("layers split by memory", "equal batches", "best card alone")


def owners_tokens_per_s(problem: Problem) -> dict[str, float]:
    """Tokens per second of `OTHERS` with their best micro-batch, all layers recomputed or none; NaN where none fits."""
    devices = problem.usable_devices
    batch, layers = problem.workload.global_batch, problem.model.num_layers
    memory = [problem.cluster.gpu_of(device).usable_memory_bytes for device in devices]
    ends = [round(layers * part / sum(memory)) for part in accumulate(memory)]
    split = [
        (d, span) for d, span in zip(devices, zip([0, *ends], ends, strict=False), strict=True) if span[0] < span[1]
    ]
    whole = (0, layers)

    def equal(size: int, policy: str) -> list[Pipeline]:
        count = -(-batch // (size * len(devices)))
        return [_chain([(device, whole)], size, count, policy) for device in devices]

    alone = [
        _most(problem, lambda size, policy, d=device: [_chain([(d, whole)], size, batch // size, policy)])  # type: ignore[misc]
        for device in devices
    ]
    return {
        MAP: _most(problem, lambda size, policy: [_chain(split, size, 1, policy)], turns=True),
        EQUAL: _most(problem, equal),
        BEST: max((speed for speed in alone if not math.isnan(speed)), default=math.nan),
    }


def _chain(split: Sequence[tuple[int, tuple[int, int]]], size: int, count: int, policy: str) -> Pipeline:
    stages = [Stage(TensorParallel((device,)), (layers,), (policy,)) for device, layers in split]
    return Pipeline(tuple(stages), count, size)


def _most(problem: Problem, pipelines: Callable[[int, str], list[Pipeline]], *, turns: bool = False) -> float:
    """The most tokens per second; with `turns`, of micro-batches one after another until the batch is done."""
    best, batch = math.nan, problem.workload.global_batch
    for size in problem.space.micro_batch_sizes(batch):
        for policy in ("none", "full"):
            plan = Plan(tuple(pipelines(size, policy)), ONE_F_ONE_B, Sharding(0))
            total = sum(line.num_micro_batches * line.micro_batch_size for line in plan.pipelines)
            pricer = PlanPricer(problem.replace(workload=problem.workload.replace(global_batch=total)))
            if check(pricer.problem, plan) or not (cost := pricer.price(plan)).fits:
                continue
            speed = cost.tokens_per_s
            if turns:
                step_s = batch // size * cost.pipeline_s + cost.step_time_s - cost.pipeline_s
                speed = problem.workload.tokens / step_s
            best = speed if math.isnan(best) else max(best, speed)
    return best

"""A pipeline of replicated stages, written down as several pipelines of equal structure and batch.

They have the same replicas, layers and gradients; the plan space bounds the micro-batch size of each.
"""

from collections.abc import Callable, Sequence

from hexiopt.cost.executors.network_load import Route, executor_loads, total_load
from hexiopt.cost.executors.routes import place_messages
from hexiopt.plan.messages import messages, round_trips_s
from hexiopt.plan.parallelism import Replica, TokenLayout
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._plans import StageHolders, aligned_plan
from solvers.baselines.metis_atc24.cutting import Cut
from solvers.baselines.metis_atc24.ranked_devices import Batching, Replicas, ReplicaSamples


def plan_of_cut(
    problem: Problem,
    batching: Batching,
    cut: Cut,
    layers: Sequence[int],
    schedule: Schedule,
    sharding: int,
) -> Plan:
    """The plan of a cut."""
    stages, size = _lanes(problem, batching, cut)
    slots = [[_devices(shares) for shares in pipelines] for pipelines in stages]
    return aligned_plan(slots, layers, batching.policy, batching.count, size, schedule, Sharding(sharding))


def _devices(shares: Replicas) -> StageHolders:
    if len(shares) == 1:
        return shares[0][0]
    return tuple(Replica(devices, samples) for devices, samples in shares)


def _lanes(problem: Problem, batching: Batching, cut: Cut) -> tuple[list[list[Replicas]], int]:
    """The replicas of each pipeline of a cut by stage, and the sequences of a micro-batch.

    Pipelines are halved while their halves are alike, so that plain pipelines result where possible.
    """
    stages = [group.pipelines() for group in cut]
    size = batching.pipeline_size
    while size % 2 == 0 and problem.space.num_pipelines is None:
        halves = [[_halves(problem, shares) for shares in pipelines] for pipelines in stages]
        if any(half is None for pipelines in halves for half in pipelines):
            break
        stages = [[part for half in pipelines if half is not None for part in half] for pipelines in halves]
        size //= 2
    return stages, size


def _halves(problem: Problem, shares: Replicas) -> tuple[Replicas, Replicas] | None:
    """The replicas in two halves of equal types and samples; None if there are none."""
    alike: dict[tuple[str, int], list[ReplicaSamples]] = {}
    for share in shares:
        alike.setdefault((problem.cluster.gpu_of(share[0][0]).name, share[1]), []).append(share)
    if any(len(members) % 2 for members in alike.values()):
        return None
    return (
        tuple(sorted(s for members in alike.values() for s in members[: len(members) // 2])),
        tuple(sorted(s for members in alike.values() for s in members[len(members) // 2 :])),
    )


def boundaries_s(
    pipelines: Sequence[Pipeline], hop_of: Callable[[TokenLayout, TokenLayout], Route], sequence_bytes: float
) -> list[float]:
    """Seconds at each boundary of pipelines of equal structure: the longest message ahead and the longest back of a
    pipeline, together.

    `sequence_bytes` are the hidden states of one sequence.
    """
    layouts = [[stage.parallelism.token_layouts for stage in pipeline.stages] for pipeline in pipelines]
    sent = [
        place_messages(messages(pipeline), executors, hop_of, sequence_bytes)
        for pipeline, executors in zip(pipelines, layouts, strict=True)
    ]
    load = total_load(item for of_pipeline in sent for item in executor_loads(of_pipeline))
    each = [
        round_trips_s([one.message for one in placed], [one.seconds(load) for one in placed], len(pipelines[0].stages))
        for placed in sent
    ]
    return [max(trips) for trips in zip(*each, strict=True)]

"""A pipeline of replicated stages, written down as several pipelines of equal structure and batch.

They have the same replicas, layers and gradients; the plan space bounds the micro-batch size of each.
"""

from collections.abc import Callable, Sequence

from hexiopt.cost.executors.routes import Route
from hexiopt.cost.place import network_load, pipeline_messages
from hexiopt.cost.sharing import round_trips_s, total_load
from hexiopt.plan.parallelism import Replica, TokenLayout
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._plans import StageHolders, aligned_plan
from solvers.baselines.metis_atc24.cutting import Cut
from solvers.baselines.metis_atc24.group_cuts import lanes
from solvers.baselines.metis_atc24.ranked_devices import Batching, Replicas


def plan_of_cut(
    problem: Problem,
    batching: Batching,
    cut: Cut,
    layers: Sequence[int],
    schedule: Schedule,
    sharding: int,
) -> Plan:
    """The plan of a cut."""
    stages, size = lanes(problem, batching, cut)
    slots = [[_devices(shares) for shares in pipelines] for pipelines in stages]
    return aligned_plan(slots, layers, batching.policy, batching.count, size, schedule, Sharding(sharding))


def _devices(shares: Replicas) -> StageHolders:
    if len(shares) == 1:
        return shares[0][0]
    return tuple(Replica(devices, samples) for devices, samples in shares)


def boundaries_s(
    pipelines: Sequence[Pipeline], hop_of: Callable[[TokenLayout, TokenLayout], Route], sequence_bytes: float
) -> list[float]:
    """Seconds at each boundary of pipelines of equal structure: the longest message ahead and the longest back of a
    pipeline, together.

    `sequence_bytes` are the hidden states of one sequence.
    """
    messages = [pipeline_messages(pipeline, hop_of, sequence_bytes) for pipeline in pipelines]
    load = total_load(item for of_pipeline in messages for item in network_load(of_pipeline))
    each = [round_trips_s(of_pipeline, len(pipelines[0].stages), load) for of_pipeline in messages]
    return [max(trips) for trips in zip(*each, strict=True)]

"""Candidates to partitions and plans, and plans to candidates."""

from typing import Any

import numpy as np

from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.space import recompute_first
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from solvers.compiled.layers import policies_of
from solvers.compiled.state import SearchState, SearchWork, new_state
from solvers.compiled.tables import Tables
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup


def devices_of(tables: Tables, stage: Any) -> DeviceGroup:
    """The devices of a stage."""
    first, mask = int(tables.machines[stage["machine"]]["first_device"]), int(stage["mask"])
    return tuple(first + k for k in range(mask.bit_length()) if mask >> k & 1)


SIMULATED = (ONE_F_ONE_B, GPIPE, SPLIT_SCHEDULES[0])  # the schedules whose recurrences are compiled


def fitting(state: SearchState) -> list[int]:
    """The numbers of the pipelines that fit."""
    return [p for p in range(int(state.plan[0]["num_pipelines"])) if state.pipelines[p]["fits"]]


def schedule_of(tables: Tables, state: SearchState) -> Schedule:
    """The schedule of a candidate."""
    return SIMULATED[1 if state.plan[0]["forwards_first"] else 2 * int(tables.problem[0]["splits"])]


def partition_of(tables: Tables, state: SearchState) -> Partition:
    """Which devices form which stages of the pipelines that fit; like pipelines are one group where sharding groups are
    machines."""
    plan, rows = state.plan[0], fitting(state)
    alike: dict[Any, list[int]] = {}
    for p in rows:
        count, size = int(state.pipelines[p]["num_stages"]), int(state.pipelines[p]["size"])
        own = state.stages[p, :count]
        shape = (size, *zip(tables.machines["kind"][own["machine"]].tolist(), own["degree"].tolist(), strict=True))
        alike.setdefault(shape if plan["by_machine"] else p, []).append(p)
    groups = []
    for own_rows in alike.values():
        pipeline = state.pipelines[own_rows[0]]
        stages = tuple(
            tuple(devices_of(tables, state.stages[p, s]) for p in own_rows) for s in range(int(pipeline["num_stages"]))
        )
        groups.append(PipelineGroup(stages, int(tables.sizes[pipeline["size"]])))
    groups_of = "machine" if plan["by_machine"] else "all"
    return Partition(tuple(groups), schedule_of(tables, state), int(plan["zero_stage"]), groups=groups_of)


def plan_of(tables: Tables, work: SearchWork, state: SearchState, policies: tuple[str, ...]) -> Plan:
    """The plan of a candidate as it was evaluated last, with its own layers, recompute policies and micro-batches.
    `policies`: the pricer's."""
    plan, pipelines = state.plan[0], []
    for k, p in enumerate(fitting(state)):
        pipeline, stages, at = state.pipelines[p], [], 0
        for s in range(int(pipeline["num_stages"])):
            stage = state.stages[p, s]
            end = at + int(stage["layers"])
            smaller, faster, lean = policies_of(tables, state, p, s)
            recompute = recompute_first(policies[smaller], lean, policies[faster], end - at)
            stages.append(Stage(TensorParallel(devices_of(tables, stage)), ((at, end),), recompute))
            at = end
        pipelines.append(Pipeline(tuple(stages), int(work.batches[k]), int(tables.sizes[pipeline["size"]])))
    sharding = Sharding(int(plan["zero_stage"]), "machine" if plan["by_machine"] else "all")
    return Plan(tuple(pipelines), schedule_of(tables, state), sharding)


def state_of(tables: Tables, plan: Plan, cluster: Cluster) -> SearchState:
    """The candidate of a plan of TP groups, 1F1B or GPipe: its devices, sizes and micro-batches; its layers follow."""
    state = new_state(tables)
    head = state.plan[0]
    head["num_pipelines"], head["zero_stage"] = len(plan.pipelines), plan.sharding.stage
    head["by_machine"], head["forwards_first"] = plan.sharding.groups == "machine", plan.schedule == GPIPE
    for p, pipeline in enumerate(plan.pipelines):
        row = state.pipelines[p]
        row["num_stages"], row["batches"] = len(pipeline.stages), pipeline.num_micro_batches
        row["size"] = int(np.flatnonzero(tables.sizes == pipeline.micro_batch_size)[0])
        for s, stage in enumerate(pipeline.stages):
            machine = int(cluster.machine_of[stage.devices[0]])
            mask = sum(1 << (d - int(cluster.first_device[machine])) for d in stage.devices)
            state.stages[p, s]["machine"], state.stages[p, s]["mask"] = machine, mask
            state.free[machine] &= ~mask
    return state

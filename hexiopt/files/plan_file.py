"""`plan.json`: a plan with its whole problem, prediction and solver."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from hexiopt.checks import is_whole
from hexiopt.cost.cost import Cost, copy_costs
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.errors import InputError
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.plan.parallelism import (
    ORDERS,
    ExpertParallel,
    ExpertReplica,
    Replica,
    Replicated,
    SequenceGroup,
    SequenceParallel,
    StageParallelism,
    TensorParallel,
)
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping, sha256_of
from hexiopt.schedules.registry import schedule_by_name
from hexiopt.solving.result import Result
from hexiopt.units import GIB

FORMAT = "hexiopt.plan"
VERSION = 1
# A plan of 10,240 GPUs takes 4 MiB.
MAX_PLAN_BYTES = 64 * 2**20
_BY_ITS_PRICER = ("pricer", "status", "lower_bound_s", "gap", "own_lower_bound_s", "own_gap", "own_space")


@dataclass(frozen=True)
class PlanFile:
    """The content of a plan file.

    `solver` is the object of that name as read. The prediction is not read, since pricing makes it anew; nor are the
    figures in `solver` that come from another cost model.
    """

    problem: Problem
    plan: Plan
    solver: Mapping[str, Any]


def plan_to_dict(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Schedule, sharding and pipelines, with devices by name."""
    groups: Any = plan.sharding.groups
    if not isinstance(groups, str):
        groups = [[cluster.device_name(d) for d in group] for group in groups]
    sharding = {"stage": plan.sharding.stage} | ({} if groups == "all" else {"groups": groups})
    return {
        "schedule": plan.schedule.name,
        "sharding": sharding,
        "pipelines": [
            {
                "num_micro_batches": pipeline.num_micro_batches,
                "micro_batch_size": pipeline.micro_batch_size,
                "stages": [_stage_to_dict(stage, cluster) for stage in pipeline.stages],
            }
            for pipeline in plan.pipelines
        ],
    }


def _stage_to_dict(stage: Stage, cluster: Cluster) -> dict[str, Any]:
    def names(devices: tuple[int, ...]) -> list[str]:
        return [cluster.device_name(d) for d in devices]

    data: dict[str, Any] = {}
    match stage.parallelism:
        case TensorParallel() as group:
            data |= _group_to_dict(group, names)
        case Replicated(replicas):
            data["replicas"] = [_group_to_dict(replica, names) | {"samples": replica.samples} for replica in replicas]
        case ExpertParallel(members, waves):
            data["replicas"] = [
                {"devices": names(m.devices), "samples": m.samples, "experts": list(m.experts)} for m in members
            ]
            data |= {"waves": waves} if waves > 1 else {}
        case SequenceParallel(groups, order):
            parts = [{"devices": names(g.devices), "tokens": list(g.tokens), "heads": list(g.heads)} for g in groups]
            data["sequence"] = {"groups": parts, "order": order}
        case never:
            assert_never(never)
    data["layers"] = list(stage.layers[0]) if len(stage.layers) == 1 else [list(r) for r in stage.layers]
    data["recompute"] = stage.recompute[0] if len(stage.recompute) == 1 else list(stage.recompute)
    return data if stage.in_flight is None else data | {"in_flight": stage.in_flight}


def _group_to_dict(group: TensorParallel | Replica, names: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"devices": names(group.devices)}
    if group.heads is not None:
        data["heads"] = list(group.heads)
    if isinstance(group, TensorParallel) and group.degree is not None:
        data["degree"] = group.degree
    return data


def prediction_to_dict(problem: Problem, plan: Plan, cost: Cost) -> dict[str, Any]:
    """The cost model's prediction: seconds, tokens/s, MFU, and GiB per device."""
    memory = {
        problem.cluster.device_name(device): {"limit": copy.limit_bytes / GIB, "total": copy.memory.total / GIB}
        | {part: getattr(copy.memory, part) / GIB for part in MEMORY_PARTS}
        for _, _, devices, copy in copy_costs(plan, cost)
        for device in devices
    }
    return {
        "step_time_s": cost.step_time_s,
        "tokens_per_s": cost.tokens_per_s,
        "mfu": cost.mfu,
        "breakdown_s": {
            "pipeline": cost.pipeline_s,
            "gradient_sync": cost.gradient_sync_s,
            "optimizer": cost.optimizer_s,
        },
        "memory_gib": memory,
    }


def solver_to_dict(result: Result, pricer: str = "") -> dict[str, Any]:
    """The solver that found the plan, its search and its bounds; and the name `pricer` of another cost model."""
    bound = result.restricted_bound
    restricted = (
        {}
        if bound is None
        else {"own_lower_bound_s": bound.bound_s, "own_gap": result.restricted_gap, "own_space": bound.space}
    )
    return {
        "name": result.solver,
        "seed": result.seed,
        "status": str(result.status),
        "runtime_s": result.runtime_s,
        "steps": result.steps,
        "lower_bound_s": result.bound_s,
        "gap": result.gap,
        **restricted,
        **({"pricer": pricer} if pricer else {}),
    }


def plan_file_to_dict(problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any]) -> dict[str, Any]:
    """The whole content of a plan file.

    Equal searches give equal files, so the seconds that a search took are null. In a sweep the job's status has them.
    """
    record = {key: None if key == "runtime_s" else value for key, value in solver.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "problem": problem_to_dict(problem),
        "problem_sha256": problem_sha256(problem),
        **plan_to_dict(plan, problem.cluster),
        "prediction": prediction_to_dict(problem, plan, cost),
        "solver": record,
    }


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: first under another name in its folder, then renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_plan(path: Path, problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any]) -> None:
    """Write a plan file."""
    write_text(path, json.dumps(plan_file_to_dict(problem, plan, cost, solver), indent=1, allow_nan=False) + "\n")


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan file, rebuild its problem and check it against its hash. Raises InputError."""
    return plan_file_from_section(Section(read_mapping(path, max_bytes=MAX_PLAN_BYTES), str(path)))


def plan_file_from_section(section: Section) -> PlanFile:
    """Read the mapping of a plan file as `read_plan` does. Raises InputError."""
    if section.text("format") != FORMAT:
        section.fail("format", f"is not {FORMAT}; give a plan.json written by this program")
    if type(version := section.raw("version")) is not int or version != VERSION:
        section.fail("version", f"is not read here; this program reads version {VERSION}")
    whole = section.section("problem")
    if section.text("problem_sha256", default=None) not in (None, sha256_of(section.raw("problem"))):
        section.fail("problem_sha256", "does not belong to the problem in the file; plan again, or remove the key")
    problem = problem_from_section(whole)
    plan = plan_from_section(section, problem.cluster)
    section.section("prediction", optional=True)
    solver = section.section("solver", optional=True)
    read = {key: solver.raw(key, None) for key in list(solver.keys())}
    if read.get("pricer") is not None:  # who reads the file prices the plan by our cost model
        read = {key: value for key, value in read.items() if key not in _BY_ITS_PRICER}
    section.finish()
    return PlanFile(problem, plan, read)


def on_problem(plan: Plan, old: Problem, problem: Problem, where: str = "plan") -> Plan:
    """Move a plan for the problem `old` to `problem`: devices keep their names, and the numbers of micro-batches grow
    with the global batch; no stage has more than these in flight.

    Raises InputError where the cluster of `problem` lacks a device, and where a number of micro-batches is not whole.
    """
    data = plan_to_dict(plan, old.cluster)
    batch, before = problem.workload.global_batch, old.workload.global_batch
    for k, pipeline in enumerate(data["pipelines"]):
        count, rest = divmod(pipeline["num_micro_batches"] * batch, before)
        if rest or not count:
            raise InputError(
                f"{where}: pipelines[{k}]: {pipeline['num_micro_batches']} micro-batches for {before} sequences are no "
                f"whole number for {batch}; choose a batch that is a multiple, or plan again"
            )
        pipeline["num_micro_batches"] = count
        for stage in pipeline["stages"]:
            if "in_flight" in stage:
                stage["in_flight"] = min(stage["in_flight"], count)
    return plan_from_section(Section(data, where), problem.cluster)


def plan_from_section(section: Section, cluster: Cluster) -> Plan:
    """Schedule, sharding and pipelines of a plan file. Raises InputError; `check` says whether they are valid."""
    schedule = schedule_by_name(section.text("schedule"), section.at("schedule"))
    sharding = section.section("sharding", optional=True)
    zero, groups = sharding.raw("stage", 0), sharding.raw("groups", "all")
    if not isinstance(groups, str):
        groups = tuple(
            _devices(Section({"devices": group}, f"{sharding.at('groups')}[{k}]"), cluster)
            for k, group in enumerate(sharding.items("groups"))
        )
    sharding.finish()
    with sharding.building():
        chosen = Sharding(zero, groups)
    pipelines = tuple(_pipeline(entry, cluster) for entry in section.sections("pipelines"))
    with section.building(name=cluster.device_name):
        return Plan(pipelines, schedule, chosen)


def _pipeline(section: Section, cluster: Cluster) -> Pipeline:
    stages = tuple(_stage(stage, cluster) for stage in section.sections("stages"))
    count, size = section.raw("num_micro_batches"), section.raw("micro_batch_size")
    section.finish()
    with section.building():
        return Pipeline(stages, count, size)


def _stage(section: Section, cluster: Cluster) -> Stage:
    keys = [key for key in _PARALLELISM if key in section]
    if len(keys) != 1:
        raise InputError(
            f"{section.where}: states {' and '.join(keys) or 'no devices'}; state devices, replicas or sequence"
        )
    parallelism = _PARALLELISM[keys[0]](section, cluster)
    layers, policy, in_flight = (
        section.items("layers"),
        section.raw("recompute", "none"),
        section.raw("in_flight", None),
    )
    nested = layers and all(isinstance(item, list) for item in layers)
    inner = (
        [Section({"layers": item}, f"{section.at('layers')}[{k}]") for k, item in enumerate(layers)] if nested else []
    )
    ranges = tuple(_whole(pair, "layers") for pair in inner or [section])
    section.finish()
    with section.building():
        policies = tuple(policy) if isinstance(policy, list) else (policy,)
        return Stage(parallelism, ranges, policies, in_flight)  # type: ignore[arg-type]


def _tensor_parallel(section: Section, cluster: Cluster) -> TensorParallel:
    devices, heads = _devices(section, cluster), _whole(section, "heads", optional=True) or None
    degree = section.integer("degree", at_least=1, at_most=len(devices), default=None)
    with section.building():
        return TensorParallel(devices, heads, degree)


def _replicas(section: Section, cluster: Cluster) -> Replicated | ExpertParallel:
    entries = section.sections("replicas")
    if any(entry.raw("experts", None) is not None for entry in entries):
        members = tuple(_expert_replica(entry, cluster) for entry in entries)
        waves = section.raw("waves", 1)
        with section.building():
            return ExpertParallel(members, waves)
    replicas = tuple(_replica(entry, cluster) for entry in entries)
    with section.building():
        return Replicated(replicas)


def _expert_replica(section: Section, cluster: Cluster) -> ExpertReplica:
    devices, samples, experts = _devices(section, cluster), section.raw("samples"), _whole(section, "experts")
    section.finish()
    with section.building():
        return ExpertReplica(devices, samples, experts)


def _replica(section: Section, cluster: Cluster) -> Replica:
    devices, samples = _devices(section, cluster), section.raw("samples")
    heads = _whole(section, "heads", optional=True) or None
    section.finish()
    with section.building():
        return Replica(devices, samples, heads)


def _sequence_parallel(section: Section, cluster: Cluster) -> SequenceParallel:
    layout = section.section("sequence")
    groups = tuple(_sequence_group(entry, cluster) for entry in layout.sections("groups"))
    order = layout.raw("order", ORDERS[0])
    layout.finish()
    with layout.building():
        return SequenceParallel(groups, order)


def _sequence_group(section: Section, cluster: Cluster) -> SequenceGroup:
    devices, tokens, heads = _devices(section, cluster), _whole(section, "tokens"), _whole(section, "heads")
    section.finish()
    with section.building():
        return SequenceGroup(devices, tokens, heads)


_PARALLELISM: dict[str, Callable[[Section, Cluster], StageParallelism]] = {
    "devices": _tensor_parallel,
    "replicas": _replicas,
    "sequence": _sequence_parallel,
}


def _devices(section: Section, cluster: Cluster) -> tuple[int, ...]:
    names = section.valid_items("devices", lambda name: isinstance(name, str), "is not a device; write machine:index")
    if not names:
        section.fail("devices", "is empty; name at least one device as machine:index")
    return tuple(cluster.device_index(name, where=section.at("devices")) for name in names)


def _whole(section: Section, key: str, *, optional: bool = False) -> tuple[int, ...]:
    def is_index(value: Any) -> bool:
        return is_whole(value) and 0 <= value <= 2**31

    return tuple(section.valid_items(key, is_index, "is not a whole number from 0", optional=optional))

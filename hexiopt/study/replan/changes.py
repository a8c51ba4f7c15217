"""What has changed in a problem's cluster: machines and devices lost, slow or added."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hexiopt.cost.cost import micro_batch_s
from hexiopt.errors import InputError
from hexiopt.files.machine_entries import gpus_from_section, machines_from_section
from hexiopt.files.training_files import read_rank_times
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import MIN_SPEED
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.reading import Section, read_mapping
from hexiopt.study.solution import PlacedPlan

Slow = Mapping[str, float] | str | Path  # shares of full speed by machine or device, or the folder of a run
Added = Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | Path  # a file, its content, or its list of machines
_AT_SPEED = 0.95  # a measured device that is at least as fast is not slow
_DIGITS = 2


def change(
    before: PlacedPlan, problem: Problem, lost: Iterable[str] = (), slow: Slow | None = None, added: Added | None = None
) -> Problem:
    """`problem` without `lost` machines and devices, with others `slow`, and with `added` machines.

    `slow` may be a run that trained `before`, whose times tell which devices were slow. Raises InputError, also where
    nothing differs from the problem of `before`.
    """
    cluster = problem.cluster
    if added is not None:
        cluster = with_machines(cluster, added)
    if slow is not None:
        speeds = speeds_in_run(before, Path(slow)) if isinstance(slow, str | Path) else slow
        cluster = cluster.with_speeds(speeds)
    space = problem.space.replace(exclude=(*problem.space.exclude, *lost))
    changed = problem.replace(cluster=cluster, space=space)
    if changed == before.problem:
        measured = f"{slow} measured no slow device; " if isinstance(slow, str | Path) else ""
        raise InputError(
            f"replan: {measured}nothing has changed; state lost=[machine:index], slow={{machine:index: 0.7}} or "
            "added=FILE, or override cluster"
        )
    return changed


def relaxations(space: Space) -> list[tuple[Space, tuple[str, ...]]]:
    """`space`, then spaces without some constraints on the shape of a plan, which fewer devices may be unable to meet:
    each with the names of the constraints dropped, fewest first. Excluded devices and memory headroom stay.
    """
    spaces: list[tuple[Space, tuple[str, ...]]] = [(space, ())]
    for names in (("num_pipelines", "num_stages"), ("num_pipelines", "num_stages", "max_tp")):
        dropped = tuple(name for name in names if getattr(space, name) is not None)
        if dropped != spaces[-1][1]:
            spaces.append((space.replace(**dict.fromkeys(dropped)), dropped))
    return spaces


def with_machines(cluster: Cluster, added: Added) -> Cluster:
    """`cluster` with the machines of `added`, stated as in a cluster file. Where they state no network rate or latency,
    those between the cluster's machines hold.

    A file or mapping has `machines`, and `gpus` that are not in the catalogue. Raises InputError.
    """
    if isinstance(added, str | Path):
        section = Section(read_mapping(added), str(added))
    else:
        section = Section(added if isinstance(added, Mapping) else {"machines": list(added)}, "added")
    cluster_types = {gpu.type_name: gpu.at(1.0) for gpu in cluster.types}
    types = cluster_types | gpus_from_section(section.section("gpus", optional=True))
    rates = cluster.inter_bandwidth_bytes_per_s, cluster.inter_latency_s
    more = machines_from_section(section, types, *rates)
    section.finish()
    used_names = {name for machine in cluster.machines for name in (machine.name, machine.spec_name)}
    for machine in more:
        if {machine.name, machine.spec_name} & used_names:
            fault = f"{section.at('machines')}: {machine.spec_name!r} is a machine of the cluster"
            raise InputError(f"{fault} already; give it another name")
    return cluster.replace(machines=(*cluster.machines, *more))


def speeds_in_run(plan: PlacedPlan, run: Path) -> dict[str, float]:
    """The devices that were slow in a run of `plan`, each with the share of its type's speed: what its stage was
    predicted to take for a micro-batch over what it took, relative to the median device of its type.

    `run` is the folder of `hexiopt train`, or its metrics.jsonl. The devices of a TP group wait for each other, so that
    a slow one makes all slow. Raises InputError.
    """
    took_s, cluster = read_rank_times(run), plan.problem.cluster
    by_type: dict[str, dict[str, float]] = defaultdict(dict)
    for device, predicted_s in micro_batch_s(plan, plan.cost).items():
        name, gpu = cluster.device_name(device), cluster.gpu_of(device)
        if name in took_s:
            by_type[gpu.type_name][name] = predicted_s / took_s[name] * gpu.speed
    if not by_type:
        raise InputError(f"{run}: measured no device of the plan; give a run of this plan")
    slow_speeds: dict[str, float] = {}
    for speeds in by_type.values():
        usual = statistics.median_high(speeds.values())
        slow = {name: speed / usual for name, speed in speeds.items() if speed < _AT_SPEED * usual}
        slow_speeds |= {name: round(max(MIN_SPEED, share), _DIGITS) for name, share in slow.items()}
    return slow_speeds

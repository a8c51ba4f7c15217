"""Arrangements of devices: each once, and all of them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.solvers import oracle, problems
from tests.solvers.assignments import DeviceAssignment, DeviceClasses


def lab(*machines: dict[str, Any], layers: int = 4, batch: int = 4, **more: Any) -> Problem:
    space = more.pop("space", Space())
    data = {
        "name": "small",
        "inter_machine": {"bandwidth_gb_per_s": 1.0},
        "machines": [{"intra_bandwidth_gb_per_s": 10, **m} if m["num_gpus"] > 1 else m for m in machines],
        "gpus": {name: {"tflops": 50, "memory_gib": 16, "hbm_gb_per_s": 900} for name in ("fast", "slow")},
        **more,
    }
    cluster = cluster_from_section(Section(data, "small.yaml"))
    return Problem(cluster, replace(problems.TINY, num_layers=layers), Workload(batch, 512), space)


def machine(name: str, num_gpus: int = 1, gpu: str = "fast", **more: Any) -> dict[str, Any]:
    return {"name": name, "gpu": gpu, "num_gpus": num_gpus, **more}


LABS = {
    "alike": lab(machine("a", 3)),
    "bridged": lab(machine("a", 3, intra_links=[{"between": [0, 2], "bandwidth_gb_per_s": 50}])),
    "two_interfaces": lab(machine("a", 4, network_interfaces=2)),
    "two_kinds": lab(machine("a", 2), machine("b", 1, "slow")),
    "equal_machines": lab(machine("a"), machine("b"), machine("c"), machine("d", gpu="slow")),
    "equal_pairs": lab(machine("n", 2, count=2)),
    "slow_link": lab(
        machine("a"), machine("b"), machine("c"), links=[{"between": ["a", "b"], "bandwidth_gb_per_s": 0.1}]
    ),
    "any_tp": lab(machine("a", 3), space=Space(tp_degrees="all")),
    "few_layers": lab(machine("a", 2), machine("b", 1), layers=1),
    "few_sequences": lab(machine("a", 3), batch=1),
    "constrained": lab(machine("a", 2), machine("b", 2), space=Space(num_pipelines=2, num_stages=1, replicas=False)),
    "excluded": lab(machine("a", 3), space=Space(exclude=("a:1",))),
}
SEATS = {
    "alike": ((0, 1, 2),),
    "bridged": ((0, 2), (1,)),
    "two_interfaces": ((0, 1), (2, 3)),
    "equal_machines": ((0,), (1,), (2,), (3,)),
    "excluded": ((0, 2),),
}
RUNS = {
    "alike": ((0,),),
    "two_kinds": ((0,), (1,)),
    "equal_machines": ((0, 1, 2), (3,)),
    "equal_pairs": ((0, 1),),
    "slow_link": ((0,), (1,), (2,)),
}


@pytest.mark.parametrize("name", SEATS)
def test_equal_devices(name: str) -> None:
    assert DeviceClasses.of(LABS[name]).devices == SEATS[name]


@pytest.mark.parametrize("name", RUNS)
def test_equal_machines(name: str) -> None:
    assert DeviceClasses.of(LABS[name]).runs == RUNS[name]


def test_machines_behind_other_uplinks_differ() -> None:
    racks = [{"name": "r", "members": ["a", "b"], "uplink_gb_per_s": 1}, {"name": "s", "members": ["c"]}]
    assert DeviceClasses.of(lab(machine("a"), machine("b"), machine("c"), groups=racks)).runs == ((0, 1), (2,))


@pytest.mark.parametrize("name", LABS)
def test_all_namings_are_all_lines_of_all_devices(name: str) -> None:
    """Against the naive oracle's own way to put devices into pipelines."""
    problem = LABS[name]
    device_classes = DeviceClasses.of(problem)
    namings = set()
    for assignment in device_classes.assignments():
        for named in every_name(device_classes, assignment):
            namings.add(tuple(sorted(named)))
    assert namings == set(naive(problem))


def every_name(device_classes: DeviceClasses, assignment: DeviceAssignment) -> list[Any]:
    """All namings, under all exchanges of equal machines."""
    exchanged = [
        tuple(tuple(tuple(tuple(to[k] for k in slot) for slot in stage) for stage in line) for line in assignment)
        for to in device_classes.exchanges
    ]
    return [named for other in exchanged for named in device_classes.labelings(other)]


def naive(problem: Problem) -> list[Any]:
    space, batch = problem.space, problem.workload.global_batch
    most_replicas = space.micro_batch_sizes(batch)[-1] if space.replicas else 1
    assignments = []
    for count in range(1, len(problem.usable_devices) + 1):
        for used in itertools.combinations(problem.usable_devices, count):
            for blocks in oracle._partitions(used):
                lines = [
                    [
                        line
                        for line in oracle._lines(problem, block)
                        if max(map(len, line)) <= most_replicas and space.num_stages in (None, len(line))
                    ]
                    for block in blocks
                ]
                if len(blocks) <= batch and space.num_pipelines in (None, len(blocks)):
                    assignments += [tuple(sorted(chosen)) for chosen in itertools.product(*lines)]
    return assignments


@pytest.mark.parametrize("name", LABS)
def test_arrangements_differ(name: str) -> None:
    """No two are the same but for names."""
    device_classes = DeviceClasses.of(LABS[name])
    seen: dict[Any, DeviceAssignment] = {}
    for assignment in device_classes.assignments():
        for named in every_name(device_classes, assignment):
            key = tuple(sorted(named))
            assert seen.setdefault(key, assignment) == assignment

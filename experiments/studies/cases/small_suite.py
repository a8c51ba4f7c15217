"""Small mixed problems, of which the optimum may be proven."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from experiments.app.configurations import named_model
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.own_packages import own_package
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section, read_mapping
from hexiopt.schedules.registry import ONE_F_ONE_B

_LATENCY_US = 20.0
_WORKLOAD = ("global_batch", "seq_len", "precision")


@cache
def small_problems() -> Mapping[str, Problem]:
    """The problems by name."""
    with as_file(files(own_package("experiments")).joinpath("data/small_suite.yaml")) as file:
        rows: list[dict[str, Any]] = read_mapping(file)["problems"]
    return {row["name"]: _problem(row) for row in rows}


def _problem(row: Mapping[str, Any]) -> Problem:
    model = named_model(row["model"])
    return Problem(
        _cluster(row),
        replace(model, num_layers=row.get("layers", model.num_layers)),
        Workload(
            **{key: row[key] for key in _WORKLOAD if key in row}, schedule=ONE_F_ONE_B.name, optimizer_sharding="1"
        ),
        Space(replicas=False),
    )


def _cluster(row: Mapping[str, Any]) -> Cluster:
    known = catalogue()
    machines = []
    for gpu, sizes in row["machines"].items():
        for k, size in enumerate(sizes):
            machine: dict[str, Any] = {"name": f"{gpu}_{k}" if len(sizes) > 1 else gpu, "gpu": gpu, "num_gpus": size}
            if size > 1:
                machine["intra_bandwidth_gb_per_s"] = intra_bandwidth_gb_per_s(known[gpu])
            machines.append(machine)
    network = {"bandwidth_gb_per_s": row["gbit_per_s"] / 8, "latency_us": _LATENCY_US}
    data = {"name": row["name"], "inter_machine": network, "machines": machines}
    return cluster_from_section(Section(data, "small_suite.yaml"))


def tightness(problem: Problem) -> float:
    """Model states of one copy, unsharded, over the usable memory of all devices."""
    states = problem.model.num_params * problem.workload.states.total
    return states / sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in problem.cluster.machines)

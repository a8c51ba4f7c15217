"""Problems as files, for `hexiopt.load_problem` and for planners outside: with the rate of each pair of devices."""

import json
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.plan_file import FORMAT as PLAN_FORMAT
from hexiopt.files.plan_file import MAX_PLAN_BYTES, plan_file_from_section, write_text
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping, sha256_of
from hexiopt.units import GB

FORMAT, VERSION = "hexiopt.problem", 1
MAX_RATED_DEVICES = 1024
"""Files of larger clusters have no table of rates: it would be larger than what is read."""


def instance_to_dict(problem: Problem) -> dict[str, Any]:
    """The content of a problem file."""
    devices = rates_to_dict(problem.cluster) if problem.cluster.num_devices <= MAX_RATED_DEVICES else None
    return {
        "format": FORMAT,
        "version": VERSION,
        "problem": problem_to_dict(problem),
        "problem_sha256": problem_sha256(problem),
        "devices": devices,
    }


def rates_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The names and GPU types of all devices, and what a message between any two gets without other traffic: GB/s and
    microseconds [from, to], null from a device to itself."""
    devices, network = range(cluster.num_devices), cluster.network

    def table(cell: Any) -> list[list[float | None]]:
        return [[None if a == b else cell(a, b) for b in devices] for a in devices]

    return {
        "names": [cluster.device_name(device) for device in devices],
        "gpus": [cluster.gpu_of(device).name for device in devices],
        "bandwidth_gb_per_s": table(lambda a, b: network.pair_bandwidth(a, b) / GB),
        "latency_us": table(lambda a, b: 1e6 * network.pair_latency(a, b)),
    }


def write_problem(path: Path, problem: Problem) -> None:
    """Write a problem file, atomically. Raises InputError where it cannot be written."""
    try:
        write_text(path, json.dumps(instance_to_dict(problem), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another path") from None


def read_problem(path: str | Path) -> Problem:
    """The problem in a problem file or a plan file, checked against its hash. Raises InputError."""
    section = Section(read_mapping(path, max_bytes=MAX_PLAN_BYTES), str(path))
    if (kind := section.text("format")) == PLAN_FORMAT:
        return plan_file_from_section(section).problem
    if kind != FORMAT:
        section.fail("format", f"is neither {FORMAT} nor {PLAN_FORMAT}; give what problem.save or plan.save wrote")
    if type(version := section.raw("version")) is not int or version != VERSION:
        section.fail("version", f"is not read here; this program reads version {VERSION}")
    if section.text("problem_sha256", default=None) not in (None, sha256_of(section.raw("problem"))):
        section.fail("problem_sha256", "does not belong to the problem in the file; remove it if the change is meant")
    section.raw("devices", None)  # follows from the cluster
    problem = problem_from_section(section.section("problem"))
    section.finish()
    return problem

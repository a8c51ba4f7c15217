"""Reads and writes the problem of a plan file and of the command line as plain data."""

from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from hexiopt.errors import FieldError, InputError, did_you_mean
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict
from hexiopt.files.huggingface import model_from_config
from hexiopt.numbers.frameworks import calibration_sha256
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import BOUNDS, EXACT_SWITCHES, MORE_FREEDOMS, Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section, as_mapping, sha256_of

COST_MODEL_VERSION = "1"


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The whole problem with all defaults filled in, as stored in a plan file."""
    return {
        "cluster": cluster_to_dict(problem.cluster),
        "model": problem.model.to_dict(),
        "workload": workload_to_dict(problem.workload),
        "space": space_to_dict(problem.space),
        "cost_model": {"version": COST_MODEL_VERSION, "calibration_sha256": calibration_sha256()},
    }


def problem_from_section(section: Section) -> Problem:
    """The problem that `problem_to_dict` wrote. Raises InputError."""
    cost_model = section.section("cost_model", optional=True)
    version = cost_model.text("version", default=COST_MODEL_VERSION)
    cost_model.text("calibration_sha256", default="")
    cost_model.finish()
    if version != COST_MODEL_VERSION:
        raise InputError(
            f"{cost_model.at('version')}: {version!r} is not the cost model {COST_MODEL_VERSION!r} of this program; "
            "price the plan with the program that wrote it, or plan again"
        )
    problem = Problem(
        cluster=cluster_from_section(section.section("cluster")),
        model=model_from_config(section.section("model")),
        workload=workload_from_section(section.section("workload")),
        space=space_from_dict(section.raw("space", {}), section.at("space")),
    )
    section.finish()
    return problem


@lru_cache(maxsize=64)
def problem_sha256(problem: Problem) -> str:
    """SHA-256 of the problem as UTF-8 JSON with sorted keys and no spaces."""
    return sha256_of(problem_to_dict(problem))


def workload_from_section(section: Section) -> Workload:
    """The workload of a mapping whose keys are the fields of `Workload`. Raises InputError."""
    values = section.fields(Workload)
    section.finish()
    with section.building():
        return Workload(**values)


def workload_to_dict(workload: Workload) -> dict[str, Any]:
    """All fields that are not None, as `workload_from_section` reads them.

    Sequence parallelism, precisions of messages and sums, routing, and what is trained by which optimizer are written
    only where they differ from the default, so that other problems keep the hash that they have in files written before
    these fields existed.
    """
    values = {field.name: (getattr(workload, field.name), field.default) for field in fields(workload)}
    later = ("sequence_parallel", "message_precision", "gradient_precision", "routing", "training", "lora", "optimizer")
    data = {
        name: value
        for name, (value, default) in values.items()
        if value is not None and (name not in later or value != default)
    }
    if workload.adapters is not None:
        lora = asdict(workload.adapters)
        data["lora"] = lora | {"targets": lora["targets"] if isinstance(lora["targets"], str) else [*lora["targets"]]}
    return data


def space_from_sections(space: Section, constraints: Section) -> Space:
    """The plan space of the `space` and `constraints` mappings of the command line. Raises InputError."""
    freedoms = [field.name for field in fields(Space) if field.name not in BOUNDS]
    values = space.fields(Space, freedoms) | constraints.fields(Space, BOUNDS)
    space.finish()
    constraints.finish()
    try:
        return Space(**values)
    except FieldError as error:
        raise (constraints if error.field.partition("[")[0] in BOUNDS else space).refusal(error) from None


def space_to_dict(space: Space) -> dict[str, Any]:
    """All fields of the space, as plain data.

    Exact switches, late freedoms and the memory headroom are written only where they differ from the default, so that
    other problems keep the hash that they have in files written before these fields existed.
    """
    values = {field.name: (getattr(space, field.name), field.default) for field in fields(space)}
    later = (*EXACT_SWITCHES, *MORE_FREEDOMS[1:], "memory_headroom")
    data = {name: value for name, (value, default) in values.items() if name not in later or value != default}
    return data | {"exclude": list(space.exclude)}


def space_from_dict(data: Any, where: str) -> Space:
    """The space that `space_to_dict` wrote. Raises InputError."""
    whole = as_mapping(data, where)
    names = {field.name for field in fields(Space)}
    for key in whole:
        if key not in names:
            raise InputError(f"{where}.{key}: unknown key; {did_you_mean(key, names)}")
    bounds = {key: whole[key] for key in BOUNDS if whole.get(key) is not None}
    freedoms = {key: value for key, value in whole.items() if key not in BOUNDS}
    return space_from_sections(Section(freedoms, where), Section(bounds, where))

"""Clusters and models by a shipped name, from a file, or from a mapping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError, quoted
from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.files.instance_file import read_problem
from hexiopt.files.shipped import is_shipped, read_shipped
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section


def cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """The cluster with a shipped name, from a YAML or JSON file, or from a mapping (docs/clusters.md).

    A shipped name takes precedence over a file; write "./NAME" or a Path for the file. The path of a `profile` is
    relative to the file, or to the working directory for a mapping. Raises InputError naming file and key.
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, str) and is_shipped("cluster", source):
        return cluster_from_section(Section(read_shipped("cluster", source), f"{source}.yaml"))
    return read_cluster(source) if isinstance(source, str | Path) else cluster_from_section(Section(source, "cluster"))


def model(source: Any) -> ModelSpec:
    """The model with a shipped name, from a Hugging Face `config.json` or its folder, or a YAML file or a mapping with
    the same keys, from the Hub by its name ORG/NAME, or from a configuration object of transformers.

    A shipped name takes precedence over a file; write "./NAME" or a Path for the file. The Hub is asked where neither a
    file nor its local cache has the name. Raises InputError naming file and key.
    """
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, str) and is_shipped("model", source):
        return model_from_config(Section(read_shipped("model", source), f"{source}.yaml"))
    if isinstance(source, str | Path):
        return read_model(source)
    if not isinstance(source, Mapping) and callable(getattr(source, "to_dict", None)):
        source = source.to_dict()  # as transformers' configurations have it
    return model_from_config(Section(source, "model"))


def load_problem(path: str | Path) -> Problem:
    """The problem in a file that `Problem.save` wrote, or in a `plan.json`. Raises InputError naming file and key."""
    return read_problem(path)


def constrain(problem: Problem, constraints: Mapping[str, Any] | None = None) -> Problem:
    """`problem` with `constraints` in its plan space. Raises InputError, also for what is no problem."""
    if not isinstance(problem, Problem):
        raise InputError(f"problem: {quoted(problem)} is not a Problem; give hexiopt.Problem(cluster, model, ...)")
    return problem.replace(space=problem.space.replace(**constraints)) if constraints else problem

"""The shipped clusters and models by name, for experiments that build problems without Hydra."""

from importlib.resources import as_file, files
from typing import Any

from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.readers.huggingface import model_from_config
from hexiopt.reading import Section, read_mapping


def conf(path: str) -> dict[str, Any]:
    """The mapping in a file of `conf/`."""
    with as_file(files("conf").joinpath(path)) as file:
        return read_mapping(file)


def named_cluster(name: str, *, inter_gb_per_s: float | None = None, **synthetic: float) -> Cluster:
    """A shipped cluster; `inter_gb_per_s` replaces its bandwidth between machines, `synthetic` keys of that section."""
    data = conf(f"cluster/{name}.yaml")
    if inter_gb_per_s is not None:
        data["inter_machine"]["bandwidth_gb_per_s"] = inter_gb_per_s
    if synthetic:
        data["synthetic"] |= synthetic
    return cluster_from_section(Section(data, f"{name}.yaml"))


def named_model(name: str) -> ModelSpec:
    """A shipped model."""
    return model_from_config(Section(conf(f"model/{name}.yaml"), f"{name}.yaml"))

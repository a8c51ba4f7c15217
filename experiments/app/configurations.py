"""The shipped clusters and models by name, for experiments that build problems without Hydra."""

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.shipped import read_shipped
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section


def named_cluster(name: str, *, inter_gb_per_s: float | None = None, **synthetic: float) -> Cluster:
    """A shipped cluster; `inter_gb_per_s` replaces its bandwidth between machines, `synthetic` overrides keys of its
    section of that name."""
    data = read_shipped("cluster", name)
    if inter_gb_per_s is not None:
        data["inter_machine"]["bandwidth_gb_per_s"] = inter_gb_per_s
    if synthetic:
        data["synthetic"] |= synthetic
    return cluster_from_section(Section(data, f"{name}.yaml"))


def named_model(name: str) -> ModelSpec:
    """A shipped model."""
    return model_from_config(Section(read_shipped("model", name), f"{name}.yaml"))

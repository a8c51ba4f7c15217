"""Small mixed problems for rivals: real GPU types and decoders, slow and fast networks, scarce memory, odd machines."""

from dataclasses import replace
from functools import cache
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.huggingface import read_model
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.conftest import ROOT

_CONF = ROOT / "conf"


def cluster(*machines: tuple[str, int, float], network_gb_per_s: float, **more: Any) -> Cluster:
    """Machines as (GPU, number of GPUs, GB/s inside), named a, b, c, ..."""
    data = {
        "name": "mixed",
        "inter_machine": {"bandwidth_gb_per_s": network_gb_per_s, "latency_us": 30},
        "machines": [
            {
                "name": "abcdef"[k],
                "gpu": gpu,
                "num_gpus": count,
                "intra_bandwidth_gb_per_s": rate,
                "intra_latency_us": 8,
            }
            for k, (gpu, count, rate) in enumerate(machines)
        ],
        **more,
    }
    return cluster_from_section(Section(data, "mixed"))


def model(name: str, num_layers: int) -> ModelSpec:
    """A model of the repository with fewer layers."""
    return replace(read_model(_CONF / "model" / f"{name}.yaml"), num_layers=num_layers)


@cache
def slow_network() -> Problem:
    """Three GPU types over 5 Gbit/s, where most of them are better left out."""
    gpu_cluster = cluster(("rtx_3090", 4, 12), ("rtx_4090", 4, 12), ("rtx_3080_ti", 2, 12), network_gb_per_s=0.625)
    return Problem(gpu_cluster, model("gpt2_345m", 12), Workload(32, 1024))


@cache
def tight_memory() -> Problem:
    """Half of Llama-2 7B on 24 and 40 GiB: no GPU holds it."""
    gpu_cluster = cluster(("rtx_3090", 4, 12), ("a100_40gb_sxm", 4, 200), network_gb_per_s=3)
    return Problem(gpu_cluster, model("llama2_7b", 16), Workload(32, 2048))


@cache
def odd_machines() -> Problem:
    """Machines of three, four and one GPU."""
    gpu_cluster = cluster(
        ("a100_40gb_sxm", 3, 200), ("v100_16gb_sxm", 4, 60), ("a100_40gb_sxm", 1, 200), network_gb_per_s=12.5
    )
    return Problem(gpu_cluster, model("gpt2_345m", 10), Workload(24, 1024, precision="fp16"))


@cache
def racks() -> Problem:
    """Two racks of two types each behind a slow uplink, machines of a type in different racks."""
    uplink = {"uplink_gb_per_s": 0.5, "latency_us": 100}
    gpu_cluster = cluster(
        ("l40s", 2, 20),
        ("a100_40gb_sxm", 2, 100),
        ("l40s", 2, 20),
        ("a100_40gb_sxm", 2, 100),
        network_gb_per_s=12.5,
        groups=[{"name": "left", "members": ["a", "d"], **uplink}, {"name": "right", "members": ["b", "c"], **uplink}],
    )
    return Problem(gpu_cluster, model("llama2_7b", 8), Workload(64, 2048))


@cache
def one_kind() -> Problem:
    """Two equal machines over 10 Gbit/s."""
    gpu_cluster = cluster(("a100_40gb_sxm", 4, 200), ("a100_40gb_sxm", 4, 200), network_gb_per_s=1.25)
    return Problem(gpu_cluster, model("llama2_7b", 24), Workload(32, 2048))


MIXED = {
    "slow_network": slow_network,
    "tight_memory": tight_memory,
    "odd_machines": odd_machines,
    "racks": racks,
    "one_kind": one_kind,
}

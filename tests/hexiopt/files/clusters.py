"""Cluster files that tests of them begin with."""

from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.cluster import Cluster
from hexiopt.reading import Section, parse

EXAMPLE = """
name: example
inter_machine: {bandwidth_gb_per_s: 12.5, latency_us: 20}
machines:
  - {name: a, gpu: rtx_3090, num_gpus: 4, intra_bandwidth_gb_per_s: 12, intra_latency_us: 10,
     intra_links: [{between: [0, 1], bandwidth_gb_per_s: 50}]}
  - {name: d, gpu: a800_80gb_sxm, num_gpus: 8, intra_bandwidth_gb_per_s: 200, count: 3,
     network_interfaces: 4, nic_bandwidth_gb_per_s: 25, price_per_hour: 20}
groups:
  - {name: rack1, members: [d], uplink_gb_per_s: 50, latency_us: 50}
links:
  - {between: [a, d], bandwidth_gb_per_s: 0.1, latency_us: 2000}
gpus:
  my_gpu: {tflops_bf16: 80, tflops_fp16: 80, tflops_fp32: 20, memory_gib: 24, usable_memory_gib: 22.5,
           hbm_gb_per_s: 900, flash_attention: true}
"""


def read(data: Any, where: str = "my.yaml") -> Cluster:
    return cluster_from_section(Section(data, where))


def example() -> Any:
    return parse(EXAMPLE, "example", as_json=False)


def two(**first: Any) -> dict[str, Any]:
    """Two machines of four GPUs; `first` changes the first one (a value of `...` removes its key)."""
    machine = {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12, **first}
    return {
        "name": "two",
        "inter_machine": {"bandwidth_gb_per_s": 1.25},
        "machines": [
            {key: value for key, value in machine.items() if value is not ...},
            {"name": "b", "gpu": "rtx_4090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12, "count": 2},
        ],
    }

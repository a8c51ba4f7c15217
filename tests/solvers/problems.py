"""Small problems for solvers: two machine kinds; memory and network generous or scarce; and hopeless ones."""

from dataclasses import replace
from functools import cache
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.conftest import ROOT
from tests.models import TINY

_CONF = ROOT / "conf"

BATCH_OF_4 = Workload(global_batch=4, seq_len=512)
FIXED = {"schedule": "1f1b", "optimizer_sharding": "1"}
ANY = Space()
SMALL_SPACE = Space(max_micro_batch_size=2)


def cluster(
    *machines: tuple[str, str, int],
    network_gb_per_s: float = 10.0,
    fast_gib: float = 16.0,
    slow_gib: float = 8.0,
) -> Cluster:
    """Machines as (name, GPU, number of GPUs) of the types `fast` and `slow`."""
    data: dict[str, Any] = {
        "name": "small",
        "inter_machine": {"bandwidth_gb_per_s": network_gb_per_s, "latency_us": 20},
        "machines": [
            {
                "name": name,
                "gpu": gpu,
                "num_gpus": count,
                "intra_bandwidth_gb_per_s": 25,
                "intra_latency_us": 5,
            }
            for name, gpu, count in machines
        ],
        "gpus": {
            "fast": {"tflops": 100, "memory_gib": fast_gib, "hbm_gb_per_s": 1500},
            "slow": {"tflops": 30, "memory_gib": slow_gib, "hbm_gb_per_s": 600},
        },
    }
    return cluster_from_section(Section(data, "small.yaml"))


def loose() -> Problem:
    """Three devices of two kinds, memory for everything; nothing fixed but the space's micro-batch sizes."""
    return Problem(cluster(("a", "fast", 1), ("b", "slow", 2)), TINY, BATCH_OF_4, SMALL_SPACE)


def tight() -> Problem:
    """As `loose` with five layers, but no device holds the model or its stored activations."""
    small = cluster(("a", "fast", 1), ("b", "slow", 2), fast_gib=1.5, slow_gib=1.1)
    workload = replace(BATCH_OF_4, seq_len=4096, schedule="1f1b")
    return Problem(small, replace(TINY, num_layers=5), workload, SMALL_SPACE)


def slow_network() -> Problem:
    """Two machines of two devices that can hardly talk to each other."""
    pair = cluster(("a", "fast", 2), ("b", "slow", 2), network_gb_per_s=0.1)
    return Problem(pair, TINY, Workload(4, 512, recompute="none", **FIXED), SMALL_SPACE)


def fast_network() -> Problem:
    """Two machines of two devices on a network as fast as their own links."""
    pair = cluster(("a", "fast", 2), ("b", "slow", 2), network_gb_per_s=50.0)
    return Problem(pair, TINY, Workload(4, 512, recompute="none", **FIXED), SMALL_SPACE)


def three_gpus() -> Problem:
    """One machine of three devices that may use any TP degree."""
    space = replace(SMALL_SPACE, tp_degrees="all")
    return Problem(cluster(("a", "fast", 3)), replace(TINY, num_layers=3), BATCH_OF_4, space)


TINY_PROBLEMS = {
    "loose": loose,
    "tight": tight,
    "slow_network": slow_network,
    "fast_network": fast_network,
    "three_gpus": three_gpus,
}


def easy(space: Space = ANY, **machines: Any) -> Problem:
    """Eight devices in three machines of two kinds, memory for everything: any structure fits."""
    gpu_cluster = cluster(("a", "fast", 2), ("b", "fast", 2), ("c", "slow", 4), **machines)
    return Problem(gpu_cluster, replace(TINY, num_layers=6), Workload(global_batch=16, seq_len=512), space)


def hopeless() -> Problem:
    """A model far too large for all devices together, though single layers fit."""
    return replace(easy(), model=replace(TINY, num_layers=2000))


def hopeless_layer() -> Problem:
    """A model of which not one layer fits a device."""
    return replace(easy(), model=replace(TINY, hidden_size=32768, num_heads=256, num_kv_heads=256, ffn_size=65536))


def hopeless_constraint() -> Problem:
    """Fits, but not under the constraint that every device holds the whole model."""
    gpu_cluster = cluster(("a", "fast", 2), ("b", "fast", 2), ("c", "slow", 4), fast_gib=0.8, slow_gib=0.8)
    workload = Workload(global_batch=16, seq_len=512, optimizer_sharding="1")
    return Problem(gpu_cluster, replace(TINY, num_layers=6), workload, Space(num_pipelines=8))


@cache
def eight_kinds() -> Problem:
    """Machines of one to four devices of two types: hundreds of sets of machines, also for pure data parallelism."""
    gpu_cluster = cluster(*((f"{gpu}-{count}", gpu, count) for gpu in ("fast", "slow") for count in (1, 2, 3, 4)))
    return Problem(gpu_cluster, TINY, Workload(global_batch=240, seq_len=512))


INFEASIBLE = {"model": hopeless, "layer": hopeless_layer, "constraint": hopeless_constraint}


@cache
def sixteen_gpus() -> Problem:
    """Half of each machine of `thirty_two_gpus`."""
    whole = thirty_two_gpus()
    halves = tuple(replace(machine, num_gpus=machine.num_gpus // 2) for machine in whole.cluster.machines)
    return replace(whole, cluster=replace(whole.cluster, machines=halves))


@cache
def thirty_two_gpus() -> Problem:
    """Llama-2 7B on HexiScale's setting 2."""
    gpu_cluster = read_cluster(_CONF / "cluster" / "hexiscale_setting_2.yaml")
    return Problem(gpu_cluster, read_model(_CONF / "model" / "llama2_7b.yaml"))

"""Twenty small problems with sequence layouts that `sequence_exact` proves: 2 to 6 devices of one to three types, fast
and slow links, loose and tight memory, a key-value head for each query head or for several."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

SMALL = ModelSpec(
    name="small",
    architecture="llama",
    num_layers=4,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=2816,
    vocab_size=8000,
    max_positions=2**20,
)
TYPES = {
    "fast": {"tflops": 300, "memory_gib": 40, "hbm_gb_per_s": 2000},
    "slow": {"tflops": 100, "memory_gib": 24, "hbm_gb_per_s": 900},
    "old": {"tflops": 50, "memory_gib": 24, "hbm_gb_per_s": 600, "flash_attention": False},
}


def cluster(*machines: tuple[str, int], network_gb_per_s: float, memory_gib: float | None = None) -> Cluster:
    """Machines as (type, number of GPUs), with one network interface each."""
    gpus = {name: {**gpu, **({"memory_gib": memory_gib} if memory_gib else {})} for name, gpu in TYPES.items()}
    data: dict[str, Any] = {
        "name": "small",
        "inter_machine": {"bandwidth_gb_per_s": network_gb_per_s, "latency_us": 10},
        "machines": [
            {"name": "abcdef"[k], "gpu": gpu, "num_gpus": n, "intra_bandwidth_gb_per_s": 50, "intra_latency_us": 5}
            for k, (gpu, n) in enumerate(machines)
        ],
        "gpus": gpus,
    }
    return cluster_from_section(Section(data, "small.yaml"))


def task(
    *machines: tuple[str, int],
    seq_len: int = 32768,
    batch: int = 1,
    kv_heads: int = 8,
    network_gb_per_s: float = 25.0,
    memory_gib: float | None = None,
    **workload: Any,
) -> Problem:
    """A problem on machines as `cluster` takes them."""
    return Problem(
        cluster(*machines, network_gb_per_s=network_gb_per_s, memory_gib=memory_gib),
        replace(SMALL, num_kv_heads=kv_heads),
        Workload(batch, seq_len, **workload),
        Space(sequence=True, max_micro_batch_size=2),
    )


SLOW, TIGHT = {"network_gb_per_s": 3.0}, {"memory_gib": 4.0}
SMALL_LAYOUTS: dict[str, Callable[[], Problem]] = {
    "pair": partial(task, ("fast", 1), ("slow", 1)),
    "pair_slow_link": partial(task, ("fast", 1), ("slow", 1), **SLOW),
    "pair_tight": partial(task, ("fast", 1), ("slow", 1), **TIGHT),
    "pair_shared_keys": partial(task, ("fast", 1), ("slow", 1), kv_heads=2),
    "pair_unfused": partial(task, ("slow", 1), ("old", 1), seq_len=8192),
    "pair_batch": partial(task, ("fast", 1), ("slow", 1), seq_len=8192, batch=4),
    "three": partial(task, ("fast", 1), ("slow", 2)),
    "three_slow_link": partial(task, ("fast", 2), ("slow", 1), network_gb_per_s=15.0),
    "three_tight": partial(task, ("fast", 1), ("slow", 2), **TIGHT),
    "three_types": partial(task, ("fast", 1), ("slow", 1), ("old", 1), seq_len=8192),
    "three_shared_keys": partial(task, ("fast", 2), ("slow", 1), kv_heads=2),
    "three_batch": partial(task, ("fast", 1), ("slow", 2), seq_len=8192, batch=3),
    "four": partial(task, ("fast", 2), ("slow", 2)),
    "four_slow_link": partial(task, ("fast", 2), ("slow", 2), **SLOW),
    "four_tight": partial(task, ("fast", 2), ("slow", 2), memory_gib=2.0, recompute="full"),
    "four_shared_keys": partial(task, ("fast", 2), ("slow", 2), kv_heads=4, **SLOW),
    "four_batch": partial(task, ("fast", 2), ("slow", 2), batch=2),
    "five": partial(task, ("fast", 4), ("slow", 1), batch=2, **SLOW),
    "six": partial(task, ("fast", 4), ("slow", 2), **SLOW),
    "six_three_types": partial(task, ("fast", 2), ("slow", 2), ("old", 2), **SLOW),
}

# Step times in seconds of the best plans of `sequence_exact`, each proven within 20 s.
BEST_S = {
    "pair": 0.2799648246811631,
    "pair_slow_link": 0.3435770897954133,
    "pair_tight": 0.3610524127347403,
    "pair_shared_keys": 0.26369399103374225,
    "pair_unfused": 0.09341024411306668,
    "pair_batch": 0.12055351046127745,
    "three": 0.23857661181697357,
    "three_slow_link": 0.18287397474913522,
    "three_tight": 0.2673941791017989,
    "three_types": 0.039117307990796185,
    "three_shared_keys": 0.15855325453772529,
    "three_batch": 0.08341984932762411,
    "four": 0.15019033008761903,
    "four_slow_link": 0.18287397474913522,
    "four_tight": 0.2394867999711492,
    "four_shared_keys": 0.17699975013546668,
    "four_batch": 0.29082608178793656,
    "five": 0.18394293474913528,
    "six": 0.09580653082599618,
    "six_three_types": 0.18287397474913522,
}

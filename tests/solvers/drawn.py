"""Random problems of all sizes: regular clusters, and such as people have, for properties of searches."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.solvers.problems import TINY

SIZES = {"small": (2, 12), "middle": (13, 80), "large": (104, 240)}  # GPUs
GPUS = {
    "big": {"tflops": 300, "memory_gib": 24, "hbm_gb_per_s": 2000},
    "mid": {"tflops": 120, "memory_gib": 16, "hbm_gb_per_s": 900},
    "small": {"tflops": 40, "memory_gib": 10, "hbm_gb_per_s": 500},
    "old": {"tflops": 20, "memory_gib": 8, "hbm_gb_per_s": 300},
}
FREEDOMS = (
    Space(uneven_structure=False),
    Space(uneven_tp=False),
    Space(uneven_layers=False),
    Space(uneven_batch=False),
    Space(replicas=False),
    Space(recompute_per_stage=False),
    Space(max_chunks=1),
)


def drawn_problem(number: int) -> Problem:
    """The problem of that number: sizes in turn, every second one regular."""
    rng = random.Random(number)
    size = tuple(SIZES)[number // 2 % len(SIZES)]
    num_gpus = rng.randint(*SIZES[size])
    machines = list(_regular(rng, num_gpus, size) if number % 2 else _irregular(rng, num_gpus))
    data: dict[str, Any] = {
        "name": "drawn",
        "inter_machine": {"bandwidth_gb_per_s": 5, "latency_us": 20},
        "machines": machines,
        "gpus": GPUS,
    }
    if number % 2 == 0 and rng.random() < 0.4 and len(machines) > 1:
        cut = rng.randint(1, len(machines) - 1)
        data["groups"] = [
            {"name": name, "members": [m["name"] for m in members], "uplink_gb_per_s": rng.choice((1, 5, 25))}
            for name, members in (("one", machines[:cut]), ("two", machines[cut:]))
        ]
    layers, batch = rng.choice((4, 8, 16, 24)), rng.choice((16, 64, 256) if size == "small" else (64, 256, 1024))
    model = replace(TINY, num_layers=layers, hidden_size=2048, num_heads=16, num_kv_heads=16, ffn_size=5632)
    return Problem(cluster_from_section(Section(data, "x")), model, Workload(global_batch=batch, seq_len=2048))


def _regular(rng: random.Random, num_gpus: int, size: str) -> Iterator[dict[str, Any]]:
    """Equally many machines of each of some types, all of one size on one network."""
    gpus_per_machine = rng.choice((1, 2, 4) if size == "small" else (4, 8))
    types = rng.sample(list(GPUS), rng.randint(1, 2 if size == "small" else 4))
    for k, gpu in enumerate(types):
        count = max(1, num_gpus // (gpus_per_machine * len(types)))
        links = {"intra_bandwidth_gb_per_s": 100, "nic_bandwidth_gb_per_s": 12.5}
        yield {"name": f"m{k}", "gpu": gpu, "num_gpus": gpus_per_machine, "count": count, **links}


def _irregular(rng: random.Random, num_gpus: int) -> Iterator[dict[str, Any]]:
    """Machines of 1 to 8 GPUs, of up to six kinds, on networks of all speeds."""
    left = num_gpus
    for k in range(6):
        if not left:
            return
        gpus_per_machine = rng.choice([n for n in (1, 2, 3, 4, 4, 6, 8, 8) if n <= left])
        count = left // gpus_per_machine if k == 5 else rng.randint(1, left // gpus_per_machine)
        left -= gpus_per_machine * count
        yield {
            "name": f"m{k}",
            "gpu": rng.choice(list(GPUS)),
            "num_gpus": gpus_per_machine,
            "count": count,
            "intra_bandwidth_gb_per_s": rng.choice((12, 50, 300)),
            "nic_bandwidth_gb_per_s": rng.choice((1.25, 3, 12.5, 25)),
        }


def sub_problem(problem: Problem, number: int) -> Problem:
    """The problem with a freedom less or, where the cluster has several kinds of machines, without one of them."""
    names = sorted({machine.spec_name for machine in problem.cluster.machines})
    spaces = [*FREEDOMS, *(Space(exclude=(name,)) for name in names if len(names) > 1)]
    return replace(problem, space=spaces[number % len(spaces)])

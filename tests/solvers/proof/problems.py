"""Random problems of which brute force can look at all plans."""

import random
from dataclasses import replace

from experiments.app.configurations import named_model
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload


def random_problem(seed: int) -> Problem:
    """Up to five GPUs of one or two types, up to six layers; sometimes a network as slow as 1 Gbit/s."""
    rng, known = random.Random(seed), catalogue()
    sizes = rng.choice(((2,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (3, 2), (2, 2, 1), (4, 1), (1, 1, 2)))
    kinds = rng.sample(("h100_80gb_sxm", "a100_40gb_pcie", "l40s", "rtx_4090", "rtx_3080_ti"), 2)
    rate = rng.choice((1, 5, 25, 200)) / 8 * 1e9 if len(sizes) > 1 else float("inf")
    machines = []
    for k, size in enumerate(sizes):
        gpu = known[kinds[min(k, 1)]]
        inside = intra_bandwidth_gb_per_s(gpu) * 1e9 if size > 1 else float("inf")
        machines.append(Machine(f"m{k}", f"m{k}", gpu, size, inside, 3e-6, (), 1, rate, 2e-5))
    model = replace(named_model(rng.choice(("gpt_3b", "llama2_7b"))), num_layers=rng.randint(2, 6))
    workload = Workload(
        global_batch=rng.choice((1, 2, 3, 4, 6, 8)),
        seq_len=rng.choice((512, 1024)),
        schedule=rng.choice(("1f1b", "gpipe")),
        optimizer_sharding=rng.choice(("0", "1")),
    )
    space = Space(max_micro_batch_size=rng.choice((1, 2, 4)), replicas=False)
    return Problem(Cluster("random", tuple(machines), rate, 2e-5), model, workload, space)

"""x"""
import random
from dataclasses import replace

from experiments.app.configurations import named_model
from hexiopt.calibration.gpus import catalogue
from hexiopt.calibration.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

_GPUS = (
    "h100_80gb_sxm",
    "a100_80gb_sxm",
    "a100_40gb_pcie",
    "l40s",
    "rtx_4090",
    "rtx_3090",
    "h100_80gb_pcie",
    "a100_80gb_pcie",
    "rtx_a6000",
    "rtx_3080_ti",
)
_MODELS = ("llama2_7b", "mistral_7b", "gpt_3b", "llama3_8b", "gpt2_345m", "opt_350m")


def random_problem(seed: int, least: int, most: int, size: int = 16) -> Problem:
    rng, known = random.Random(seed), catalogue()
    while True:
        count = 4 if least == 16 else rng.randint(2, 4)
        sizes = [4] * 4 if least == 16 else [rng.choice((1, 2, 2, 3, 4, 4)) for _ in range(count)]
        if least <= sum(sizes) <= most:
            break
    types = rng.sample(_GPUS, min(count, rng.randint(2, 4)))
    gpus = types + [rng.choice(types) for _ in range(count - len(types))]
    rate = rng.choice((5, 10, 25, 100, 200)) / 8 * 1e9
    machines = []
    for k, (name, own) in enumerate(zip(gpus, sizes, strict=True)):
        gpu = known[name]
        inside = intra_bandwidth_gb_per_s(gpu) * 1e9 if own > 1 else float("inf")
        machines.append(Machine(f"m{k}_{name}", f"m{k}", gpu, own, inside, 3e-6, (), 1, rate, 2e-5))
    memory = sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in machines)
    layers = rng.randint(20, 32)
    for name in rng.sample(_MODELS, len(_MODELS)):
        model = replace(named_model(name), num_layers=layers)
        if model.num_params * 16 < 0.9 * memory:
            break
    seq_len = rng.choice((1024, 2048, 4096)) if model.max_positions >= 4096 else model.max_positions
    batch = rng.choice((32, 48, 64, 96, 128))
    workload = Workload(batch, seq_len, schedule="1f1b", optimizer_sharding="1")
    return Problem(Cluster(f"random_{seed}", tuple(machines), rate, 2e-5), model, workload, Space(replicas=False, max_micro_batch_size=size))

"""Workloads that train adapters, or with other optimizers than AdamW, of any problem."""

import random
from dataclasses import replace

from hexiopt.problem.lora import STORAGES, TARGET_GROUPS, Lora
from hexiopt.problem.problem import Problem


def with_adapters(problem: Problem, number: int) -> Problem:
    """The problem with adapters of random rank, targets and storage, under ZeRO-0 or 1."""
    rng, work = random.Random(number), problem.workload
    lora = Lora(
        rank=rng.choice((1, 8, 64)),
        targets=rng.choice((*TARGET_GROUPS, ("v", "down"))),
        storage=rng.choice(tuple(STORAGES)),
        adapter_bytes=rng.choice((2, 4)),
    )
    sharding = work.optimizer_sharding if work.optimizer_sharding in ("auto", "0", "1") else "auto"
    return replace(problem, workload=replace(work, training="lora", lora=lora, optimizer_sharding=sharding))


def with_optimizer(problem: Problem, optimizer: str) -> Problem:
    """The problem with another optimizer; ZeRO and TP only where that allows them."""
    space, sharding = problem.space, problem.workload.optimizer_sharding
    if optimizer in ("adafactor", "muon"):
        sharding, space = "auto", replace(space, max_tp=1)
    workload = replace(problem.workload, optimizer=optimizer, optimizer_sharding=sharding)
    return replace(problem, workload=workload, space=space)

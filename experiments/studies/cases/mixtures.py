"""Mixtures of experts on mixed clusters, and other ways to spread experts."""

import random
from dataclasses import dataclass, replace
from typing import Any

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

MODELS = ("qwen3_30b_a3b", "gpt_oss_20b", "gpt_oss_120b", "deepseek_v3", "nemotron3_nano_30b", "gemma3_27b")
_SEEDS = (0, 1)
_TYPES = ("h100_80gb_sxm", "h100_80gb_pcie", "a100_80gb_sxm", "a100_40gb_pcie", "l40s", "rtx_a6000", "rtx_4090")


def draw_cluster(seed: int) -> dict[str, Any]:
    """A cluster file's content: machines of four types in odd numbers, each type with its network interface."""
    rng, known = random.Random(seed), catalogue()
    machines = []
    for name, gpu in zip("abcd", rng.sample(_TYPES, 4), strict=True):
        num_gpus = rng.choice((2, 4, 8, 8))
        machines.append(
            {
                "name": name,
                "gpu": gpu,
                "num_gpus": num_gpus,
                "intra_bandwidth_gb_per_s": intra_bandwidth_gb_per_s(known[gpu]),
                "count": rng.randint(2, 7) if num_gpus == 8 else rng.randint(3, 11),
                "nic_bandwidth_gb_per_s": rng.choice((3, 6.25, 12.5, 25)),
            }
        )
    return {
        "name": f"drawn_{seed}",
        "inter_machine": {"bandwidth_gb_per_s": 12.5, "latency_us": 20},
        "machines": machines,
    }


@dataclass(frozen=True)
class MixedCluster:
    """A shipped cluster, and the sequences of 4,096 tokens of a step on it."""

    name: str
    batch: int = 256
    exclude: tuple[str, ...] = ()

    def problem(self, model: str) -> Problem:
        """What is planned."""
        space = Space(exclude=self.exclude)
        return Problem(named_cluster(self.name), named_model(model), Workload(self.batch, 4096), space)


CLUSTERS = (
    MixedCluster("hexiscale_setting_2"),
    MixedCluster("campus"),
    MixedCluster("spot_mix"),
    MixedCluster("fleet", 2048, ("v100",)),  # which have no BF16
    *(MixedCluster(f"drawn_{seed}", 512) for seed in _SEEDS),
)


def state_bytes(problem: Problem) -> float:
    """Bytes of one copy of all weights, gradients and optimizer states: no plan holds less."""
    return problem.model.num_params * problem.workload.states.total


def memory_bytes(problem: Problem) -> float:
    """Bytes that a process can use, on all GPUs together."""
    cluster = problem.cluster
    return sum(cluster.gpu_of(device).usable_memory_bytes for device in problem.usable_devices)


def places() -> dict[tuple[str, str], Problem]:
    """The problem of every cluster and model."""
    return {(cluster.name, model): cluster.problem(model) for cluster in CLUSTERS for model in MODELS}


def by_columns(problem: Problem) -> PlanPricer:
    """Prices of a run that cuts each expert by columns on all GPUs of a stage."""
    return PlanPricer(problem, replace(default_framework(), expert_columns=True))


def in_flagscale(problem: Problem) -> Problem:
    """The problem in the space of FlagScale's format."""
    preset = TRAINERS["flagscale"].preset(problem)
    parts: dict[str, dict[str, Any]] = {"space": {}, "workload": {}}
    for key, values in preset.items():
        group, _, name = key.partition(".")
        parts[group][name] = values[0]
    return problem.replace(
        space=problem.space.replace(**parts["space"]), workload=problem.workload.replace(**parts["workload"])
    )

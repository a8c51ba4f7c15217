"""Random mixed problems that may be proved, and HexiScale's case study."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from experiments.app.configurations import named_cluster, named_model
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.own_packages import own_package
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section, read_mapping
from hexiopt.schedules.registry import ONE_F_ONE_B

_GPUS = (
    *("h100_80gb_sxm", "h100_80gb_pcie", "a100_80gb_sxm", "a100_80gb_pcie", "a100_40gb_pcie"),
    *("l40s", "rtx_a6000", "rtx_4090", "rtx_3090", "rtx_3080_ti"),
)
_MODELS = ("llama2_7b", "mistral_7b", "gpt_3b", "llama3_8b", "gpt2_345m", "opt_350m")
_SIZES = (1, 2, 2, 3, 4, 4)  # GPUs of a machine, drawn from these
_GBIT_PER_S = (5, 10, 25, 100, 200)
_STATE_BYTES = 16  # per parameter: weights, gradients and optimiser states, unsharded
_FULL = 0.9  # most of all memory that they fill
_SPACE = Space(replicas=False)
SCHEDULE, ZERO = ONE_F_ONE_B.name, "1"
CASE_WORKLOAD = Workload(64, 4096, schedule=SCHEDULE, optimizer_sharding=ZERO)


@dataclass(frozen=True)
class ProblemSizes:
    """Random problems of `least` to `most` GPUs on `machines` of which each is drawn; `count` of them."""

    least: int
    most: int
    count: int
    machines: tuple[int, int] = (2, 4)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.least} to {self.most}" if self.least < self.most else f"{self.least}"

    def sizes(self, rng: random.Random) -> list[int]:
        """GPUs of each machine."""
        while True:
            sizes = [rng.choice(_SIZES) for _ in range(rng.randint(*self.machines))]
            if self.least <= sum(sizes) <= self.most:
                return sizes


GROUPS = (ProblemSizes(4, 8, 20), ProblemSizes(9, 12, 10), ProblemSizes(16, 16, 10, (4, 4)))


def random_problem(group: ProblemSizes, seed: int) -> Problem:
    """A problem with one to four types of GPU."""
    rng, known = random.Random(seed), catalogue()
    sizes, rate = group.sizes(rng), rng.choice(_GBIT_PER_S) / 8 * 1e9
    types = rng.sample(_GPUS, min(len(sizes), rng.randint(2, 4)))
    machines = []
    for k, size in enumerate(sizes):
        gpu = known[types[k] if k < len(types) else rng.choice(types)]
        inside = intra_bandwidth_gb_per_s(gpu) * 1e9 if size > 1 else float("inf")
        machines.append(Machine(f"m{k}", f"m{k}", gpu, size, inside, 3e-6, (), 1, rate, 2e-5))
    cluster = Cluster(f"random_{group.least}_{seed}", tuple(machines), rate, 2e-5)
    memory_bytes = sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in machines)
    layers = rng.randint(20, 32)
    models = (replace(named_model(name), num_layers=layers) for name in rng.sample(_MODELS, len(_MODELS)))
    model = next(shape for shape in models if shape.num_params * _STATE_BYTES < _FULL * memory_bytes)
    seq_len = min(rng.choice((1024, 2048, 4096)), model.max_positions or 4096)
    batch = rng.choice((32, 48, 64, 96, 128))
    return Problem(cluster, model, Workload(batch, seq_len, schedule=SCHEDULE, optimizer_sharding=ZERO), _SPACE)


def case_study() -> Problem:
    """HexiScale's; batch and length are assumed, as the paper does not state them."""
    return Problem(named_cluster("hexiscale_case_study"), named_model("llama2_13b"), CASE_WORKLOAD, _SPACE)


_LATENCY_US = 20.0
_WORKLOAD = ("global_batch", "seq_len", "precision")


@cache
def small_problems() -> Mapping[str, Problem]:
    """The problems by name."""
    with as_file(files(own_package("experiments")).joinpath("data/small_suite.yaml")) as file:
        rows: list[dict[str, Any]] = read_mapping(file)["problems"]
    return {row["name"]: _problem(row) for row in rows}


def _problem(row: Mapping[str, Any]) -> Problem:
    model = named_model(row["model"])
    return Problem(
        _cluster(row),
        replace(model, num_layers=row.get("layers", model.num_layers)),
        Workload(
            **{key: row[key] for key in _WORKLOAD if key in row}, schedule=ONE_F_ONE_B.name, optimizer_sharding="1"
        ),
        Space(replicas=False),
    )


def _cluster(row: Mapping[str, Any]) -> Cluster:
    known = catalogue()
    machines = []
    for gpu, sizes in row["machines"].items():
        for k, size in enumerate(sizes):
            machine: dict[str, Any] = {"name": f"{gpu}_{k}" if len(sizes) > 1 else gpu, "gpu": gpu, "num_gpus": size}
            if size > 1:
                machine["intra_bandwidth_gb_per_s"] = intra_bandwidth_gb_per_s(known[gpu])
            machines.append(machine)
    network = {"bandwidth_gb_per_s": row["gbit_per_s"] / 8, "latency_us": _LATENCY_US}
    data = {"name": row["name"], "inter_machine": network, "machines": machines}
    return cluster_from_section(Section(data, "small_suite.yaml"))


def tightness(problem: Problem) -> float:
    """Model states of one copy, unsharded, over the usable memory of all devices."""
    states = problem.model.num_params * problem.workload.states.total
    return states / sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in problem.cluster.machines)

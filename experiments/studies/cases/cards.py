"""Cards as their owners have them, and what owners do: device_map, equal batches, the best card alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import largest_shard
from hexiopt.problem.parameters import Parameters
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import LORA, Workload
from hexiopt.schedules.registry import ONE_F_ONE_B

BATCH, SEQ_LEN, RANK = 32, 2048, 16
_BUFFER = 1.25  # of a layer that accelerate adds to an equal part
STORAGES = {"16bit": "16-bit", "nf4": "NF4"}
MODELS = ("qwen3_8b", "qwen3_14b", "qwen3_32b")
MAP, EQUAL, BEST = ("device_map", "equal data parallel", "best card")
COLUMNS = {MAP: "device_map_tokens_per_s", EQUAL: "equal_tokens_per_s", BEST: "card_tokens_per_s"}
Split = Sequence[tuple[int, tuple[int, int]]]  # devices in order, with the layers of each


@dataclass(frozen=True)
class CardFleet:
    """A shipped cluster of a few cards, in words, and the precision that all have."""

    cluster: str
    words: str
    precision: str = "bf16"

    def problem(self, model: str, storage: str) -> Problem:
        """Adapters of a shipped model beside matrices in a storage."""
        adapters = Lora(rank=RANK, storage=storage)
        work = Workload(BATCH, SEQ_LEN, precision=self.precision, training=LORA, lora=adapters)
        return Problem(named_cluster(self.cluster), named_model(model), work)


FLEETS = (
    CardFleet("pc_3090_4090", "3090 + 4090"),
    CardFleet("pc_of_four", "3060 + 2 × 3090 + 5090"),
    CardFleet("lab_v100_a100", "4 × V100 + 2 × A100, 10 GbE", "fp16"),
    CardFleet("home_5090_4060ti", "5090; 2 × 4060 Ti, 1 GbE"),
)


def balanced_layers(problem: Problem, devices: Sequence[int]) -> Split | None:
    """Layers by device as accelerate's balanced map fills devices in order, by bytes of weights; None where the
    model's weights are more than they take."""
    model, cluster = problem.model, problem.cluster
    layer, embedding, head = weight_bytes(problem)
    equal = (embedding + model.num_layers * layer + head) / len(devices) + _BUFFER * layer
    memory = [cluster.gpu_of(device).usable_memory_bytes for device in devices]
    room = [min(equal, room_bytes) for room_bytes in memory[:-1]] + memory[-1:]
    room[0] -= max(layer, head)
    room[0] -= embedding
    split, at = list[tuple[int, tuple[int, int]]](), 0
    for k, device in enumerate(devices):
        end = min(model.num_layers, at + max(0, math.floor(room[k] / layer)))
        if end > at:
            split.append((device, (at, end)))
        at = end
    return split if at == model.num_layers else None


def weight_bytes(problem: Problem) -> tuple[float, float, float]:
    """Bytes of a layer's frozen weights as they are stored, of the embedding and of the LM head."""
    shard = largest_shard(problem.model, 1)
    groups = Parameters(problem.model, problem.workload).frozen_groups
    layer, embedding, head = (
        sum(frozen.bytes_on(shard) for frozen in groups if frozen.group.holder == holder)
        for holder in ("layer", "first", "last")
    )
    return layer, embedding, head


def proportional_layers(problem: Problem, devices: Sequence[int]) -> Split | None:
    """Layers by device in proportion to memory."""
    memory = [problem.cluster.gpu_of(device).usable_memory_bytes for device in devices]
    ends = [round(problem.model.num_layers * part / sum(memory)) for part in np.cumsum(memory)]
    spans = zip(devices, [0, *ends], ends, strict=False)
    return [(device, (first, end)) for device, first, end in spans if end > first]


def owners(problem: Problem, plan: Plan) -> dict[str, float]:
    """Tokens per second of what owners do beside a plan; NaN where it fits no card."""
    prices = Prices(problem)
    return {COLUMNS[MAP]: device_map(prices), COLUMNS[EQUAL]: equal_batches(prices), COLUMNS[BEST]: best_card(prices)}


class Prices:
    """Prices of plans whose global batch is what they process."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pricers: dict[int, PlanPricer] = {}

    def price(self, pipelines: Sequence[Pipeline]) -> Cost | None:
        """The cost under 1F1B without ZeRO; None where the plan does not fit or its problem forbids it."""
        plan = Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(0))
        batch = sum(pipeline.num_micro_batches * pipeline.micro_batch_size for pipeline in pipelines)
        if batch not in self._pricers:
            workload = self.problem.workload.replace(global_batch=batch)
            self._pricers[batch] = PlanPricer(self.problem.replace(workload=workload))
        pricer = self._pricers[batch]
        assert not check(pricer.problem, plan)
        cost = pricer.price(plan)
        return cost if cost.fits else None

    def choices(self) -> Iterator[tuple[int, str]]:
        """Micro-batch sizes, and whether all layers are recomputed or none."""
        problem = self.problem
        for size in problem.space.micro_batch_sizes(problem.workload.global_batch):
            for policy in ("none", "full"):
                yield size, policy

    def whole(self, device: int, size: int, count: int, policy: str) -> Pipeline:
        """The model on one card."""
        return _chain([(device, (0, self.problem.model.num_layers))], size, count, policy)


def _chain(split: Split, size: int, count: int, policy: str) -> Pipeline:
    stages = [Stage(TensorParallel((device,)), (layers,), (policy,)) for device, layers in split]
    return Pipeline(tuple(stages), count, size)


def device_map(prices: Prices) -> float:
    """The best of accelerate's split and one by memory, on the cards of one machine: a step is as many times one
    micro-batch alone as it takes, and an optimizer step."""
    problem, per_s = prices.problem, [math.nan]
    by_host: dict[str, list[int]] = {}
    for device in problem.usable_devices:
        host = problem.cluster.machines[problem.cluster.machine_of[device]].host or ""
        by_host.setdefault(host, []).append(device)
    splits = [
        split
        for devices in by_host.values()
        for order in (devices, devices[::-1])
        for cut in (balanced_layers, proportional_layers)
        if (split := cut(problem, order))
    ]
    for split in splits:
        for size, policy in prices.choices():
            cost = prices.price([_chain(split, size, 1, policy)])
            if cost is not None:
                turns = problem.workload.global_batch // size
                per_s.append(problem.workload.tokens / (turns * cost.pipeline_s + cost.step_time_s - cost.pipeline_s))
    return float(np.nanmax(per_s)) if len(per_s) > 1 else math.nan


def equal_batches(prices: Prices) -> float:
    """Equally many sequences on every card, each of which holds the model."""
    devices, batch = prices.problem.usable_devices, prices.problem.workload.global_batch
    return _most(
        prices,
        lambda size, policy: [prices.whole(d, size, -(-batch // (size * len(devices))), policy) for d in devices],
    )


def best_card(prices: Prices) -> float:
    """The whole batch on one card."""
    batch = prices.problem.workload.global_batch
    per_s = [
        _most(prices, lambda size, policy, d=device: [prices.whole(d, size, batch // size, policy)])  # type: ignore[misc]
        for device in prices.problem.usable_devices
    ]
    return max((rate for rate in per_s if not math.isnan(rate)), default=math.nan)


def _most(prices: Prices, pipelines: Callable[[int, str], Sequence[Pipeline]]) -> float:
    costs = (prices.price(pipelines(*choice)) for choice in prices.choices())
    return max((cost.tokens_per_s for cost in costs if cost is not None), default=math.nan)

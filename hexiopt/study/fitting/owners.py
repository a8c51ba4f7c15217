"""What owners of a few unequal cards do without a planner: device_map, equal batches, the best card alone.

All under 1F1B without ZeRO, with their best micro-batch and all layers or none recomputed, as trainers offer it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import largest_shard
from hexiopt.problem.parameters import Parameters
from hexiopt.problem.problem import Problem

MAP, EQUAL, BEST = OTHERS = ("device_map", "equal data parallel", "best card")
_BUFFER = 1.25  # of a layer that accelerate adds to an equal part
Split = Sequence[tuple[int, tuple[int, int]]]  # devices in order, with the layers of each


def owners_tokens_per_s(problem: Problem, *, compiled: bool = True) -> dict[str, float]:
    """Tokens per second of `OTHERS`; NaN where it does not fit. Prices load no kernel if not `compiled`."""
    prices = Prices(problem, compiled)
    return {MAP: device_map(prices), EQUAL: equal_batches(prices), BEST: best_card(prices)}


def balanced_layers(problem: Problem, devices: Sequence[int]) -> Split | None:
    """Layers by device as accelerate's balanced map fills devices in order, by bytes of weights; None where the
    model's weights are more than they take."""
    model, cluster = problem.model, problem.cluster
    layer, embedding, head = weight_bytes(problem)
    equal = (embedding + model.num_layers * layer + head) / len(devices) + _BUFFER * layer
    memory = [cluster.gpu_of(device).usable_memory_bytes for device in devices]
    free_bytes = [min(equal, limit) for limit in memory[:-1]] + memory[-1:]
    free_bytes[0] -= max(layer, head)
    free_bytes[0] -= embedding
    split, at = list[tuple[int, tuple[int, int]]](), 0
    for k, device in enumerate(devices):
        end = min(model.num_layers, at + max(0, math.floor(free_bytes[k] / layer)))
        if end > at:
            split.append((device, (at, end)))
        at = end
    return split if at == model.num_layers else None


def weight_bytes(problem: Problem) -> tuple[float, float, float]:
    """Bytes of a layer's weights as they are stored, without adapters, of the embedding and of the LM head."""
    model, width = problem.model, problem.workload.element_bytes
    if problem.workload.adapters is None:
        return width * model.layer_params, width * model.embedding_params, width * model.head_params
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
    ends = [round(problem.model.num_layers * part / sum(memory)) for part in accumulate(memory)]
    spans = zip(devices, [0, *ends], ends, strict=False)
    return [(device, (first, end)) for device, first, end in spans if end > first]


class Prices:
    """Prices of plans whose global batch is what they process."""

    def __init__(self, problem: Problem, compiled: bool = True) -> None:
        self.problem, self._compiled = problem, compiled
        self._pricers: dict[int, PlanPricer] = {}

    def price(self, pipelines: Sequence[Pipeline]) -> Cost | None:
        """The cost without ZeRO; None where the plan does not fit or its problem forbids it."""
        plan = Plan(tuple(pipelines), sharding=Sharding(0))
        batch = sum(pipeline.num_micro_batches * pipeline.micro_batch_size for pipeline in pipelines)
        if batch not in self._pricers:
            workload = self.problem.workload.replace(global_batch=batch)
            network = FairShares(self._compiled)
            self._pricers[batch] = PlanPricer(self.problem.replace(workload=workload), network=network)
        pricer = self._pricers[batch]
        if check(pricer.problem, plan) or not _holds(pricer, plan):
            return None
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


def _holds(pricer: PlanPricer, plan: Plan) -> bool:
    """Whether all stages fit, but for communicators, which is known without the times of messages."""
    return all(stage.excess_bytes <= 0.0 for line in pricer.place_pipelines(plan) for stage in line.stages)


def _chain(split: Split, size: int, count: int, policy: str) -> Pipeline:
    stages = [Stage(TensorParallel((device,)), (layers,), (policy,)) for device, layers in split]
    return Pipeline(tuple(stages), count, size)


def device_map(prices: Prices) -> float:
    """The best of accelerate's split and one by memory, on the cards of one machine: a step is as many times one
    micro-batch alone as it takes, and an optimizer step."""
    problem, rates = prices.problem, list[float]()
    by_host: dict[str, list[int]] = {}
    for device in problem.usable_devices:
        by_host.setdefault(problem.cluster.computer_of(device), []).append(device)
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
                rates.append(problem.workload.tokens / (turns * cost.pipeline_s + cost.step_time_s - cost.pipeline_s))
    return max(rates, default=math.nan)


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
    rates = [
        _most(prices, lambda size, policy, d=device: [prices.whole(d, size, batch // size, policy)])  # type: ignore[misc]
        for device in prices.problem.usable_devices
    ]
    return max((rate for rate in rates if not math.isnan(rate)), default=math.nan)


def _most(prices: Prices, pipelines: Callable[[int, str], Sequence[Pipeline]]) -> float:
    costs = (prices.price(pipelines(*choice)) for choice in prices.choices())
    return max((cost.tokens_per_s for cost in costs if cost is not None), default=math.nan)

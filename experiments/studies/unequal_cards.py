"""What does a plan give owners of unequal cards who train low-rank adapters (LoRA) of 8 to 32 billion parameters?

Four fleets: one PC with two cards, one with four, a lab with two machines of two generations, two PCs at home. Beside
our plan stands what their owners do: `device_map`, which puts layers one after another on the cards of a machine and
runs one micro-batch at a time; data parallelism with the same batch on every card, where the slowest decides; and the
best card alone.

python -m experiments.studies unequal_cards          # about 7 minutes on two cores; --quick: seconds
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.search import CPU_LIMITS, SearchSpec
from experiments.studies.frame.settings import OURS
from experiments.studies.frame.study import Report, Scale, Study
from experiments.studies.frame.words import times, tokens
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

_LIMIT_S = 4.0
_BATCH, _SEQ_LEN, _RANK = 32, 2048, 16
_BUFFER = 1.25  # of a layer that accelerate adds to an equal part
STORAGES = {"16bit": "16-bit", "nf4": "NF4"}
MODELS = ("qwen3_8b", "qwen3_14b", "qwen3_32b")
MAP, EQUAL, BEST = OTHERS = ("device_map", "equal data parallel", "best card")
_COLUMNS = {MAP: "device_map_tokens_per_s", EQUAL: "equal_tokens_per_s", BEST: "card_tokens_per_s"}
Split = Sequence[tuple[int, tuple[int, int]]]  # devices in order, with the layers of each
_NOTES = (
    f"LoRA of rank {_RANK} on all matrices, {_BATCH} sequences of {_SEQ_LEN:,} tokens a step. Each column has the "
    "faster of 16-bit and NF4 matrices, × is our tokens per second over theirs. All are priced by our cost model, with "
    "our runtime's kernels; the others with their best micro-batch of 1, 2, 4, 8 or 16 sequences, and all layers or "
    "none recomputed, as trainers offer it. *device_map*: the better of accelerate's balanced split "
    "(huggingface/accelerate, src/accelerate/utils/modeling.py, `get_balanced_memory` and `infer_auto_device_map` at "
    "cdde654: equal parts and 1.25 layers more, the first card without room for its largest module, the last with what "
    "is left) and of layers in proportion to memory, in either order of the cards, of the best machine, since it does "
    "not cross machines; a step is as many times one micro-batch alone as it takes. *equal data parallel*: all cards "
    "hold the model and get equally many sequences, with the least batch "
    f"from {_BATCH} that divides so; gradients are summed once. {CPU_LIMITS}"
)


@dataclass(frozen=True)
class CardFleet:
    """A shipped cluster of a few cards, in words, and the precision that all have."""

    cluster: str
    words: str
    precision: str = "bf16"

    def problem(self, model: str, storage: str) -> Problem:
        """Adapters of a shipped model beside matrices in a storage."""
        adapters = Lora(rank=_RANK, storage=storage)
        work = Workload(_BATCH, _SEQ_LEN, precision=self.precision, training=LORA, lora=adapters)
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
    room = [min(equal, own) for own in memory[:-1]] + memory[-1:]
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
    return {
        _COLUMNS[MAP]: device_map(prices),
        _COLUMNS[EQUAL]: equal_batches(prices),
        _COLUMNS[BEST]: best_card(prices),
    }


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
    problem, found = prices.problem, [math.nan]
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
                found.append(problem.workload.tokens / (turns * cost.pipeline_s + cost.step_time_s - cost.pipeline_s))
    return float(np.nanmax(found)) if len(found) > 1 else math.nan


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
    found = [
        _most(prices, lambda size, policy, d=device: [prices.whole(d, size, batch // size, policy)])  # type: ignore[misc]
        for device in prices.problem.usable_devices
    ]
    return max((own for own in found if not math.isnan(own)), default=math.nan)


def _most(prices: Prices, pipelines: Callable[[int, str], Sequence[Pipeline]]) -> float:
    costs = (prices.price(pipelines(*choice)) for choice in prices.choices())
    return max((cost.tokens_per_s for cost in costs if cost is not None), default=math.nan)


def searches(scale: Scale) -> list[SearchSpec]:
    """Our plan of every fleet and model with both storages; what owners do is priced with it."""
    found = []
    for fleet in FLEETS[: 1 if scale.quick else None]:
        for model in MODELS[: 1 if scale.quick else None]:
            for storage in ("nf4",) if scale.quick else STORAGES:
                labels = {"fleet": fleet.words, "cluster": fleet.cluster, "model": model, "storage": storage}
                own = OURS.search(fleet.problem(model, storage), scale.limit_s(_LIMIT_S), labels)
                found.append(replace(own, judge=owners, cpu_time=True))
    return found


def report(rows: pd.DataFrame, scale: Scale) -> list[Report]:
    """Our tokens per second, and over those of what owners do."""
    rows = rows.reindex(columns=[*rows.columns, *(name for name in _COLUMNS.values() if name not in rows)])
    best = rows.groupby(["fleet", "model"], sort=False)[["tokens_per_s", *_COLUMNS.values()]].max()
    over = pd.DataFrame({name: best["tokens_per_s"] / best[column] for name, column in _COLUMNS.items()})
    storages = rows.pivot(index=["fleet", "model"], columns="storage", values="tokens_per_s").reindex(best.index)
    tables = {}
    for fleet, own in over.groupby(level=0, sort=False):
        ours = best.loc[fleet, "tokens_per_s"]
        theirs = own.loc[fleet].map(times).replace("", "does not fit")
        fastest = [_fastest(storages.loc[(fleet, model)]) for model in ours.index]
        cells = pd.DataFrame({"ours: tokens/s": ours.map(tokens), "matrices": fastest}, index=ours.index)
        tables[str(fleet)] = cells.join(theirs.where(ours.notna(), "")).rename_axis("model")
    return [Report(tables, claims(over, best["tokens_per_s"]), draw(over, scale), _NOTES)]


def _fastest(by_storage: pd.Series) -> str:
    known = by_storage.dropna()
    return STORAGES[str(known.idxmax())] if len(known) else ""


def claims(over: pd.DataFrame, ours: pd.Series) -> list[str]:
    """Ranges of what ours gains, where it is behind, and what does not fit [(fleet, model), what owners do]."""
    said = []
    planned = ours.notna()
    for name in over:
        known = over[name].dropna()
        without = int((planned & over[name].isna()).sum())
        if len(known):
            gain = f"{known.min():.2f} to {known.max():.2f} ×, {known.median():.2f} at the median of {len(known)}"
            said.append(
                f"Over {name}: {gain}." + (f" It does not fit in {without} of {planned.sum()}." if without else "")
            )
        elif planned.any():
            said.append(f"{name} fits nowhere.")
        for (fleet, model), ratio in known[known < 1.0].items():
            said.append(f"Behind {name} by {1 / ratio - 1:.1%}: `{model}` on {fleet}.")
    said += [f"Ours has no plan of `{model}` on {fleet}." for fleet, model in ours.index[~planned]]
    return said


def draw(over: pd.DataFrame, scale: Scale) -> Figure:
    """Bars a fleet and model."""
    figure, (ax,) = framed(
        "Adapters on unequal cards: our plan over what owners do",
        f"Tokens per second by our cost model, ours over theirs; {scale.limit_s(_LIMIT_S):g} s of CPU time a search",
        width=12.5,
    )
    names = [
        "\n".join([model.removeprefix("qwen3_").upper(), *re.split(r" \+ |, |; ", fleet)])
        for fleet, model in over.index
    ]
    relative_bars(ax, over.set_axis(names))
    ax.tick_params(axis="x", labelsize=7)
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set_ylabel("ours over theirs")
    legend(figure, ax, 3)
    return figure


TITLE = "Adapters on unequal cards"
STUDY = Study("unequal_cards", TITLE, __doc__, searches, report, (OURS.solver,))

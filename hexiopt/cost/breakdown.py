"""Where the seconds of a step go: those of the executor that ends last, by what it does and what it waits for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.context import contentions
from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.compute import ComputeTimes
from hexiopt.cost.executors.experts.stage import ExpertParallelStage
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.kinds import Experts
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import JOINED


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Seconds of an executor's forward and backward for one micro-batch, by part; the parts add up to both passes.

    With a sequence layout, compute is that of its busiest device. Collectives that recompute repeats count as recompute
    in a TP group, as all-to-alls with a sequence layout.
    """

    layers_s: float = 0.0  # compute without recompute; with a sequence layout, outside attention
    attention_s: float = 0.0  # only with a sequence layout
    embedding_s: float = 0.0
    head_s: float = 0.0  # final norm, LM head and loss
    recompute_s: float = 0.0
    tensor_parallel_s: float = 0.0  # collectives; 0 where layers are measured, whose times include them
    all_to_all_s: float = 0.0  # of a sequence layout
    sequence_waiting_s: float = 0.0  # for keys and for other devices of a sequence layout
    expert_exchange_s: float = 0.0  # all-to-alls of devices that share experts
    lockstep_s: float = 0.0  # from ZeRO-2 on: gathers, scatters and slower holders
    quantization_s: float = 0.0  # of messages

    @property
    def compute_s(self) -> float:
        """Seconds of all compute but recompute."""
        return self.layers_s + self.attention_s + self.embedding_s + self.head_s

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return float(sum(astuple(self)))


class Breakdown(NamedTuple):
    """The seconds of a step by part, for the executor that ends last in the slowest pipeline; the parts add up to the
    step time."""

    pipeline: int
    stage: int
    executor: int  # of the stage
    parts: Mapping[str, float]


def breakdown(model: PlanPricer, plan: Plan, cost: Cost) -> Breakdown:
    """Where the step time of `plan` goes, whose price by `model` is `cost`.

    Messages count for the seconds by which the executor would end earlier if none took time, and for its seconds of
    quantising them; the bubble is what it still waits then. The optimizer is that of the slowest device; where a ZeRO
    stage shards weights, the rest of the step's end is their all-gather. Raises InputError as `PlanPricer.price`.
    """
    p = max(range(len(plan.pipelines)), key=lambda k: cost.pipelines[k].end_s)
    priced, count = cost.pipelines[p], plan.pipelines[p].num_micro_batches
    number = max(range(len(priced.executor_end_s)), key=priced.executor_end_s.__getitem__)
    s, r = [(s, r) for s, stage in enumerate(priced.stages) for r in range(len(stage.executors))][number]
    busy = busy_time(model, plan, cost, p, s, r)
    placed = model.place_pipelines(plan)[p]
    silent = replace(placed, lanes=PipelineLanes.constant([0.0] * len(placed.messages)))
    silent_s = Clock().times([silent])[0].executor_end_s[number]
    optimizer_s = cost.optimizer_s
    if plan.sharding.gathers_weights:
        copies = (copy for line in cost.pipelines for stage in line.stages for copy in stage.copies)
        optimizer_s = min(optimizer_s, max(copy.optimizer_s for copy in copies))
    parts = {
        "compute": count * busy.compute_s,
        "recompute": count * busy.recompute_s,
        "TP collectives": count * busy.tensor_parallel_s,
        "all-to-alls of experts": count * busy.expert_exchange_s,
        "sequence collectives and waiting": count * (busy.all_to_all_s + busy.sequence_waiting_s),
        "gathers, scatters and slower holders": count * busy.lockstep_s,
        "messages": cost.pipeline_s - silent_s + count * busy.quantization_s,
        "bubble": silent_s - count * busy.total_s,
        "gradient sync": cost.gradient_sync_s,
        "optimizer": optimizer_s,
        "weight all-gather": cost.optimizer_s - optimizer_s,
    }
    return Breakdown(p, s, r, parts)


def busy_time(model: PlanPricer, plan: Plan, cost: Cost, pipeline: int, stage: int, executor: int) -> BusyTime:
    """Seconds of one executor, by its number in its stage, for one micro-batch by part. Raises as `breakdown`."""
    line, part = plan.pipelines[pipeline], plan.pipelines[pipeline].stages[stage]
    stages, size, ends = model.stages, line.micro_batch_size, (stage == 0, stage == len(line.stages) - 1)
    policies = list(chain.from_iterable(part.policies()))
    priced = cost.pipelines[pipeline].stages[stage].executors[executor]
    match part.parallelism:
        case SequenceParallel() as layout:
            times = stages.sequence_stage(layout, size, contentions(plan, stages)[pipeline])
            busy = _of_layout(times, policies, ends)
        case ExpertParallel() as experts:
            layers = _layers(model.problem.model, part, policies)
            whole_s = priced.forward_s + priced.backward_s - 2 * priced.quantization_s
            busy = _of_experts(stages.expert_stage(experts), layers, ends, whole_s)
        case groups:
            devices = groups.executors[executor]
            tp_group = stages.tp_group(devices)
            if isinstance(groups, TensorParallel):
                tp_group = stages.tp_groups.with_degree(tp_group, groups.degree or len(devices))
            layers = _layers(model.problem.model, part, policies)
            busy = _of_group(stages, tp_group, groups.samples(size)[executor], layers, ends)
    busy = replace(busy, quantization_s=2 * priced.quantization_s)
    if plan.sharding.stage < 2:
        return busy
    return replace(busy, lockstep_s=priced.forward_s + priced.backward_s - busy.total_s)


_Layers = Counter[tuple[int, str]]  # the number of layers of each kind and policy


def _layers(model: ModelSpec, stage: Stage, policies: Sequence[str]) -> _Layers:
    kinds = chain.from_iterable(model.depth[first:end] for first, end in stage.layers)
    return Counter(zip(kinds, policies, strict=True))


def _of_group(stages: StageModel, tp_group: TpGroup, size: int, layers: _Layers, ends: tuple[bool, bool]) -> BusyTime:
    free_links = TpGroup(
        tp_group.gpu, tp_group.tp, float("inf"), 0.0, tp_group.degree
    )  # on which collectives take no time
    ends_s = [stages.ends_s(group, size) for group in (free_links, tp_group)]
    computed_s, whole_s = (
        sum(n * sum(stages.layer_s(group, size, policy, kind)) for (kind, policy), n in layers.items())
        for group in (free_links, tp_group)
    )
    plain_s = sum(n * sum(stages.layer_s(free_links, size, "none", kind)) for (kind, _), n in layers.items())
    embedding_s, head_s = _ends_s(ends_s[0], ends)
    experts = [kind.experts for kind in stages.problem.model.kinds]
    exchange_s = sum(  # a full recompute repeats those of a forward
        n * (2 + (policy in ("full", JOINED))) * _exchange_s(stages, part, (tp_group, free_links), size)
        for (kind, policy), n in layers.items()
        if (part := experts[kind]) is not None
    )
    collectives_s = whole_s + sum(_ends_s(ends_s[1], ends)) - computed_s - embedding_s - head_s
    exchange_s = min(exchange_s, collectives_s)  # the host may bind
    return BusyTime(
        layers_s=plain_s,
        embedding_s=embedding_s,
        head_s=head_s,
        recompute_s=computed_s - plain_s,
        tensor_parallel_s=collectives_s - exchange_s,
        expert_exchange_s=exchange_s,
    )


def _exchange_s(stages: StageModel, part: Experts, groups: tuple[TpGroup, TpGroup], size: int) -> float:
    """Seconds of a pass's all-to-alls beyond those over free links."""
    taken_s, free_s = (stages.exchanges_s(part, group, size) for group in groups)
    return taken_s - free_s


def _of_experts(times: ExpertParallelStage, layers: _Layers, ends: tuple[bool, bool], whole_s: float) -> BusyTime:
    plain_s, silent_s = (
        sum(n * sum(times.layer_s(kind, "none", silent)) for (kind, _), n in layers.items()) for silent in (False, True)
    )
    again_s = sum(n * sum(times.layer_s(*layer)) for layer, n in layers.items()) - plain_s
    embedding_s, head_s = _ends_s(times.ends_s(), ends)
    parts_s = silent_s + again_s + embedding_s + head_s
    return BusyTime(silent_s, 0.0, embedding_s, head_s, recompute_s=again_s, expert_exchange_s=whole_s - parts_s)


def _of_layout(times: SequenceStage, policies: Sequence[str], ends: tuple[bool, bool]) -> BusyTime:
    counts = Counter(policies)
    parts_s = {policy: times.parts_s(policy) for policy in {*counts, "none"}}
    device = int(np.argmax(sum(n * sum(parts_s[policy].values()) for policy, n in counts.items())))
    plain_s = {part: len(policies) * float(seconds[device]) for part, seconds in parts_s["none"].items()}
    spent_s = {part: sum(n * float(parts_s[policy][part][device]) for policy, n in counts.items()) for part in plain_s}
    computed_s = spent_s["outside attention"] + spent_s["attention"]
    embedding_s, head_s = _ends_s(times.ends_s, ends)
    whole_s = sum(times.stage_s(policies, *ends)) - 2 * (2 - sum(ends)) * times.quantization_s
    return BusyTime(
        plain_s["outside attention"],
        plain_s["attention"],
        embedding_s,
        head_s,
        recompute_s=computed_s - plain_s["outside attention"] - plain_s["attention"],
        all_to_all_s=spent_s["all-to-all"],
        sequence_waiting_s=whole_s - computed_s - spent_s["all-to-all"] - embedding_s - head_s,
    )


def _ends_s(times: Sequence[ComputeTimes], ends: tuple[bool, bool]) -> list[float]:
    return [present * (end.forward_s + end.backward_s) for end, present in zip(times, ends, strict=True)]

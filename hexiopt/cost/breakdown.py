"""Where the seconds of a step go: those of the executor that ends last, by what it does and what it waits for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.context import contentions
from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.compute import ComputeTimes
from hexiopt.cost.executors.sequence_parallel import SequenceStage
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Seconds of an executor's forwards and backwards, which add up to all of them.

    With a sequence layout, compute is that of its busiest device. Collectives that a recompute repeats count as
    recompute in a TP group, and as all-to-alls with a sequence layout.
    """

    layers_s: float = 0.0  # compute without recompute; with a sequence layout, outside attention
    attention_s: float = 0.0  # only with a sequence layout
    embedding_s: float = 0.0
    head_s: float = 0.0  # final norm, LM head and loss
    recompute_s: float = 0.0
    tensor_parallel_s: float = 0.0  # collectives; 0 where layers are measured, whose times include them
    all_to_all_s: float = 0.0  # of a sequence layout
    sequence_waiting_s: float = 0.0  # for keys and for other devices of a sequence layout
    lockstep_s: float = 0.0  # from ZeRO-2 on: gathers, scatters and slower holders

    @property
    def compute_s(self) -> float:
        """All compute but recompute."""
        return self.layers_s + self.attention_s + self.embedding_s + self.head_s

    @property
    def total_s(self) -> float:
        """All of its parts."""
        return float(sum(astuple(self)))


class Breakdown(NamedTuple):
    """The seconds of a step, of the executor that ends last in the slowest pipeline: parts that add up to the step."""

    pipeline: int
    stage: int
    executor: int  # of the stage
    parts: Mapping[str, float]


def breakdown(model: PlanPricer, plan: Plan, cost: Cost) -> Breakdown:
    """Where the step of `plan` goes, which `model` has priced as `cost`.

    Messages are by how much the executor would end earlier if none took time, the bubble what it then still waits. The
    optimizer is that of the slowest device; what the step's end takes beyond it, where a ZeRO stage shards weights, is
    their all-gather.
    """
    p = max(range(len(plan.pipelines)), key=lambda k: cost.pipelines[k].end_s)
    priced, count = cost.pipelines[p], plan.pipelines[p].num_micro_batches
    number = max(range(len(priced.executor_end_s)), key=priced.executor_end_s.__getitem__)
    s, r = [(s, r) for s, stage in enumerate(priced.stages) for r in range(len(stage.executors))][number]
    busy = busy_time(model, plan, cost, p, s, r)
    graph, silent = model.placed(plan)[p].graph, [0.0] * len(priced.messages)
    silent_s = (Clock().alone(graph, silent).ends_s if graph.split else graph.ends_s(silent))[number]
    optimizer_s = cost.optimizer_s
    if plan.sharding.gathers_weights:
        copies = (copy for one in cost.pipelines for at in one.stages for copy in at.copies)
        optimizer_s = min(optimizer_s, max(copy.optimizer_s for copy in copies))
    parts = {
        "compute": count * busy.compute_s,
        "recompute": count * busy.recompute_s,
        "TP collectives": count * busy.tensor_parallel_s,
        "sequence collectives and waiting": count * (busy.all_to_all_s + busy.sequence_waiting_s),
        "gathers, scatters and slower holders": count * busy.lockstep_s,
        "messages": cost.pipeline_s - silent_s,
        "bubble": silent_s - count * busy.total_s,
        "gradient sync": cost.gradient_sync_s,
        "optimizer": optimizer_s,
        "weight all-gather": cost.optimizer_s - optimizer_s,
    }
    return Breakdown(p, s, r, parts)


def busy_time(model: PlanPricer, plan: Plan, cost: Cost, pipeline: int, stage: int, executor: int) -> BusyTime:
    """What an executor of a stage does for one micro-batch, in seconds."""
    within, given = plan.pipelines[pipeline], plan.pipelines[pipeline].stages[stage]
    stages, size, ends = model.stages, within.micro_batch_size, (stage == 0, stage == len(within.stages) - 1)
    policies = list(chain.from_iterable(given.policies()))
    match given.parallelism:
        case SequenceParallel() as layout:
            times = stages.sequence_stage(layout, size, contentions(plan, stages)[pipeline])
            busy = _of_layout(times, policies, ends)
        case groups:
            tp_group = stages.tp_group(groups.executors[executor])
            busy = _of_group(stages, tp_group, groups.samples(size)[executor], policies, ends)
    if plan.sharding.stage < 2:
        return busy
    priced = cost.pipelines[pipeline].stages[stage].executors[executor]
    return replace(busy, lockstep_s=priced.forward_s + priced.backward_s - busy.total_s)


def _of_group(
    stages: StageModel, tp_group: TpGroup, size: int, policies: Sequence[str], ends: tuple[bool, bool]
) -> BusyTime:
    alone = TpGroup(tp_group.gpu, tp_group.tp, float("inf"), 0.0)  # where collectives take no time on the links
    counts, held = Counter(policies), [stages.ends_s(group, size) for group in (alone, tp_group)]
    computed_s, whole_s = (
        sum(count * sum(stages.layer_s(group, size, policy)) for policy, count in counts.items())
        for group in (alone, tp_group)
    )
    plain_s = len(policies) * sum(stages.layer_s(alone, size, "none"))
    embedding_s, head_s = _ends_s(held[0], ends)
    return BusyTime(
        layers_s=plain_s,
        embedding_s=embedding_s,
        head_s=head_s,
        recompute_s=computed_s - plain_s,
        tensor_parallel_s=whole_s + sum(_ends_s(held[1], ends)) - computed_s - embedding_s - head_s,
    )


def _of_layout(times: SequenceStage, policies: Sequence[str], ends: tuple[bool, bool]) -> BusyTime:
    counts = Counter(policies)
    each = {policy: times.parts_s(policy) for policy in {*counts, "none"}}
    device = int(np.argmax(sum(n * sum(each[policy].values()) for policy, n in counts.items())))
    plain_s = {part: len(policies) * float(seconds[device]) for part, seconds in each["none"].items()}
    spent_s = {part: sum(n * float(each[policy][part][device]) for policy, n in counts.items()) for part in plain_s}
    computed_s = spent_s["outside attention"] + spent_s["attention"]
    embedding_s, head_s = _ends_s(times.ends_s, ends)
    whole_s = sum(times.stage_s(policies, *ends))
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
    return [held * (end.forward_s + end.backward_s) for end, held in zip(times, ends, strict=True)]

"""Where the seconds of a step go: those of the executor that ends last, by what it does and what it waits for."""

from collections import Counter
from dataclasses import astuple, dataclass

import numpy as np

from hexiopt.cost.context import contentions
from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.executors.stage_model import Contention
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan, Stage


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


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The seconds of a step, by the executor that ends last in the slowest pipeline; its parts add up to the step.

    `messages_s` is by how much the executor would end earlier if no message took time; `bubble_s` is what it then
    still waits. `optimizer_s` is that of the slowest device; what the step's end takes beyond it, where a ZeRO stage
    shards weights, is `weight_gather_s`.
    """

    pipeline: int
    stage: int
    executor: int  # of the stage
    compute_s: float
    recompute_s: float
    tensor_parallel_s: float
    sequence_s: float  # all-to-alls, and waiting for keys and other devices
    lockstep_s: float
    messages_s: float
    bubble_s: float
    gradient_sync_s: float
    optimizer_s: float
    weight_gather_s: float

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds) of every part."""
        return (
            ("compute", self.compute_s),
            ("recompute", self.recompute_s),
            ("TP collectives", self.tensor_parallel_s),
            ("sequence collectives and waiting", self.sequence_s),
            ("gathers, scatters and slower holders", self.lockstep_s),
            ("messages", self.messages_s),
            ("bubble", self.bubble_s),
            ("gradient sync", self.gradient_sync_s),
            ("optimizer", self.optimizer_s),
            ("weight all-gather", self.weight_gather_s),
        )


def breakdown(model: PlanPricer, plan: Plan, cost: Cost) -> Breakdown:
    """Where the step of `plan` goes, which `model` has priced as `cost`."""
    p = max(range(len(plan.pipelines)), key=lambda k: cost.pipelines[k].end_s)
    pipeline, priced = plan.pipelines[p], cost.pipelines[p]
    number = max(range(len(priced.executor_end_s)), key=priced.executor_end_s.__getitem__)
    places = [(s, r) for s, stage in enumerate(priced.stages) for r in range(len(stage.executors))]
    (s, r), count = places[number], pipeline.num_micro_batches
    busy = busy_time(model, plan, cost, p, s, r)
    graph = model.placed(plan)[p].graph
    silent_s = graph.ends_s([0.0] * len(priced.messages))[number]
    optimizer_s = cost.optimizer_s
    if plan.sharding.gathers_weights:
        executors = (own for one in cost.pipelines for at in one.stages for own in at.executors)
        optimizer_s = min(optimizer_s, max(copy.optimizer_s for own in executors for copy in own.copies))
    return Breakdown(
        *(p, s, r),
        compute_s=count * busy.compute_s,
        recompute_s=count * busy.recompute_s,
        tensor_parallel_s=count * busy.tensor_parallel_s,
        sequence_s=count * (busy.all_to_all_s + busy.sequence_waiting_s),
        lockstep_s=count * busy.lockstep_s,
        messages_s=cost.pipeline_s - silent_s,
        bubble_s=silent_s - count * busy.total_s,
        gradient_sync_s=cost.gradient_sync_s,
        optimizer_s=optimizer_s,
        weight_gather_s=cost.optimizer_s - optimizer_s,
    )


def busy_time(model: PlanPricer, plan: Plan, cost: Cost, pipeline: int, stage: int, executor: int) -> BusyTime:
    """What an executor of a stage does for one micro-batch, in seconds."""
    within, given = plan.pipelines[pipeline], plan.pipelines[pipeline].stages[stage]
    first, last = stage == 0, stage == len(within.stages) - 1
    priced = cost.pipelines[pipeline].stages[stage].executors[executor]
    if isinstance(given.parallelism, SequenceParallel):
        contention = contentions(plan, model.stages)[pipeline]
        size = within.micro_batch_size
        return _sequence_busy(model, plan, given, given.parallelism, size, contention, first, last, priced)
    tp_group, size = (
        model.stages.tp_group(given.parallelism.executors[executor]),
        given.parallelism.samples(within.micro_batch_size)[executor],
    )
    alone = TpGroup(tp_group.gpu, tp_group.tp, float("inf"), 0.0)  # where collectives take no time on the links
    policies = Counter(policy for policies in given.policies() for policy in policies)
    plain_s = policies.total() * sum(model.stages.layer_s(alone, size, "none"))
    computed_s = sum(n * sum(model.stages.layer_s(alone, size, policy)) for policy, n in policies.items())
    whole_s = sum(n * sum(model.stages.layer_s(tp_group, size, policy)) for policy, n in policies.items())
    held = first, last
    ends_s = [
        [own * (end.forward_s + end.backward_s) for end, own in zip(model.stages.ends_s(at, size), held, strict=True)]
        for at in (alone, tp_group)
    ]
    own_s = whole_s + sum(ends_s[1])
    return BusyTime(
        layers_s=plain_s,
        embedding_s=ends_s[0][0],
        head_s=ends_s[0][1],
        recompute_s=computed_s - plain_s,
        tensor_parallel_s=own_s - computed_s - sum(ends_s[0]),
        lockstep_s=_lockstep_s(plan, priced, own_s),
    )


def _sequence_busy(
    model: PlanPricer,
    plan: Plan,
    stage: Stage,
    layout: SequenceParallel,
    size: int,
    contention: Contention,
    first: bool,
    last: bool,
    priced: ExecutorCost,
) -> BusyTime:
    times = model.stages.sequence_stage(layout, size, contention)
    (policies,) = stage.policies()
    counts = Counter(policies)
    each = {policy: times.parts_s(policy) for policy in {*counts, "none"}}
    device = int(np.argmax(sum(n * sum(each[policy].values()) for policy, n in counts.items())))

    def spent_s(part: str, policy: str) -> float:
        return float(each[policy][part][device])

    layers_s, attention_s = (len(policies) * spent_s(part, "none") for part in ("outside attention", "attention"))
    computed_s = sum(
        n * (spent_s("outside attention", policy) + spent_s("attention", policy)) for policy, n in counts.items()
    )
    all_to_all_s = sum(n * spent_s("all-to-all", policy) for policy, n in counts.items())
    embedding_s, head_s = (
        held * (end.forward_s + end.backward_s) for end, held in zip(times.ends_s, (first, last), strict=True)
    )
    own_s = sum(times.stage_s(policies, first, last))
    return BusyTime(
        layers_s,
        attention_s,
        embedding_s,
        head_s,
        recompute_s=computed_s - layers_s - attention_s,
        all_to_all_s=all_to_all_s,
        sequence_waiting_s=own_s - computed_s - all_to_all_s - embedding_s - head_s,
        lockstep_s=_lockstep_s(plan, priced, own_s),
    )


def _lockstep_s(plan: Plan, priced: ExecutorCost, own_s: float) -> float:
    """What an executor that takes `own_s` by itself waits in lockstep."""
    return priced.forward_s + priced.backward_s - own_s if plan.sharding.stage >= 2 else 0.0

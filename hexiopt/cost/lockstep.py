"""Stages in lockstep: what forwards and backwards take where states are sharded by ZeRO-2 or ZeRO-3.

ZeRO-1 scatters gradients in every sharding group, steps on the shards, and gathers weights once a step. ZeRO-2 scatters
each layer's gradient in every micro-batch, ZeRO-3 also gathers each layer's weights for its forward and again for its
backward (Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277), so that the holders of a stage work in
lockstep: every layer takes as long as on the slowest of them.

A stage runs *units* one after another: embedding, layers, LM head. A unit's communication runs beside another's
compute: weights are gathered while the unit before runs, gradients are scattered while the next one runs. Only the
first gather and the last scatter have nothing to hide behind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.stage_model import Contention, StageModel, TpGroup
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.rings import GradientRings, RingTimes
from hexiopt.plan.holders import Floats, sharding_groups
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan

Times = tuple[float, float]  # forward and backward seconds for one micro-batch


def forward_s(compute_s: Sequence[float], gather_s: Sequence[float]) -> float:
    """A forward whose units are gathered one ahead: g + (n−1)·max(c, g) + c where all are equal."""
    hidden = sum(max(c, g) for c, g in zip(compute_s, gather_s[1:], strict=False))
    return gather_s[0] + hidden + compute_s[-1]


def backward_s(compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """A backward, units in the forward's order: g + (n−1)·max(c, g + r) + c + r where all are equal.

    Beside a unit's compute run its own scatter, begun as its gradients come, and the gather of the unit before.
    """
    order = list(zip(compute_s, gather_s, scatter_s, strict=True))[::-1]
    hidden = sum(max(c, g + r) for (c, _, r), (_, g, _) in pairwise(order))
    return order[0][1] + hidden + order[-1][0] + order[-1][2]


def scattered_backward_s(compute_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """A backward without gathers: c + (n−1)·max(c, r) + r where all are equal."""
    compute, scatter = list(compute_s)[::-1], list(scatter_s)[::-1]
    return compute[0] + sum(max(c, r) for c, r in zip(compute[1:], scatter, strict=False)) + scatter[-1]


@dataclass(frozen=True, slots=True)
class _Executor:
    """A replica, or a sequence layout with the `contention` of its pipeline, in lockstep with others of its stage."""

    at: tuple[int, int]  # pipeline, replica
    devices: tuple[int, ...]
    samples: int
    policies: tuple[str, ...]
    layout: SequenceParallel | None = None
    contention: Contention = ()

    @property
    def width(self) -> int:
        """Into how many parts its devices cut a layer: those of a layout hold all of it each."""
        return len(self.devices) if self.layout is None else 1


def in_lockstep(
    plan: Plan,
    placed: Sequence[PlacedPipeline],
    contentions: Sequence[Contention],
    rings: GradientRings,
    stages: StageModel,
) -> list[PlacedPipeline]:
    """`placed` with the times of executors that gather and scatter layer by layer with each other, from ZeRO-2 on.

    `contentions` of each pipeline, see `StageModel.contended_stage`.
    """
    groups = sharding_groups(plan, stages.problem.cluster)
    assert groups is not None, "from ZeRO-2 on every stage has sharding groups of its own"
    seconds = lockstep_s(plan, stages, rings.within_group, groups, contentions)
    return [
        pipeline.with_stages(
            tuple(
                StageCost(tuple(one.taking(*own) for one, own in zip(stage.executors, times, strict=True)))
                for stage, times in zip(pipeline.stages, each, strict=True)
            )
        )
        for pipeline, each in zip(placed, seconds, strict=True)
    ]


def lockstep_s(
    plan: Plan, times: StageModel, within: RingTimes, groups: Sequence[int], contentions: Sequence[Contention]
) -> list[list[list[Times]]]:
    """Forward and backward seconds of every replica or layout, by pipeline and stage, of a plan from ZeRO-2 on.

    `within` are the rings inside the sharding `groups`; `contentions` are, of each pipeline, the network resources
    that several sequence stages use.
    """
    s_per_byte, latency_s = _unit_rates(within, times.problem.cluster.num_devices)
    found: list[list[list[Times]]] = [
        [[(0.0, 0.0)] * len(stage.executors) for stage in pipeline.stages] for pipeline in plan.pipelines
    ]
    for s in range(len(plan.pipelines[0].stages)):
        for together in _classes(list(_executors(plan, s, contentions)), groups):
            devices = np.array([device for one in together for device in one.devices])
            rate, wait = float(s_per_byte[devices].max()), float(latency_s[devices].max())
            seconds = _stage_s(plan, times, s, together, rate, wait)
            for one in together:
                found[one.at[0]][s][one.at[1]] = seconds
    return found


def _unit_rates(within: RingTimes, num_devices: int) -> tuple[Floats, Floats]:
    """Per device, seconds of one pass for a byte of one parameter, all stages' rings at once, and latency a unit."""
    s_per_byte, latency_s = np.zeros(num_devices), np.zeros(num_devices)
    whole, waits = within.ring_pass_s(1.0), within.ring_pass_s(0.0)
    for rows, params, seconds, wait in zip(within.groups.holders, within.groups.params, whole, waits, strict=True):
        s_per_byte[rows] = ((seconds - wait) / params)[:, None]
        latency_s[rows] = wait[:, None]
    return s_per_byte, latency_s


def _executors(plan: Plan, s: int, contentions: Sequence[Contention]) -> Iterator[_Executor]:
    for p, pipeline in enumerate(plan.pipelines):
        stage = pipeline.stages[s]
        (policies,) = stage.policies()
        contention = contentions[p] if stage.sequence else ()
        for r, (devices, samples) in enumerate(
            zip(stage.executors, stage.samples(pipeline.micro_batch_size), strict=True)
        ):
            yield _Executor((p, r), devices, samples, policies, stage.sequence, contention)


def _classes(executors: list[_Executor], groups: Sequence[int]) -> list[list[_Executor]]:
    """Executors that wait for each other: whose devices share a sharding group, directly or through others."""
    found: list[tuple[set[int], list[_Executor]]] = []
    for executor in executors:
        own, together = {groups[d] for d in executor.devices}, [executor]
        apart = []
        for other, members in found:
            if own & other:
                own, together = own | other, members + together
            else:
                apart.append((other, members))
        found = [*apart, (own, together)]
    return [members for _, members in found]


def _stage_s(plan: Plan, times: StageModel, s: int, together: list[_Executor], rate: float, wait: float) -> Times:
    """Forward and backward seconds of replicas and layouts of stage `s` that work in lockstep.

    `rate`: seconds that a pass takes for a byte of one parameter; `wait`: the latency of a pass.
    """
    model, workload = times.problem.model, times.problem.workload
    first, last = s == 0, s == len(plan.pipelines[0].stages) - 1
    alike = {
        (times.tp_group(one.devices) if one.layout is None else one.layout, one.samples, one.policies, one.contention)
        for one in together
    }
    each = [list(_units(times, *kind, first, last)) for kind in alike]
    forwards = [max(unit[0] for unit in same) for same in zip(*each, strict=True)]
    backwards = [max(unit[1] for unit in same) for same in zip(*each, strict=True)]
    num_layers = len(together[0].policies)
    # A tied matrix is gathered for both its uses.
    head_params = model.head_params + (model.vocabulary_params if model.tied_embeddings else 0)
    params = [model.embedding_params] * first + [model.layer_params] * num_layers + [head_params] * last
    s_per_byte = rate / together[0].width
    gather = [n * s_per_byte * workload.element_bytes + wait for n in params]
    scatter = [n * s_per_byte * workload.stored_gradient_bytes + wait for n in params]
    slowed = times.framework.contention
    if plan.sharding.stage == 2:
        backwards = [seconds + slowed * r for seconds, r in zip(backwards, scatter, strict=True)]
        return sum(forwards), scattered_backward_s(backwards, scatter)
    forwards = [seconds + slowed * g for seconds, g in zip(forwards, gather, strict=True)]
    backwards = [seconds + slowed * (g + r) for seconds, g, r in zip(backwards, gather, scatter, strict=True)]
    return forward_s(forwards, gather), backward_s(backwards, gather, scatter)


def _units(
    times: StageModel,
    where: TpGroup | SequenceParallel,
    samples: int,
    policies: tuple[str, ...],
    contention: Contention,
    first: bool,
    last: bool,
) -> Iterator[Times]:
    """What the units of a stage take at a site or with a layout, apart from sharding."""
    if isinstance(where, TpGroup):
        embedding, head = times.ends_s(where, samples)
        layer_s: Callable[[str], Times] = partial(times.layer_s, where, samples)
    else:
        stage = times.contended_stage(where, samples, contention)
        (embedding, head), layer_s = stage.ends_s, stage.layer_s
    if first:
        yield embedding.forward_s, embedding.backward_s
    for policy in policies:
        yield layer_s(policy)
    if last:
        yield head.forward_s, head.backward_s

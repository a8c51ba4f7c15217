"""Stages in lockstep: what forwards and backwards take where states are sharded by ZeRO-2 or ZeRO-3.

ZeRO-1 scatters gradients in every sharding group, steps on the shards, and gathers weights once a step. ZeRO-2 scatters
each layer's gradient in every micro-batch, ZeRO-3 also gathers each layer's weights for its forward and again for its
backward (Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277), so that the holders of a stage work in
lockstep: every layer takes as long as on the slowest of them.

A stage runs *units* one after another: embedding, layers, LM head. A unit's communication runs beside another's
compute: weights are gathered while the unit before runs, gradients are scattered while the next one runs. Only the
first gather and the last scatter have nothing to hide behind. (Our executor hides the last scatter where the rank goes
on to compute without waiting for a message; norms and biases, which it sums once a step, are priced as if they
travelled with their unit, which is more.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.executor import Unit
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.rings import GradientRings, RingTimes
from hexiopt.numbers.frameworks import Framework
from hexiopt.plan.holdings import Floats
from hexiopt.plan.plan import Plan
from hexiopt.problem.workload import Workload

Times = tuple[float, float]  # forward and backward seconds for one micro-batch


def forward_s(compute_s: Sequence[float], gather_s: Sequence[float]) -> float:
    """A forward whose units are gathered one ahead: g + (n−1)·max(c, g) + c where all are equal."""
    hidden = sum(max(c, g) for c, g in zip(compute_s, gather_s[1:], strict=False))
    return gather_s[0] + hidden + compute_s[-1]


def backward_s(compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """A backward, units in the forward's order. Where n are equal, it takes
    g + max(c, g) + (n−2)·max(c, g + r) + max(c, r) + r.

    Beside a unit's compute run the scatter of the unit that ran before it and the gather of the one that runs next, as
    in FSDP2 of PyTorch and in `runtime/mapping/lowering.py`.
    """
    order = list(zip(compute_s, gather_s, scatter_s, strict=True))[::-1]
    scattered = [0.0, *(r for _, _, r in order[:-1])]
    gathered = [*(g for _, g, _ in order[1:]), 0.0]
    hidden = sum(max(c, r + g) for (c, _, _), r, g in zip(order, scattered, gathered, strict=True))
    return order[0][1] + hidden + order[-1][2]


def scattered_backward_s(compute_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """A backward without gathers: c + (n−1)·max(c, r) + r where all are equal."""
    return backward_s(compute_s, [0.0] * len(compute_s), scatter_s)


@dataclass(frozen=True, slots=True)
class _Member:
    """An executor of a stage: its pipeline, its number there, its devices, and what it runs, unit by unit."""

    pipeline: int
    number: int
    devices: tuple[int, ...]
    units: tuple[Unit, ...]


def in_lockstep(
    plan: Plan, placed: Sequence[PlacedPipeline], rings: GradientRings, workload: Workload, framework: Framework
) -> list[PlacedPipeline]:
    """`placed` with the times of executors that gather and scatter layer by layer with each other, from ZeRO-2 on."""
    groups = rings.sharding_group
    assert groups is not None, "from ZeRO-2 on every stage has sharding groups of its own"
    s_per_byte, latency_s = _unit_rates(rings.within_group, len(groups))
    stages = [list(pipeline.stages) for pipeline in placed]
    for s in range(len(stages[0])):
        members = [
            _Member(p, r, devices, executor.units)
            for p, (pipeline, own) in enumerate(zip(plan.pipelines, stages, strict=True))
            for r, (devices, executor) in enumerate(
                zip(pipeline.stages[s].parallelism.executors, own[s].executors, strict=True)
            )
        ]
        times: dict[tuple[int, int], Times] = {}
        for together in _classes(members, groups):
            devices = np.array([device for one in together for device in one.devices])
            rate, wait = float(s_per_byte[devices].max()), float(latency_s[devices].max())
            seconds = _stage_s(plan.sharding.stage, together, rate, wait, workload, framework)
            times |= {(one.pipeline, one.number): seconds for one in together}
        for p, own in enumerate(stages):
            own[s] = StageCost(tuple([one.with_times(*times[p, r]) for r, one in enumerate(own[s].executors)]))
    return [pipeline.with_stages(tuple(own)) for pipeline, own in zip(placed, stages, strict=True)]


def _unit_rates(within: RingTimes, num_devices: int) -> tuple[Floats, Floats]:
    """Per device, seconds of one pass for a byte of one parameter, all stages' rings at once, and latency a unit."""
    s_per_byte, latency_s = np.zeros(num_devices), np.zeros(num_devices)
    whole, waits = within.ring_pass_s(1.0), within.ring_pass_s(0.0)
    for rows, params, seconds, wait in zip(within.groups.holders, within.groups.params, whole, waits, strict=True):
        s_per_byte[rows] = ((seconds - wait) / params)[:, None]
        latency_s[rows] = wait[:, None]
    return s_per_byte, latency_s


def _classes(members: list[_Member], groups: Sequence[int]) -> list[list[_Member]]:
    """Executors that wait for each other: whose devices share a sharding group, directly or through others."""
    found: list[tuple[set[int], list[_Member]]] = []
    for member in members:
        own, together = {groups[d] for d in member.devices}, [member]
        apart = []
        for other, others in found:
            if own & other:
                own, together = own | other, others + together
            else:
                apart.append((other, others))
        found = [*apart, (own, together)]
    return [together for _, together in found]


def _stage_s(
    zero_stage: int, together: Sequence[_Member], rate: float, wait: float, workload: Workload, framework: Framework
) -> Times:
    """Forward and backward seconds of executors of a stage that work in lockstep.

    `rate`: seconds that a pass takes for a byte of one parameter; `wait`: the latency of a pass.
    """
    kinds = {id(one.units): one.units for one in together}.values()  # equal executors share theirs
    each = [[unit for unit in units for _ in range(unit.repeats)] for units in kinds]
    forwards = [max(unit.forward_s for unit in same) for same in zip(*each, strict=True)]
    backwards = [max(unit.backward_s for unit in same) for same in zip(*each, strict=True)]
    gather = [rate * unit.params * workload.element_bytes + wait for unit in each[0]]
    scatter = [rate * unit.params * workload.states.gradient + wait for unit in each[0]]
    slowed = framework.contention
    if zero_stage == 2:
        backwards = [seconds + slowed * r for seconds, r in zip(backwards, scatter, strict=True)]
        return sum(forwards), scattered_backward_s(backwards, scatter)
    forwards = [seconds + slowed * g for seconds, g in zip(forwards, gather, strict=True)]
    backwards = [seconds + slowed * (g + r) for seconds, g, r in zip(backwards, gather, scatter, strict=True)]
    return forward_s(forwards, gather), backward_s(backwards, gather, scatter)

"""Stages in lockstep: seconds of forwards and backwards where states are sharded by ZeRO-2 or ZeRO-3.

ZeRO-1 scatters gradients in every sharding group, steps on the shards, and gathers weights once a step. ZeRO-2 scatters
each layer's gradient in every micro-batch, ZeRO-3 also gathers each layer's weights for its forward and again for its
backward (Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277), so that the holders of a stage work in
lockstep: every layer takes as long as on the slowest of them.

A stage runs *units* one after another: embedding, layers, LM head. The communication of a unit overlaps the compute of
its neighbours: weights are gathered while the unit before runs, gradients are scattered while the next one runs. Only
the first gather and the last scatter are exposed. (Our executor hides the last scatter where the rank computes on
without waiting for a message; norms and biases, which it sums once a step, are priced as if they travelled with their
unit, which is more.)
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
    """Seconds of a forward whose units are gathered one ahead: g + (n−1)·max(c, g) + c for n equal units.

    `compute_s` and `gather_s` [units] are in the forward's order.
    """
    hidden = sum(max(c, g) for c, g in zip(compute_s, gather_s[1:], strict=False))
    return gather_s[0] + hidden + compute_s[-1]


def backward_s(compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """Seconds of a backward: g + max(c, g) + (n−2)·max(c, g + r) + max(c, r) + r for n equal units.

    Arguments [units] are in the forward's order. The compute of a unit overlaps the scatter of the unit that ran before
    it and the gather of the one that runs next, as in FSDP2 of PyTorch and in `runtime/mapping/lowering.py`.
    """
    order = list(zip(compute_s, gather_s, scatter_s, strict=True))[::-1]
    scattered = [0.0, *(r for _, _, r in order[:-1])]
    gathered = [*(g for _, g, _ in order[1:]), 0.0]
    hidden = sum(max(c, r + g) for (c, _, _), r, g in zip(order, scattered, gathered, strict=True))
    return order[0][1] + hidden + order[-1][2]


def scatter_backward_s(compute_s: Sequence[float], scatter_s: Sequence[float]) -> float:
    """Seconds of a `backward_s` without gathers: c + (n−1)·max(c, r) + r for n equal units."""
    return backward_s(compute_s, [0.0] * len(compute_s), scatter_s)


@dataclass(frozen=True, slots=True)
class _Member:
    """An executor of a stage: its pipeline, its number in the stage, its devices, and its units."""

    pipeline: int
    number: int
    devices: tuple[int, ...]
    units: tuple[Unit, ...]


def apply_lockstep(
    plan: Plan, placed: Sequence[PlacedPipeline], rings: GradientRings, workload: Workload, framework: Framework
) -> list[PlacedPipeline]:
    """`placed` pipelines of `plan`, from ZeRO-2 on, with the times of executors that gather and scatter by layer."""
    groups = rings.sharding_group
    assert groups is not None, "from ZeRO-2 on every stage has a sharding group"
    s_per_byte, latency_s = _unit_rates(rings.within_group, len(groups))
    stages = [list(pipeline.stages) for pipeline in placed]
    for s in range(len(stages[0])):
        members = [
            _Member(p, r, devices, executor.units)
            for p, (pipeline, costs) in enumerate(zip(plan.pipelines, stages, strict=True))
            for r, (devices, executor) in enumerate(
                zip(pipeline.stages[s].parallelism.executors, costs[s].executors, strict=True)
            )
        ]
        times: dict[tuple[int, int], Times] = {}
        for together in _classes(members, groups):
            devices = np.array([device for member in together for device in member.devices])
            rate, wait = float(s_per_byte[devices].max()), float(latency_s[devices].max())
            seconds = _stage_s(plan.sharding.stage, together, rate, wait, workload, framework)
            times |= {(member.pipeline, member.number): seconds for member in together}
        for p, costs in enumerate(stages):
            executors = enumerate(costs[s].executors)
            costs[s] = StageCost(tuple([executor.with_times(*times[p, r]) for r, executor in executors]))
    return [pipeline.with_stages(tuple(costs)) for pipeline, costs in zip(placed, stages, strict=True)]


def _unit_rates(within: RingTimes, num_devices: int) -> tuple[Floats, Floats]:
    """Seconds of a ring pass for a byte of a parameter, all stages' rings at once, and latency of a pass [devices]; of
    a device in several rings the mean over its parameters, and the longest latency."""
    passed_s, held, latency_s = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    whole, waits = within.ring_pass_s(1.0), within.ring_pass_s(0.0)
    for rows, params, seconds, wait in zip(within.groups.holders, within.groups.params, whole, waits, strict=True):
        np.add.at(passed_s, rows, (seconds - wait)[:, None])
        np.add.at(held, rows, params[:, None])
        np.maximum.at(latency_s, rows, wait[:, None])
    return passed_s / np.maximum(held, 1.0), latency_s


def _classes(members: list[_Member], groups: Sequence[int]) -> list[list[_Member]]:
    """Executors that wait for each other: whose devices share a sharding group, directly or through others."""
    classes: list[tuple[set[int], list[_Member]]] = []
    for member in members:
        joined, together = {groups[d] for d in member.devices}, [member]
        apart = []
        for other, others in classes:
            if joined & other:
                joined, together = joined | other, others + together
            else:
                apart.append((other, others))
        classes = [*apart, (joined, together)]
    return [together for _, together in classes]


def _stage_s(
    zero_stage: int, together: Sequence[_Member], rate: float, wait: float, workload: Workload, framework: Framework
) -> Times:
    """Forward and backward seconds of executors of a stage that work in lockstep, for one micro-batch.

    `rate`: seconds of a ring pass for a byte of each parameter; `wait`: latency of a pass in seconds.
    """
    kinds = {id(member.units): member.units for member in together}.values()  # equal executors share theirs
    rows = [[unit for unit in units for _ in range(unit.repeats)] for units in kinds]
    forwards = [max(unit.forward_s for unit in same) for same in zip(*rows, strict=True)]
    backwards = [max(unit.backward_s for unit in same) for same in zip(*rows, strict=True)]
    gather = [rate * unit.params * workload.states.weight + wait for unit in rows[0]]
    scatter = [rate * unit.params * workload.states.gradient + wait for unit in rows[0]]
    slowdown = framework.contention
    if zero_stage == 2:
        backwards = [seconds + slowdown * r for seconds, r in zip(backwards, scatter, strict=True)]
        return sum(forwards), scatter_backward_s(backwards, scatter)
    forwards = [seconds + slowdown * g for seconds, g in zip(forwards, gather, strict=True)]
    backwards = [seconds + slowdown * (g + r) for seconds, g, r in zip(backwards, gather, scatter, strict=True)]
    return forward_s(forwards, gather), backward_s(backwards, gather, scatter)

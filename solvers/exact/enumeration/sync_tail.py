"""What follows at least after the end of each replica's pipeline: gradient sync and the optimiser's step.

A step's time is the largest of sums of a replica's end and what follows it, as all that follows waits for all that
comes before: the rings of `CostModel.price`, gone through backwards.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.gradient_sync import SyncTimes
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Plan

Floats = NDArray[np.float64]


def tails_s(model: CostModel, plan: Plan, holders: int) -> list[list[float]]:
    """Seconds by pipeline and replica, stage by stage; `holders`: the most over which an optimiser is sharded."""
    problem, workload, zero = model.problem, model.problem.workload, plan.sharding.stage
    sizes: list[int] = []
    optimizer_s: list[float] = []
    executor_of = [0] * problem.cluster.num_devices
    for pipeline in plan.pipelines:
        before = len(optimizer_s)
        for s, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                for device in replica.devices:
                    executor_of[device] = len(optimizer_s)
                site = model.site(replica.devices)
                params = model.memory_model(site, 1).num_params(stage.num_layers, s == 0, s == len(pipeline.stages) - 1)
                optimizer_s.append(optimizer_compute_s(workload, site.gpu, params / holders))
        sizes.append(len(optimizer_s) - before)
    around, tails = model.rings(plan), [0.0] * len(optimizer_s)
    if zero in (1, 2):
        tails = _before_rings(around.within, executor_of, tails, workload.element_bytes, 1)
    tails = [tail + own for tail, own in zip(tails, optimizer_s, strict=True)]
    tails = _before_rings(around.between, executor_of, tails, workload.stored_gradient_bytes, 2)
    tails = _before_rings(around.within, executor_of, tails, workload.stored_gradient_bytes, (2, 1, 0, 0)[zero])
    ends = np.cumsum(sizes).tolist()
    return [tails[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _before_rings(
    sync: SyncTimes, executor_of: Sequence[int], tails: list[float], num_bytes: float, passes: int
) -> list[float]:
    """What follows each replica before rings of `passes`, from what follows it after them."""
    longer = tails.copy()
    if passes and sync.groups.count:
        for holders, seconds in zip(sync.groups.holders, sync.pass_s(num_bytes), strict=True):
            for ring, pass_s in zip(holders.tolist(), seconds.tolist(), strict=True):
                members = [executor_of[device] for device in ring]
                tail = passes * pass_s + max(tails[k] for k in members)
                for k in members:
                    longer[k] = max(longer[k], tail)
    return longer

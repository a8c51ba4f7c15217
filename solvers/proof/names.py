"""Names: which of a machine's equal devices is which in a plan.

Only gradient rings depend on it. They pass devices in the order of their numbers, so that the last holder on a machine
sends through its interface, and those before it through their own ports. With states sharded within machines, names say
which holders of two machines share a part of a shard, and so wait for each other.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.rings import gradient_rings
from hexiopt.cost.step import step_cost
from hexiopt.plan.holdings import Holdings, parameter_holders, sharding_groups
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.solving.naming import renumber


class Names:
    """The plans that differ from a plan only in names, for 1F1B and GPipe with ZeRO-0 and ZeRO-1."""

    def __init__(self, pricer: PlanPricer) -> None:
        self._pricer, self._cluster = pricer, pricer.problem.cluster
        self._fast = _with_fast_ports(self._cluster)

    def least_s(self, plan: Plan, cost: Cost) -> float:
        """A lower bound on the step time under any names, of a plan of `cost`."""
        if not self._matter_on(plan):
            return cost.step_time_s
        problem, zero_stage = self._pricer.problem, plan.sharding.stage
        if plan.sharding.groups == "all":  # only ports know names: those of rings between machines
            groups, exchange = sharding_groups(plan, self._cluster), problem.workload.sums_quantized
            trained = problem.parameters.trained_groups
            rings = gradient_rings(plan, groups, trained, self._fast, exchange=exchange)
            return step_cost(zero_stage, cost.pipelines, rings, problem, self._pricer.framework).step_time_s
        # Whatever the names, the last holder of a layer to be ready delays one on each of its machines, by rings that
        # load the same interfaces. Other holders may be delayed than now: their optimisers and gathering may be
        # shorter, and they may start fewer rings.
        rings = self._pricer.rings(plan)
        optimizer_s = [copy.optimizer_s for own in cost.pipelines for stage in own.stages for copy in stage.copies]
        gather_s = rings.within_group.ring_pass_s(problem.workload.states.weight) if zero_stage else []
        less_s = max(optimizer_s) - min(optimizer_s) + max((float(own.max()) for own in gather_s), default=0.0)
        wait_s = max((float(own.max()) for own in rings.between_groups.ring_pass_s(0.0)), default=0.0)
        return cost.step_time_s - less_s - 2.0 * wait_s

    def every(self, plan: Plan, most: int) -> Iterator[Plan] | None:
        """The plan under all names that matter; None where these are more than `most`."""
        used = [device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices]
        on = self._matter_on(plan)
        own = [[device for device in used if self._cluster.machine_of[device] == m] for m in sorted(on)]
        if math.prod(math.factorial(len(devices)) for devices in own) > most:
            return None
        first = [device for devices in own for device in devices]
        orders = itertools.product(*map(itertools.permutations, own))
        stay = {device: device for device in used}
        return (renumber(plan, stay | dict(zip(first, itertools.chain(*order), strict=True))) for order in orders)

    def _matter_on(self, plan: Plan) -> set[int]:
        """The machines on which a parameter that others hold too has two holders or more; with states sharded within
        machines, if this is so on two machines."""
        machine_of, found = self._cluster.machine_of, set[int]()
        for rows in parameter_holders(
            Holdings.of(plan.pipelines), self._pricer.problem.parameters.trained_groups
        ).holders:
            for row in machine_of[rows].tolist():
                several = {m for m in row if row.count(m) > 1}
                if several and len(set(row)) > 1 and (plan.sharding.groups == "all" or len(several) > 1):
                    found |= several
        return found


def _with_fast_ports(cluster: Cluster) -> Cluster:
    machines = tuple(replace(machine, intra_bandwidth_bytes_per_s=math.inf) for machine in cluster.machines)
    return replace(cluster, machines=machines)

"""Plans whose devices are numbered in the order of the plan, as far as GPUs are interchangeable."""

from collections.abc import Mapping
from dataclasses import replace

from hexiopt.cost.cost import Cost
from hexiopt.plan.parallelism import Replicated, SequenceParallel, StageParallelism, TensorParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.solving import Pricer

_SAME = 1e-12  # of a step time


def name_in_order(plan: Plan, cost: Cost, pricer: Pricer) -> tuple[Plan, Cost]:
    """`plan` and its price, with the GPUs of each machine taken in the order in which the plan uses them.

    A search that takes GPUs 2-3 and 6-7 of eight like ones for its first stage means any four of them; here they are
    0-3. GPUs of a machine differ where links or network interfaces do, so the plan is renumbered only where the price
    by `pricer` and the free memory stay the same: on all machines, or else on those whose GPUs are all alike.
    """
    for alike_only in (False, True):
        numbers = _numbers(pricer.problem, plan, alike_only)
        if all(device == number for device, number in numbers.items()):
            continue
        named = renumber(plan, numbers)
        price = pricer.price(named)
        same_time = abs(price.step_time_s - cost.step_time_s) <= _SAME * cost.step_time_s
        if same_time and price.excess_bytes == cost.excess_bytes:
            return named, price
    return plan, cost


def renumber(plan: Plan, numbers: Mapping[int, int]) -> Plan:
    """`plan` with its devices replaced by `numbers`, which has all of them and maps no two to one."""

    def of(devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers[device] for device in devices])

    def moved(parallelism: StageParallelism) -> StageParallelism:
        match parallelism:
            case TensorParallel():
                return replace(parallelism, devices=of(parallelism.devices))
            case Replicated():
                parts = [replace(replica, devices=of(replica.devices)) for replica in parallelism.replicas]
                return replace(parallelism, replicas=tuple(parts))
            case SequenceParallel():
                groups = [replace(group, devices=of(group.devices)) for group in parallelism.groups]
                return replace(parallelism, groups=tuple(groups))

    pipelines = [
        replace(
            pipeline,
            stages=tuple([replace(stage, parallelism=moved(stage.parallelism)) for stage in pipeline.stages]),
        )
        for pipeline in plan.pipelines
    ]
    groups = plan.sharding.groups
    sharding = plan.sharding if isinstance(groups, str) else replace(plan.sharding, groups=tuple(map(of, groups)))
    return replace(plan, pipelines=tuple(pipelines), sharding=sharding)


def _numbers(problem: Problem, plan: Plan, alike_only: bool) -> dict[int, int]:
    """The number of each used device: in each machine, the first usable ones in the order of the plan."""
    machine_of: list[int] = problem.cluster.machine_of.tolist()
    used: dict[int, list[int]] = {}
    for device in plan.devices():
        used.setdefault(machine_of[device], []).append(device)
    numbers = dict[int, int]()
    for m, devices in used.items():
        kept = alike_only and not _alike(problem.cluster.machines[m])
        targets = devices if kept else problem.usable_by_machine[m]
        numbers |= dict(zip(devices, targets, strict=False))
    return numbers


def _alike(machine: Machine) -> bool:
    return not machine.intra_links and not machine.slow and machine.num_interfaces in (1, machine.num_gpus)

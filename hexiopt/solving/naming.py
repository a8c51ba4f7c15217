"""Plans whose devices are numbered in the order of the plan, as far as GPUs are interchangeable."""

from collections.abc import Mapping
from dataclasses import replace

from hexiopt.cost.cost import Cost
from hexiopt.plan.parallelism import ExpertParallel, Replicated, SequenceParallel, StageParallelism, TensorParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.solving.solver import Pricer

_SAME = 1e-12  # of a step time


def name_in_order(plan: Plan, cost: Cost, pricer: Pricer) -> tuple[Plan, Cost]:
    """`plan` and its price, with the GPUs of each machine taken in the order in which the plan uses them.

    A search that puts its first stage on GPUs 2-3 and 6-7 of eight interchangeable ones means any four of them; here
    they become 0-3. GPUs of a machine differ where its links or network interfaces do, so the plan is renumbered only
    if the price by `pricer` and the free memory stay the same: on all machines, or else on machines of uniform GPUs.
    """
    for uniform_only in (False, True):
        numbers = _numbers(pricer.problem, plan, uniform_only)
        if all(device == number for device, number in numbers.items()):
            continue
        named = renumber(plan, numbers)
        price = pricer.price(named)
        same_time = abs(price.step_time_s - cost.step_time_s) <= _SAME * cost.step_time_s
        if same_time and price.excess_bytes == cost.excess_bytes:
            return named, price
    return plan, cost


def renumber(plan: Plan, numbers: Mapping[int, int]) -> Plan:
    """Replace the devices of `plan` by `numbers`, which has all of them and maps no two to the same."""

    def map_devices(devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers[device] for device in devices])

    def map_stage(stage: Stage) -> Stage:
        parallelism: StageParallelism = stage.parallelism
        match parallelism:
            case TensorParallel():
                parallelism = replace(parallelism, devices=map_devices(parallelism.devices))
            case Replicated():
                replicas = [replace(replica, devices=map_devices(replica.devices)) for replica in parallelism.replicas]
                parallelism = replace(parallelism, replicas=tuple(replicas))
            case ExpertParallel():
                members = [replace(member, devices=map_devices(member.devices)) for member in parallelism.members]
                parallelism = replace(parallelism, members=tuple(members))
            case SequenceParallel():
                groups = [replace(group, devices=map_devices(group.devices)) for group in parallelism.groups]
                parallelism = replace(parallelism, groups=tuple(groups))
        return replace(stage, parallelism=parallelism)

    pipelines = [replace(pipeline, stages=tuple(map(map_stage, pipeline.stages))) for pipeline in plan.pipelines]
    sharding, groups = plan.sharding, plan.sharding.groups
    if not isinstance(groups, str):
        sharding = replace(sharding, groups=tuple(map(map_devices, groups)))
    return replace(plan, pipelines=tuple(pipelines), sharding=sharding)


def _numbers(problem: Problem, plan: Plan, uniform_only: bool) -> dict[int, int]:
    """The new number of each device in use: in each machine the first usable ones, in the order of the plan.

    With `uniform_only`, devices of machines whose GPUs differ keep their numbers.
    """
    machine_of: list[int] = problem.cluster.machine_of.tolist()
    used: dict[int, list[int]] = {}
    for device in plan.devices():
        used.setdefault(machine_of[device], []).append(device)
    numbers = dict[int, int]()
    for m, devices in used.items():
        as_is = uniform_only and not _has_uniform_gpus(problem.cluster.machines[m])
        targets = devices if as_is else problem.usable_by_machine[m]
        numbers |= dict(zip(devices, targets, strict=False))
    return numbers


def _has_uniform_gpus(machine: Machine) -> bool:
    return not machine.intra_links and not machine.slow and machine.num_interfaces in (1, machine.num_gpus)

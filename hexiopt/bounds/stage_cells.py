"""The groups of devices that a stage may have, of which no real one is faster: TP groups, and where layers have experts
also replicas that share them, with every TP degree that a plan may state."""

from collections.abc import Iterator

from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.problem.problem import Problem


def stage_cells(stages: StageModel, machine: int, share: int) -> Iterator[TpGroup]:
    """Groups that take `share` sequences of a micro-batch, of devices like those of `machine`: inside it, and of
    replicas that share experts also over it and others of its GPU type."""
    problem, groups = stages.problem, stages.tp_groups
    for group in groups.fastest(machine, problem.space.allowed_tp(problem.cluster.machines[machine].num_gpus)):
        yield from (cell for cell in groups.with_every_degree(group) if share % cell.replicas == 0)
    yield from cells_across(stages, machine, share)


def shares_across(problem: Problem) -> bool:
    """Whether replicas of a stage in several machines may share experts."""
    if not problem.model.shares_experts or problem.space.micro_batch_sizes(problem.workload.global_batch)[-1] < 2:
        return False
    machines = problem.cluster.machines
    names = [machines[m].gpu.type_name for m in problem.usable_by_machine]
    return len(set(names)) < len(names)


def cells_across(stages: StageModel, machine: int, share: int) -> Iterator[TpGroup]:
    """Of replicas in several machines: the one over as many of them as makes a layer fastest, for each number of
    devices and TP degree."""
    problem = stages.problem
    if not shares_across(problem) or share not in problem.space.micro_batch_sizes(problem.workload.global_batch):
        return
    machines, usable = problem.cluster.machines, problem.usable_by_machine
    name = machines[machine].gpu.type_name
    like = [m for m in usable if machines[m].gpu.type_name == name]
    every = sum(len(usable[m]) for m in like)
    for degree in range(1, max(len(usable[m]) for m in like) + 1):
        for replicas in [n for n in range(1, share + 1) if share % n == 0]:
            over = range(2, min(replicas, len(like)) + 1)
            if degree * replicas <= every and over:
                groups = [stages.tp_groups.fastest_across(machine, like, degree, replicas, count) for count in over]
                yield min(groups, key=lambda cell: sum(stages.layer_s(cell, share, "none")))

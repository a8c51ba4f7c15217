"""Structures to start from: all are legal, and the ones that people would build are among them."""

from dataclasses import replace
from itertools import product

import pytest

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.schedules.registry import schedule_by_name, schedule_names
from solvers.core.partition import Partition, PipelineGroup
from solvers.frame.starts import (
    chain_partitions,
    cut,
    first_choice,
    kinds,
    single_pipeline_partitions,
    symmetric,
    whole_grids,
)
from tests.solvers import problems

CASES = {
    "easy": problems.easy(),
    "excluded": problems.easy(Space(exclude=("a:0", "c:1"))),
    "max_tp": problems.easy(Space(max_tp=2)),
    "three_gpus": problems.three_gpus(),
    "loose": problems.loose(),
    "thirty_two": problems.thirty_two_gpus(),
}


def assert_legal(problem: Problem, partition: Partition) -> None:
    """Devices usable and in one place, TP groups inside a machine, bundles rectangular (or replicated), not empty."""
    machine_of = problem.cluster.machine_of
    groups = [
        group
        for pipeline_group in partition.pipeline_groups
        for stage_groups in pipeline_group.stages
        for group in stage_groups
    ]
    devices = [device for group in groups for device in group]
    assert len(devices) == len(set(devices))
    assert set(devices) <= set(problem.usable_devices)
    for group in groups:
        machines = {int(machine_of[device]) for device in group}
        assert len(machines) == 1
        assert len(group) in problem.space.allowed_tp(problem.cluster.machines[machines.pop()].num_gpus)
    assert partition.pipeline_groups
    for pipeline_group in partition.pipeline_groups:
        assert pipeline_group.stages
        assert pipeline_group.width >= 1
        if pipeline_group.replicated:
            assert pipeline_group.width == 1 < max(map(len, pipeline_group.stages)) <= pipeline_group.micro_batch_size
            assert all(pipeline_group.stages)
        else:
            assert {len(stage_groups) for stage_groups in pipeline_group.stages} == {pipeline_group.width}
            assert all(len({len(group) for group in stage_groups}) == 1 for stage_groups in pipeline_group.stages)
        assert pipeline_group.micro_batch_size in problem.space.micro_batch_sizes(problem.workload.global_batch)


def test_cut() -> None:
    assert cut((3, 4, 5, 6, 7), 2) == [(3, 4), (5, 6)]
    assert cut((3,), 2) == []


def test_machines_without_excluded_devices() -> None:
    assert CASES["excluded"].usable_by_machine == {0: (1,), 1: (2, 3), 2: (4, 6, 7)}


def test_kinds_slowest_first() -> None:
    assert kinds(CASES["easy"]) == [[2], [0, 1]]
    assert sorted(map(sorted, kinds(CASES["excluded"]))) == [[0], [1], [2]]


@pytest.mark.parametrize("case", CASES)
def test_chains_are_legal_and_differ(case: str) -> None:
    problem = CASES[case]
    partitions = list(chain_partitions(problem))
    assert partitions
    assert len(partitions) == len({partition.pipeline_groups for partition in partitions})
    for partition in partitions:
        assert_legal(problem, partition)
        assert all(
            len(pipeline_group.stages) <= problem.model.num_layers for pipeline_group in partition.pipeline_groups
        )


@pytest.mark.parametrize("case", CASES)
def test_symmetric_grids_are_legal(case: str) -> None:
    problem = CASES[case]
    for members in kinds(problem):
        pipeline_groups = list(symmetric(problem, members))
        assert pipeline_groups
        for pipeline_group in pipeline_groups:
            assert_legal(problem, first_choice(problem, (pipeline_group,)))
            assert all(
                int(problem.cluster.machine_of[device]) in members
                for stage_groups in pipeline_group.stages
                for group in stage_groups
                for device in group
            )


def test_what_people_would_build() -> None:
    """One pipeline through all machines, slow ones first; data and tensor parallelism in a machine."""
    problem = CASES["easy"]
    chains = {partition.pipeline_groups for partition in chain_partitions(problem)}
    assert (PipelineGroup((((4, 5, 6, 7),), ((0, 1),), ((2, 3),))),) in chains
    grids = set(symmetric(problem, [2]))
    assert PipelineGroup((((4,), (5,), (6,), (7,)),)) in grids
    assert PipelineGroup((((4,),), ((5,),), ((6,),), ((7,),))) in grids
    assert PipelineGroup((((4, 5, 6, 7),),)) in grids


@pytest.mark.parametrize(("fixed", "expected"), [("auto", "1f1b"), *((name, name) for name in schedule_names())])
def test_first_choice_obeys_the_workload(fixed: str, expected: str) -> None:
    problem = problems.easy()
    problem = replace(problem, workload=replace(problem.workload, schedule=fixed, optimizer_sharding="0"))
    partition = first_choice(problem, (PipelineGroup((((0,),),)),))
    assert (partition.schedule, partition.sharding) == (schedule_by_name(expected), 0)


@pytest.mark.parametrize("name", CASES)
def test_grids_are_legal_and_as_wide_as_the_machines_allow(name: str) -> None:
    problem = CASES[name]
    for partition in whole_grids(problem):
        assert_legal(problem, partition)
        [grid] = partition.pipeline_groups
        used = set(partition.devices())
        degrees = [len(stage_groups[0]) for stage_groups in grid.stages]
        by_kind = [{d for m in machines for d in problem.usable_by_machine[m]} for machines in kinds(problem)]
        idle = [len(devices - used) // min(degrees) for devices in by_kind if devices & used]
        assert grid.width == problem.workload.global_batch or sum(idle) < sum(degrees) // min(degrees)


def test_single_pipelines_leave_out_some_machines_of_each_kind() -> None:
    """Any number of each kind, all of them first, and none of no machine."""
    problem = problems.loose()
    members, machine_of = kinds(problem), problem.cluster.machine_of
    used = [
        tuple(len({int(machine_of[d]) for d in partition.devices()} & {*kind}) for kind in members)
        for partition in single_pipeline_partitions(problem, True)
    ]
    assert used[0] == tuple(map(len, members))
    assert set(used) == {*product(*(range(len(kind) + 1) for kind in members))} - {(0,) * len(members)}
    assert sorted(map(sum, used), reverse=True) == list(map(sum, used))

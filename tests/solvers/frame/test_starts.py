"""Structures to start from: all are legal, and the ones that people would build are among them."""

from dataclasses import replace
from itertools import product

import pytest

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.reading import Section
from hexiopt.schedules.registry import schedule_named, schedule_names
from solvers.core.partition import Partition, PipelineGroup
from solvers.frame.starts import (
    chain_partitions,
    cut,
    first_choice,
    interleaved,
    kinds,
    other_grids,
    shared_partitions,
    short_chain_partitions,
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
    found = list(chain_partitions(problem))
    assert found
    assert len(found) == len({partition.pipeline_groups for partition in found})
    for partition in found:
        assert_legal(problem, partition)
        assert all(
            len(pipeline_group.stages) <= problem.model.num_layers for pipeline_group in partition.pipeline_groups
        )


def test_two_chains_side_by_side() -> None:
    """All differ; slowest machines first, fastest first, and slowest first after the one with most memory."""
    problem = CASES["thirty_two"]
    machine_of, machines = problem.cluster.machine_of, problem.cluster.machines
    found = list(shared_partitions(problem))
    assert len(found) == len({partition.pipeline_groups for partition in found})
    orders = set()
    for partition in found:
        assert_legal(problem, partition)
        assert len(partition.pipeline_groups) == 2
        for pipeline_group in partition.pipeline_groups:
            through = [machines[machine_of[stage_groups[0][0]]].gpu.name for stage_groups in pipeline_group.stages]
            orders.add(tuple(name for k, name in enumerate(through) if k == 0 or through[k - 1] != name))
    names = tuple(machines[members[0]].gpu.name for members in kinds(problem))
    assert {names, names[::-1], (names[-1], *names[:-1])} <= orders


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
    assert (partition.schedule, partition.sharding) == (schedule_named(expected), 0)


def test_many_machines_are_dealt_to_short_chains_of_every_mix() -> None:
    """Sixteen machines of two kinds: every order and length, plain and interleaved; all devices once."""
    machines = [
        {"name": name, "gpu": gpu, "num_gpus": 4, "count": 8, "intra_bandwidth_gb_per_s": 20}
        for name, gpu in (("a", "rtx_3090"), ("b", "rtx_4090"))
    ]
    network = {"bandwidth_gb_per_s": 1, "latency_us": 20}
    cluster = cluster_from_section(Section({"name": "many", "inter_machine": network, "machines": machines}, "test"))
    problem = Problem(cluster, replace(problems.TINY, num_layers=8), Workload(256, 512))
    found = list(short_chain_partitions(problem))
    assert len(found) == len(set(found)) == 2 * 3 * 2
    mixes = set()
    for partition in found:
        assert_legal(problem, partition)
        assert len(partition.devices()) == 64
        assert all(pipeline_group.width == 4 for pipeline_group in partition.pipeline_groups)
        mixes |= {
            tuple(int(stage_groups[0][0] >= 32) for stage_groups in pipeline_group.stages)
            for pipeline_group in partition.pipeline_groups
        }
    assert {(0, 1), (1, 0), (0, 0, 1, 1), (1, 1, 0, 0)} <= mixes
    assert list(short_chain_partitions(problems.thirty_two_gpus())) == []


@pytest.mark.parametrize("name", CASES)
def test_grids_are_legal_and_as_wide_as_the_machines_allow(name: str) -> None:
    problem = CASES[name]
    for partition in (*whole_grids(problem), *other_grids(problem)):
        assert_legal(problem, partition)
        [grid] = partition.pipeline_groups
        used = set(partition.devices())
        degrees = [len(stage_groups[0]) for stage_groups in grid.stages]
        by_kind = [{d for m in own for d in problem.usable_by_machine[m]} for own in kinds(problem)]
        idle = [len(own - used) // min(degrees) for own in by_kind if own & used]
        assert grid.width == problem.workload.global_batch or sum(idle) < sum(degrees) // min(degrees)


def test_other_grids_leave_a_kind_out_or_mix_tp_degrees() -> None:
    """Each of three kinds is left out; all machines have stages of one and of two successive degrees."""
    problem = problems.easy()
    every, found = set(problem.usable_devices), list(other_grids(problem))
    mixed = [len({len(own[0]) for own in partition.pipeline_groups[0].stages}) > 1 for partition in found]
    assert any(mixed)
    for members in kinds(problem):
        own = {d for m in members for d in problem.usable_by_machine[m]}
        assert any(set(one.devices()) == every - own for one in found)
    alike = list(other_grids(problems.easy(Space(uneven_tp=False))))
    assert alike == [partition for partition, is_mixed in zip(found, mixed, strict=True) if not is_mixed]


def test_interleaved_are_those_with_stages_to_interleave() -> None:
    problem = problems.easy()
    plain = list(chain_partitions(problem))
    found = list(interleaved(problem, plain))
    deep = [one for one in plain if any(len(group.stages) > 1 for group in one.pipeline_groups)]
    assert [one.pipeline_groups for one in found] == [one.pipeline_groups for one in deep]
    assert 0 < len(found) < len(plain)
    assert {(one.schedule, one.chunks) for one in found} == {(schedule_named("interleaved"), 2)}
    assert list(interleaved(problems.easy(Space(max_chunks=1)), plain)) == []


def test_single_pipelines_leave_out_some_machines_of_each_kind() -> None:
    """Any number of each kind, all of them first, and none of no machine."""
    problem = problems.loose()
    members, machine_of = kinds(problem), problem.cluster.machine_of
    used = [
        tuple(len({int(machine_of[d]) for d in one.devices()} & {*own}) for own in members)
        for one in single_pipeline_partitions(problem, True)
    ]
    assert used[0] == tuple(map(len, members))
    assert set(used) == {*product(*(range(len(own) + 1) for own in members))} - {(0,) * len(members)}
    assert sorted(map(sum, used), reverse=True) == list(map(sum, used))

"""Moves between structures keep them legal; every one applies somewhere, together they reach any shape."""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from solvers.core.operators import OperatorStatistics
from solvers.core.partition import Partition, PipelineGroup
from solvers.frame.starts import first_choice
from solvers.heuristics.operators.table import PARTITION_OPERATORS, REPLICA_OPERATORS, PartitionProposals
from tests.solvers import problems
from tests.solvers.assignments import DeviceClasses
from tests.solvers.frame.test_starts import CASES, assert_legal


def whole(problem: Problem) -> Partition:
    """Every device a pipeline of its own."""
    return first_choice(problem, tuple(PipelineGroup((((device,),),)) for device in problem.usable_devices))


def proposals_of(problem: Problem, *, replicates: bool = False) -> PartitionProposals:
    """What proposes candidates on a walk."""
    return PartitionProposals(problem, OperatorStatistics(), replicates=replicates)


def move(proposals: PartitionProposals, partition: Partition, rng: random.Random) -> Partition:
    """The next partition of a walk."""
    proposal = proposals.draw(partition, rng)
    return partition if proposal is None else proposal[1]


@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1))
def test_every_sequence_of_moves_is_legal(case: str, seed: int) -> None:
    problem, rng = CASES[case], random.Random(seed)
    proposals = proposals_of(problem, replicates=True)
    partition = whole(problem)
    for _ in range(60):
        before = partition
        proposal = proposals.draw(partition, rng)
        assert partition == before  # an operator gives another partition, it does not change its own
        if proposal is not None:
            assert_legal(problem, proposal[1])
            partition = proposal[1]


def test_every_operator_applies_on_a_walk_and_is_counted() -> None:
    problem, rng, statistics = problems.easy(), random.Random(0), OperatorStatistics()
    proposals = PartitionProposals(problem, statistics, replicates=True)
    lotteries, partition, drawn = (proposals.plain, proposals.replicas), whole(problem), 6000
    for k in range(drawn):
        proposal = lotteries[k % 4 == 0].draw(partition, rng)
        partition = proposal[1] if proposal is not None else partition
    counts = statistics.counts()
    listed = [operator.name for operator in (*PARTITION_OPERATORS, *REPLICA_OPERATORS)]
    assert sorted(count.operator for count in counts) == sorted(listed)
    assert len(set(listed)) == len(listed)
    assert sum(count.proposed for count in counts) == drawn
    assert all(0 < count.valid <= count.proposed for count in counts)


def test_draws_follow_the_weights() -> None:
    problem, rng, statistics = problems.easy(), random.Random(0), OperatorStatistics()
    lottery, partition = PartitionProposals(problem, statistics).plain, whole(problem)
    for _ in range(8000):
        lottery.draw(partition, rng)
    tickets = sum(operator.weight for operator in lottery.operators)
    for operator in lottery.operators:
        assert statistics.of(operator.name).proposed == pytest.approx(8000 * operator.weight / tickets, rel=0.25)


@pytest.mark.parametrize("replicas", [True, False])
def test_a_walk_reaches_every_shape_of_two_machines(replicas: bool) -> None:
    """Of three devices, and without replicas of four; told apart by machines, TP degrees, order and replicas."""
    problem, rng = problems.loose() if replicas else problems.fast_network(), random.Random(0)
    problem = problem.replace(space=problem.space.replace(replicas=replicas))
    machine_of = problem.cluster.machine_of

    def shape(pipelines: Iterable[Sequence[Sequence[tuple[int, ...]]]]) -> tuple[object, ...]:
        def stage_shape(groups: Sequence[tuple[int, ...]]) -> tuple[object, ...]:
            return tuple(sorted((int(machine_of[group[0]]), len(group)) for group in groups))

        return tuple(sorted(tuple(stage_shape(groups) for groups in stages) for stages in pipelines))

    device_classes = DeviceClasses.of(problem)
    wanted = {shape(device_classes.first_labeling(assignment)) for assignment in device_classes.assignments()}
    proposals, partition = proposals_of(problem, replicates=replicas), whole(problem)
    met = set()
    for _ in range(40_000):
        proposal = proposals.draw(partition, rng)
        if proposal is not None:
            partition = proposal[1]
            met.add(
                shape(pipeline for pipeline_group in partition.pipeline_groups for pipeline in lines(pipeline_group))
            )
            if wanted <= met:
                break
    assert wanted - met == set()


def lines(pipeline_group: PipelineGroup) -> list[tuple[tuple[tuple[int, ...], ...], ...]]:
    """The pipelines of a bundle: the replicas of every stage."""
    if pipeline_group.replicated:
        return [pipeline_group.stages]
    return [tuple((stage_groups[k],) for stage_groups in pipeline_group.stages) for k in range(pipeline_group.width)]


@pytest.mark.parametrize("space", [Space(max_tp=1), Space(tp_degrees="all"), Space(max_micro_batch_size=1)])
def test_moves_keep_to_the_degrees_and_sizes_of_the_space(space: Space) -> None:
    problem, rng = problems.easy(space), random.Random(3)
    proposals, partition = proposals_of(problem), whole(problem)
    for _ in range(1500):
        partition = move(proposals, partition, rng)
        assert_legal(problem, partition)


def test_a_lonely_device_has_few_moves_and_no_error() -> None:
    problem = problems.easy(Space(exclude=("a", "b", "c:0", "c:1", "c:2")))
    proposals, partition, rng = proposals_of(problem), whole(problem), random.Random(0)
    for _ in range(500):
        partition = move(proposals, partition, rng)
        assert partition.devices() == {7}

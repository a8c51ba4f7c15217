"""Executors: what the devices of a stage are, against the plan that they become and its price."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.space import Space
from hexiopt.schedules.in_flight import holding
from solvers.completion.completer import PlanCompleter
from solvers.completion.executors import ExecutorTables, ReplicaShare, StageExecutors
from solvers.core.partition import PipelineGroup
from solvers.core.zero import LOCKSTEP
from solvers.frame.starts import first_choice
from tests.solvers import problems
from tests.solvers.completion.test_pipeline_timer import walk
from tests.solvers.frame.test_starts import CASES

PAIR = PipelineGroup((((0,), (4,)),), 6, replicated=True)  # a fast device and a slow one of `problems.easy`


@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1))
def test_executors_are_those_of_the_plan_and_take_what_it_is_priced_at(case: str, seed: int) -> None:
    problem = CASES[case]
    partition, pricer = walk(problem, seed, 30), PlanPricer(problem)
    completer = PlanCompleter(pricer)
    assume(completer.allowed(partition) and partition.sharding < LOCKSTEP)
    completed = completer.complete(partition)
    assume(completed)
    assert completed
    rows = [row for pipeline_group in partition.pipeline_groups for row in completer.executors.of(pipeline_group)]
    plan = completed.plan
    for pipeline, row, cost in zip(plan.pipelines, rows, pricer.pipelines(plan), strict=True):
        for s, (stage, executor) in enumerate(zip(pipeline.stages, row, strict=True)):
            assert executor.stage(stage.layers, stage.recompute) == stage
            assert sum(executor.samples) == pipeline.micro_batch_size
            ends = s == 0, s == len(row) - 1
            taken_s = completer.executors.seconds(executor, *ends, stage.num_layers, stage.recompute)
            assert taken_s == pytest.approx(cost.stages[s].forward_s + cost.stages[s].backward_s)


def test_replicas_share_samples_by_speed_and_their_options_are_those_of_the_slowest() -> None:
    pricer = PlanPricer(problems.easy())
    [[executor]] = StageExecutors(pricer).of(PAIR)
    fast, slow = (pricer.tp_group((device,)) for device in (0, 4))
    more, fewer = executor.samples
    assert more > fewer > 0
    assert more + fewer == 6
    assert executor.works(6) == {ReplicaShare(fast, more), ReplicaShare(slow, fewer)}
    tables, unsharded = ExecutorTables(pricer, pricer.policies()), StateSharding()
    both, *each = (
        tables.options[works, True, True, 6, holding(1), unsharded]
        for works in (executor.works(6), *(frozenset([work]) for work in executor.works(6)))
    )
    assert both.times == list(map(max, *(options.times for options in each)))
    assert both.times[2] == executor_s(pricer, 3, both.recompute(3))


def executor_s(pricer: PlanPricer, num_layers: int, recompute: tuple[str, ...]) -> float:
    executors = StageExecutors(pricer)
    [[executor]] = executors.of(PAIR)
    return executors.seconds(executor, True, True, num_layers, recompute)


def test_no_executor_has_a_replica_without_a_sample() -> None:
    assert StageExecutors(PlanPricer(problems.easy())).of(replace(PAIR, micro_batch_size=1)) == ()


def test_replicas_share_states_everywhere_or_inside_machines() -> None:
    executors = StageExecutors(PlanPricer(problems.easy()))
    assert executors.more_holders(PAIR, everywhere=True) == (1,)
    assert executors.more_holders(PAIR, everywhere=False) == (0,)
    assert executors.more_holders(PipelineGroup((((0,), (4,)),), 6), everywhere=True) == ()


def test_what_the_plan_space_forbids_is_told_by_how_far() -> None:
    uneven = (PipelineGroup((((0, 1),), ((2,),), ((3,),))), PipelineGroup((((4, 5, 6, 7),),)))
    for space, groups, far in (
        (Space(), uneven, 0),
        (Space(uneven_tp=False), uneven, 2),  # three TP degrees
        (Space(), (PAIR,), 0),
        (Space(replicas=False), (PAIR,), 1),
    ):
        problem = problems.easy(space)
        partition = first_choice(problem, groups)
        executors = StageExecutors(PlanPricer(problem))
        assert executors.distance(partition) == far
        assert not StageExecutors(PlanPricer(problem), replicates=False).replicates
    replicas = PipelineGroup((((0, 1), (4,)),), 6, replicated=True)
    partition = replace(first_choice(problems.easy(), (replicas,)), sharding=LOCKSTEP)
    assert StageExecutors(PlanPricer(problems.easy())).distance(partition) == 1  # they gather together

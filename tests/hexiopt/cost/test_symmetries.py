"""What a plan names in any order has one price: replicas of a stage, pipelines of a plan, equal devices of a cluster.

Every field of the price is compared, those of replicas, pipelines and messages in their new order.
"""

from dataclasses import astuple, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost import extra_communicators
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors import communicators
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.messages import Message
from hexiopt.plan.parallelism import (
    Replica,
    Replicated,
)
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.solving.naming import renumber
from tests.hexiopt.exports.random_plans import LLAMA_7B
from tests.strategies import plans, problems_with_plans, roomy_problems, roomy_problems_with_plans

PAIRS = problems_with_plans() | roomy_problems_with_plans()


def flat(value: Any) -> list[Any]:
    """The numbers of nested tuples, in order."""
    if isinstance(value, tuple | list):
        return [number for part in value for number in flat(part)]
    return [value]


def assert_equal(cost: Cost, expected: Cost) -> None:
    """Equal in every field, but for the rounding of sums in another order."""
    assert flat(astuple(cost)) == pytest.approx(flat(astuple(expected)), rel=1e-9, abs=1e-12)


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_order_of_pipelines_changes_nothing(pair: tuple[Problem, Plan], random: Any) -> None:
    problem, plan = pair
    order = list(range(len(plan.pipelines)))
    random.shuffle(order)
    cost = PlanPricer(problem).price(plan)
    other = PlanPricer(problem).price(replace(plan, pipelines=tuple(plan.pipelines[p] for p in order)))
    assert_equal(other, replace(cost, pipelines=tuple(cost.pipelines[p] for p in order)))


def last_first(stage: Stage) -> Stage:
    match stage.parallelism:
        case Replicated(replicas):
            return replace(stage, parallelism=Replicated(replicas[::-1]))
        case _:
            return stage


def mirror_cost(pipeline: Pipeline, cost: PipelineCost) -> PipelineCost:
    """The price of a pipeline whose samples go to the replicas of every stage in the opposite order."""
    counts, size = [len(stage.parallelism.executors) for stage in pipeline.stages], pipeline.micro_batch_size

    def of(message: Message) -> Message:
        target = counts[message.target(len(counts))]
        first = size - message.first_sample - message.samples
        sender, receiver = counts[message.stage] - 1 - message.sender, target - 1 - message.receiver
        return replace(message, sender=sender, receiver=receiver, first_sample=first)

    def key(pair: tuple[Message, float]) -> tuple[int, int, bool]:
        message = pair[0]
        return (
            (message.target(len(counts)) if message.backward else message.stage),
            message.first_sample,
            message.backward,
        )

    messages = sorted(zip(map(of, cost.messages), cost.message_s, strict=True), key=key)
    ends = cost.replica_end_s
    return replace(
        cost,
        stages=tuple(replace(stage, executors=stage.executors[::-1]) for stage in cost.stages),
        messages=tuple(message for message, _ in messages),
        message_s=tuple(seconds for _, seconds in messages),
        executor_end_s=tuple(end for stage in ends for end in stage[::-1]),
    )


@given(PAIRS, st.integers(1, 8))
def test_the_order_of_replicas_changes_nothing(pair: tuple[Problem, Plan], reserved: int) -> None:
    """Turned round in all stages, so that the same replicas still work on the same samples; on GPUs that have room for
    few communicators."""
    problem, plan = pair
    pipelines = tuple(replace(pipeline, stages=tuple(map(last_first, pipeline.stages))) for pipeline in plan.pipelines)
    with (
        patch.object(extra_communicators, "RESERVED_GROUPS", reserved),
        patch.object(communicators, "RESERVED_GROUPS", reserved),
    ):
        cost, other = (PlanPricer(problem).price(variant) for variant in (plan, replace(plan, pipelines=pipelines)))
    expected = tuple(mirror_cost(*both) for both in zip(plan.pipelines, cost.pipelines, strict=True))
    assert_equal(other, replace(cost, pipelines=expected))


@st.composite
def uniform(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A plan on machines of two types that are connected equally, as are the devices of each."""
    size = draw(st.sampled_from((2, 4)))
    counts = {"a100_80gb_sxm": size * draw(st.integers(1, 3)), "t4": size * draw(st.integers(1, 2))}
    cluster = Cluster.of(counts, inter_gb_per_s=draw(st.sampled_from((1, 25))), gpus_per_machine=size, name="c")
    problem = draw(roomy_problems())
    problem = replace(
        problem, cluster=cluster, workload=replace(problem.workload, precision="fp16", optimizer_sharding="auto")
    )
    return problem, draw(plans(problem).filter(lambda plan: plan.sharding.stage < 2))


@given(uniform(), st.randoms(use_true_random=False))
def test_equal_devices_are_interchangeable(pair: tuple[Problem, Plan], random: Any) -> None:
    """But for what rings of gradients take and hold: NCCL has ranks in their order, which is that of devices, so that
    other names are other rings (`hexiopt/solving/naming.py` looks for good ones)."""
    problem, plan = pair
    cluster = problem.cluster
    kinds: dict[Any, list[int]] = {}
    for m, machine in enumerate(cluster.machines):
        kinds.setdefault(machine.kind, []).append(m)
    to: dict[int, int] = {}
    for members in kinds.values():
        for m, other in zip(members, random.sample(members, len(members)), strict=True):
            mine, theirs = (
                [d for d in range(cluster.num_devices) if cluster.machine_of[d] == machine_index]
                for machine_index in (m, other)
            )
            to.update(zip(mine, random.sample(theirs, len(theirs)), strict=True))
    moved = renumber(plan, to)
    for mine, theirs in zip(*(PlanPricer(problem).pipelines(variant) for variant in (plan, moved)), strict=True):
        assert flat(astuple(mine)) == pytest.approx(flat(astuple(theirs)), rel=1e-9, abs=1e-12)


def test_a_crowded_replica_is_priced_wherever_it_stands() -> None:
    """The device of TP 1 gets messages from eight devices and sends to eight."""
    cluster = Cluster.of({"a100_80gb_sxm": 24}, inter_gb_per_s=25, gpus_per_machine=8, name="c")
    problem = Problem(cluster, LLAMA_7B, Workload(global_batch=32, seq_len=2048))
    wide, narrow = Replica(tuple(range(8, 16)), 2), Replica((16,), 2)
    held = {}
    for replicas in ((wide, narrow), (narrow, wide)):
        stages = Stage.of(tuple(range(8)), 0, 16), Stage(Replicated(replicas), ((16, 32),))
        cost = PlanPricer(problem).price(Plan((Pipeline(stages, 8, 4),)))
        copies = cost.pipelines[0].stages[1].copies
        held[replicas] = dict(zip((r.devices for r in replicas), (copy.memory for copy in copies), strict=True))
    memories, other = held.values()
    assert memories == other
    reserved = communicators.Communicators(cluster).least_bytes(cluster.gpu_of(16), 1)
    assert memories[16,].communicators > reserved

"""Plans of models with experts in the files of trainers that share them among ranks, and back."""

import random


import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.exports.formats import ImportContext
from hexiopt.exports.rank_table import devices_of_table, rank_rows, table_text
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.random_expert_plans import EXPERT_PLANS

Groups = set[tuple[int, ...]]


def drawn_plan(name: str, seed: int) -> tuple[Problem, Plan]:
    return EXPERT_PLANS[name](random.Random(f"experts {name} {seed}"))


def states(plan: Plan) -> tuple[object, ...]:
    """A plan up to words for the same: sharding of what one device alone holds, schedules of one layer range."""
    pipelines = tuple(
        (
            pipeline.num_micro_batches,
            pipeline.micro_batch_size,
            tuple((stage.parallelism, stage.layers, stage.policies()) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    first = plan.pipelines[0].stages[0].parallelism
    alone = len(plan.pipelines) * len(first.parameter_copies) == 1
    single = len(plan.pipelines[0].stages) == 1
    return pipelines, None if single else plan.schedule, None if alone else plan.sharding


def assert_read_back(name: str, seed: int, *, priced: bool) -> None:
    problem, plan = drawn_plan(name, seed)
    program = TRAINERS[name].write(problem, plan)
    table = table_text(rank_rows(problem.cluster, plan, program.devices))
    devices = devices_of_table(table, problem.cluster, "ranks.tsv")
    default = Workload(problem.workload.global_batch, gradient_bytes=problem.workload.gradient_bytes)
    stated = frozenset({"gradient_bytes", "sequence_parallel"})  # in which some trainers differ from the plan's price
    context = ImportContext(name, problem.cluster, devices, problem.model, default, Space(), stated, table=True)
    found = TRAINERS[name].read(next(iter(program.files.values())), context)
    assert states(found.plan) == states(plan), seed
    assert found.problem.workload == problem.workload
    # Of one shard, it does not matter when it is gathered.
    unread = [note for note in found.notes if note.startswith("not read") and "fsdp_reshard_after" not in note]
    assert not unread, seed
    if priced:
        costs = [PlanPricer(p).price(a).step_time_s for p, a in ((problem, plan), (found.problem, found.plan))]
        assert costs[0] == pytest.approx(costs[1], rel=1e-12), seed


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_plans_of_experts_are_read_back(name: str) -> None:
    for seed in range(12):
        assert_read_back(name, seed, priced=seed < 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_many_plans_of_experts_are_read_back(name: str) -> None:
    for seed in range(500):
        assert_read_back(name, seed, priced=seed % 20 == 0)

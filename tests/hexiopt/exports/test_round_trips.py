"""What is read back from a trainer's files is the plan, and costs the same."""

import random

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.rank_table import devices_of_table, rank_rows, table_text
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.random_plans import draw_case

STATES_MODEL = {"megatron", "flagscale"}
READ = [name for name, trainer in TRAINERS.items() if trainer.can_read]


def read_back(name: str, problem: Problem, plan: Plan, own_model: bool) -> ImportedPlan:
    """What the trainer's files and the rank table describe."""
    trainer = TRAINERS[name]
    program = trainer.write(problem, plan)
    table = table_text(rank_rows(problem.cluster, plan, program.devices))
    devices = devices_of_table(table, problem.cluster, "ranks.tsv")
    assert devices == program.devices
    text = next(iter(program.files.values()))
    model = problem.model if own_model else None
    default = Workload(global_batch=problem.workload.global_batch, gradient_bytes=problem.workload.gradient_bytes)
    stated = frozenset({"gradient_bytes", "sequence_parallel"})  # in which some trainers differ from the plan's price
    context = ImportContext(name, problem.cluster, devices, model, default, Space(), stated, table=True)
    return trainer.read(text, context)


def canonical(plan: Plan) -> tuple[object, ...]:
    """A plan up to words for the same thing: a policy for each of equal layers; interleaving of single ranges; sharding
    of what one pipeline alone holds."""
    pipelines = tuple(
        (
            pipeline.num_micro_batches,
            pipeline.micro_batch_size,
            tuple((stage.parallelism, stage.layers, stage.policies()) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    alone = len(plan.pipelines) == 1 and all(
        len(stage.parallelism.executors) == 1 for stage in plan.pipelines[0].stages
    )
    return pipelines, plan.schedule if plan.pipelines[0].num_chunks > 1 else None, None if alone else plan.sharding


def assert_read_back(name: str, seed: int, *, priced: bool = True) -> None:
    problem, plan = draw_case(name, random.Random(f"{name} {seed}"))
    unusual = problem.model.replace(norm_eps=2e-5)
    problem = problem.replace(model=unusual.replace(rope_theta=5e5) if unusual.gated_mlp else unusual)
    layout = read_back(name, problem, plan, name not in STATES_MODEL)
    imported_problem, imported_plan = layout.problem, layout.plan
    assert imported_problem.model.replace(name=problem.model.name) == problem.model, seed
    # Of one shard, Accelerate says that it does not matter when it is gathered.
    unread = [note for note in layout.notes if note.startswith("not read") and "fsdp_reshard_after" not in note]
    assert not unread, seed
    assert canonical(imported_plan) == canonical(plan), seed
    single = all(len(pipeline.stages) == 1 for pipeline in plan.pipelines)  # no schedule makes a difference
    assert imported_plan.schedule == plan.schedule or single or plan.pipelines[0].num_chunks == 1
    assert imported_problem.workload.global_batch == problem.workload.global_batch
    assert imported_problem.workload.seq_len == problem.workload.seq_len
    assert imported_problem.workload.precision == problem.workload.precision
    if not priced:
        return
    costs = [PlanPricer(a).price(b).step_time_s for a, b in ((problem, plan), (imported_problem, imported_plan))]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12), seed


@pytest.mark.parametrize("name", READ)
def test_what_is_read_back_is_the_plan(name: str) -> None:
    for seed in range(12):
        assert_read_back(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_what_is_read_back_of_many_is_the_plan(name: str) -> None:
    for seed in range(1000):
        assert_read_back(name, seed, priced=seed % 20 == 0)

"""Megatron-LM's grids of expert parallelism: all that it accepts, and what they find."""

import random
from dataclasses import replace

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.kinds import Experts, LayerKind
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from solvers.baselines._grids import StageGrid, rank_groups
from solvers.baselines.megatron import expert_grids
from solvers.registry import make_solver
from tests.conftest import STRESS
from tests.hexiopt.shapes_of_kinds import ATTENTION, DENSE_LAYER, model_of
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.baselines.published_spaces import SPACES
from tests.solvers.baselines.random_plans import random_plans

EXPERTS = LayerKind((ATTENTION,), (Experts(count=24, top_k=2, ffn_size=512),))
TWO_KINDS = [DENSE_LAYER, *[EXPERTS] * 5]


def three_machines(**more: object) -> Problem:
    """Four fast GPUs twice and four slow ones; 24 experts, which 8 devices divide and 16 do not."""
    cluster = problems.cluster(("a", "fast", 4), ("b", "fast", 4), ("c", "slow", 4), network_gb_per_s=25.0)
    return Problem(cluster, model_of(*[EXPERTS] * 6), Workload(48, 512, **more))  # type: ignore[arg-type]


def allowed_grids(problem: Problem, machines: tuple[int, ...], tp: int) -> set[StageGrid]:
    """By Megatron-LM's ranks, in the order tp-ep-dp-pp: a stage is world / PP ranks in a row, expert-parallel groups
    are EP of these in a row, and EP divides them and the experts. Without such groups, also tp-pp-dp."""
    ranks = [d for m in machines for d in problem.usable_by_machine[m]]
    grids, layers, batch = set[StageGrid](), problem.model.num_layers, problem.workload.global_batch
    for pp in range(1, layers + 1):
        stage, rest = divmod(len(ranks), pp)
        dp = stage // tp
        if rest or stage % tp or batch % dp:
            continue
        for ep in range(tp, stage + 1, tp):
            if ep > tp and (stage % ep or 24 % ep):
                continue
            rows = [ranks[s * stage : (s + 1) * stage] for s in range(pp)]
            groups = [tuple(tuple(row[k : k + ep]) for k in range(0, stage, ep)) for row in rows]
            names = [
                {problem.cluster.gpu_of(d).name for d in devices} for stage_groups in groups for devices in stage_groups
            ]
            inside = [
                len(devices) in (1, 2, 4)
                for stage_groups in groups
                for devices in stage_groups
                if len({int(problem.cluster.machine_of[d]) for d in devices}) == 1
            ]
            if all(len(types) == 1 for types in names) and all(inside):
                grids.add(StageGrid(tuple(groups), tp))
        if pp > 1 and dp > 1:
            lines = [ranks[k * pp * tp : (k + 1) * pp * tp] for k in range(dp)]
            along = [tuple(tuple(line[s * tp : (s + 1) * tp]) for line in lines) for s in range(pp)]
            grids.add(StageGrid(tuple(along), tp))
    return grids


@pytest.mark.parametrize("machines", [(0,), (0, 1), (2, 0, 1), (0, 2)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_grids_are_all_that_megatron_accepts(machines: tuple[int, ...], tp: int) -> None:
    problem = three_machines()
    grids = list(expert_grids(PlanPricer(problem), rank_groups(problem, machines, tp, 4)))
    assert len(grids) == len(set(grids))
    assert set(grids) == allowed_grids(problem, machines, tp)
    assert any(grid.replicas == 8 // tp and len(grid.stages[0]) == 1 for grid in grids) == (machines == (0, 1))


def test_dense_models_have_the_grids_that_they_had() -> None:
    problem = replace(three_machines(), model=model_of(*[DENSE_LAYER] * 6))
    grids = list(expert_grids(PlanPricer(problem), rank_groups(problem, (0, 1), 2, 4)))
    assert {grid.degree for grid in grids} == {None}


@pytest.mark.parametrize("layers", slow_but([TWO_KINDS], [TWO_KINDS, [EXPERTS] * 6]), ids=["two kinds", "equal"])
def test_no_random_plan_with_experts_beats_it(layers: list[LayerKind]) -> None:
    """Random plans of its space, whose replicas in a row share experts at random."""
    problem = replace(three_machines(schedule="1f1b"), model=model_of(*layers), space=Space(max_micro_batch_size=8))
    result = make_solver("megatron").solve(problem, Budget(3600.0))
    assert result.plan is not None
    assert violations(problem, result.plan, result.cost) == []
    assert SPACES["megatron"].first_violation(problem, result.plan) is None
    model, rng, shared = PlanPricer(problem), random.Random(4), 0
    for plan in random_plans(SPACES["megatron"], problem, rng, 4000 if STRESS else 1200):
        drawn = _sharing_plan(problem, plan, rng)
        if drawn is None or SPACES["megatron"].first_violation(problem, drawn) is not None:
            continue
        cost = model.price(drawn)
        if not violations(problem, drawn, cost):
            shared += drawn.pipelines[0].stages[0].parallelism.parameter_copies[1:] != ()
            assert result.objective <= 1.02 * cost.step_time_s
    assert shared > 20


def _sharing_plan(problem: Problem, plan: Plan, rng: random.Random) -> Plan | None:
    """The plan whose pipelines, some in a row each, are one of replicas that share experts; None where the plan space
    has no such plan."""
    count, size = len(plan.pipelines), plan.pipelines[0].micro_batch_size
    tp = plan.pipelines[0].stages[0].tp
    able = [n for n in range(1, count + 1) if count % n == 0 and (n == 1 or 24 % (tp * n) == 0)]
    replicas, pipelines = rng.choice(able), []
    if size * replicas not in problem.space.micro_batch_sizes(problem.workload.global_batch):
        return None
    for at in range(0, count, replicas):
        row = plan.pipelines[at : at + replicas]
        stages = tuple(
            replace(group[0], parallelism=TensorParallel(tuple(d for stage in group for d in stage.devices), None, tp))
            for group in zip(*(pipeline.stages for pipeline in row), strict=True)
        )
        pipelines.append(replace(row[0], stages=stages, micro_batch_size=size * replicas))
    return replace(plan, pipelines=tuple(pipelines))

"""Galvatron: stages for GPUs that are all alike, as little recompute as fits, layers by memory and by time."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from hexiopt.solving import Budget
from solvers.baselines.galvatron.galvatron import Galvatron, plan_of
from solvers.baselines.galvatron.stages import GalvatronChoice, StagePlanner
from tests.solvers import problems
from tests.solvers.baselines import problems as mixed
from tests.solvers.baselines.published_spaces import SPACES

POLICIES = ("none", "full")


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_as_few_layers_recompute_as_fit(zero: int, stages: int) -> None:
    """Against a scan of all numbers of layers that recompute, on every stage of RTX 3090 and A100 together."""
    problem = mixed.tight_memory()
    model = PlanPricer(problem)
    planner = StagePlanner(model)
    order, num_splits = tuple(range(8)), 0
    for tp in (1, 2, 4):
        if 8 // stages % tp:
            continue
        pipelines = 8 // stages // tp
        choice = GalvatronChoice((tp,) * stages, pipelines, zero, 1, 32 // pipelines, POLICIES)
        tp_groups = {model.tp_group(order[k : k + tp]) for k in range(0, 8, tp)}
        least = min(tp_group.gpu.usable_memory_bytes for tp_group in tp_groups)

        def needs(
            s: int, n: int, k: int, choice: GalvatronChoice = choice, tp_groups: set[TpGroup] = tp_groups
        ) -> float:
            chunk = ("full",) * k + ("none",) * (n - k)
            ends = s == 0, s == stages - 1
            held = in_flight(ONE_F_ONE_B, StagePosition(s, stages, choice.num_micro_batches))
            spread = StateSharding(zero, choice.pipelines)
            memories = (model.stages.memory_model(tp_group, 1) for tp_group in tp_groups)
            return max(memory.stage_of_layers(chunk, *ends, held, spread).total for memory in memories)

        for split in planner.splits(order, choice):
            num_splits += 1
            assert sum(option.num_layers for option in split) == 16
            for s, option in enumerate(split):
                n, k = option.num_layers, option.recomputed
                assert needs(s, n, k) <= least
                assert all(needs(s, n, fewer) > least * (1 - 1e-6) for fewer in range(k))
                seconds = [
                    sum(model.stage_s(tp_group, n - k, s == 0, s == stages - 1, 1, "none"))
                    + k * sum(model.stages.layer_s(tp_group, 1, "full"))
                    for tp_group in tp_groups
                ]
                assert option.forward_s + option.backward_s == pytest.approx(max(seconds))
    assert num_splits


def test_layers_move_from_the_balance_of_memory_to_that_of_time() -> None:
    """The first stages of 1F1B hold more micro-batches, so balanced memory gives them fewer layers."""
    problem = mixed.one_kind()
    planner, order = StagePlanner(PlanPricer(problem)), tuple(range(8))
    choice = GalvatronChoice((2, 2, 2, 2), 1, 0, 1, 32, POLICIES)
    splits = planner.splits(order, choice)
    counts = [[option.num_layers for option in split] for split in splits]
    assert counts[0][0] < counts[0][2]
    slowest = [max(option.forward_s + option.backward_s for option in split) for split in splits]
    assert slowest == sorted(slowest, reverse=True)
    assert slowest[-1] < slowest[0]


def test_unequal_gpus_are_planned_as_the_slowest() -> None:
    """Two machines of two types: the layers of equal machines, whatever the other type is."""
    cluster = mixed.cluster(("rtx_3090", 4, 12), ("h100_80gb_sxm", 4, 12), network_gb_per_s=12.5)
    equal = mixed.cluster(("rtx_3090", 4, 12), ("rtx_3090", 4, 12), network_gb_per_s=12.5)
    base: Problem = replace(mixed.tight_memory(), cluster=cluster)
    choice = GalvatronChoice((2, 2, 2, 2), 1, 3, 1, 32, POLICIES)
    splits = [
        StagePlanner(PlanPricer(problem)).splits(tuple(range(8)), choice)
        for problem in (base, replace(base, cluster=equal))
    ]
    assert splits[0]
    assert splits[0] == splits[1]


def test_unequal_degrees_become_replicas() -> None:
    """Where TP pays on some stages only, narrower ones split a pipeline's samples; the plan is in its space."""
    seen = 0
    for make in mixed.MIXED.values():
        problem = make()
        planner, order = StagePlanner(PlanPricer(problem)), tuple(problem.usable_devices)
        for uniform in planner.choices(order):
            for choice in planner.mixed(order, uniform):
                for split in planner.splits(order, choice)[:1]:
                    plan = plan_of(problem, order, choice, split)
                    assert check(problem, plan) == []
                    assert any(len(stage.parallelism.replicas) > 1 for stage in plan.pipelines[0].stages)
                    assert SPACES["galvatron"].first_violation(problem, plan) is None
                    seen += 1
    assert seen


def stages(*cuts: int, devices: tuple[int, ...]) -> tuple[Stage, ...]:
    """Stages of as many devices each, layers cut at `cuts`."""
    ranges = list(pairwise((0, *cuts, 6)))
    width = len(devices) // len(ranges)
    return tuple(Stage.of(devices[k * width : (k + 1) * width], *layers) for k, layers in enumerate(ranges))


REFUSED = {
    "gpipe": Plan((Pipeline(stages(3, devices=(0, 2)), 16),), GPIPE),
    "ZeRO-1": Plan((Pipeline(stages(3, devices=(0, 2)), 16),), ONE_F_ONE_B, Sharding(1)),
    "ZeRO-3 over machine": Plan((Pipeline(stages(3, devices=(0, 2)), 16),), ONE_F_ONE_B, Sharding(3, "machine")),
    "no power of two": Plan((Pipeline(stages(2, 4, devices=(0, 1, 2)), 16),)),
    "unequal batches": Plan((Pipeline(stages(devices=(0,)), 10), Pipeline(stages(devices=(1,)), 6))),
    "unequal TP": Plan((Pipeline(stages(devices=(0, 1)), 8), Pipeline(stages(devices=(2,)), 8))),
    "ranks of machines": Plan((Pipeline(stages(3, devices=(0, 2)), 16),)),
    "all alike": Plan((Pipeline(stages(1, devices=(0, 1)), 16),)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_express(words: str) -> None:
    problem = problems.easy()
    assert check(problem, REFUSED[words]) == []
    assert words in (SPACES["galvatron"].first_violation(problem, REFUSED[words]) or "")


@pytest.mark.parametrize("switch", ["recompute_per_stage", "recompute_per_layer"])
def test_one_policy_where_the_space_says_so(switch: str) -> None:
    """For all stages, or for all layers of a stage."""
    problem = mixed.tight_memory()
    problem = replace(problem, space=replace(problem.space, **{switch: False}))  # type: ignore[arg-type]
    result = Galvatron().solve(problem, Budget(3600.0))
    assert result.plan is not None
    assert violations(problem, result.plan, result.cost) == []

"""Samples and experts of replicas that share experts: against every other choice, within memory, and as operators."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.bounds import lower_bound
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.units import GIB
from solvers.completion.experts import balance, first_plans, undivided
from solvers.completion.pricing import PricedPlan
from solvers.heuristics.operators.experts import share_experts, shift_expert
from tests.hexiopt.shapes_of_kinds import DENSE_LAYER, EQUAL, EXPERT_LAYER, MIXED, model_of
from tests.solvers.problems import cluster

FREE = Space(uneven_experts=True)
WORK = Workload(global_batch=16, seq_len=1024)
FEW = cluster(("a", "fast", 1), ("b", "slow", 1), ("c", "slow", 2), fast_gib=40, slow_gib=40)
GROUPS = st.lists(st.sampled_from([((0,),), ((1,),), ((2, 3),), ((2,), (3,))]), min_size=1, max_size=3, unique=True)


def one_stage(group: ExpertParallel, size: int, model: hx.ModelSpec = EQUAL) -> Plan:
    line = Pipeline((Stage(group, ((0, model.num_layers),)),), WORK.global_batch // size, size)
    return Plan((line,), ONE_F_ONE_B, Sharding(1))


def splits(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    for numbers in product(range(least, total + 1), repeat=parts - 1):
        if total - sum(numbers) >= least:
            yield (*numbers, total - sum(numbers))


@given(GROUPS, st.sampled_from([4, 8]))
@settings(max_examples=25, deadline=None)
def test_no_other_numbers_have_shorter_phases(parts: list[tuple[tuple[int, ...], ...]], size: int) -> None:
    """The slowest replica's mixers, and the slowest device's experts, last as short as under any split."""
    groups = [group for part in parts for group in part]
    if len({d for group in groups for d in group}) < sum(map(len, groups)):
        return
    stages = PlanPricer(Problem(FEW, EQUAL, WORK, FREE)).stages
    stage = balance(stages, one_stage(undivided(groups, size), size), 0, 0, False)
    assert stage is not None
    assert isinstance(stage.parallelism, ExpertParallel)
    group = stage.parallelism
    cells = [stages.whole_group(devices) for devices in groups]

    def mixers_s(samples: tuple[int, ...]) -> float:
        return max(sum(stages.layer_apart(cell, n, 0).under("none")) for cell, n in zip(cells, samples, strict=True))

    assert mixers_s(group.shares) <= min(map(mixers_s, splits(size, len(groups), 1))) * (1 + 1e-9)
    assert group.num_experts == 16
    count = len(group.devices)
    if count > 3:
        return

    def slowest_s(experts: tuple[int, ...]) -> float:
        given_to = iter(experts)
        members = [replace(member, experts=tuple(next(given_to) for _ in member.devices)) for member in group.members]
        return sum(stages.expert_stage(ExpertParallel(tuple(members))).layer_s(0, "none", silent=True))

    assert slowest_s(group.experts) <= min(map(slowest_s, splits(16, count, 0))) * (1 + 1e-9)


def test_memory_limits_experts() -> None:
    """A device with room for few experts gets no more than these; where there is no room at all there is no stage."""
    wide = model_of(*[replace(EXPERT_LAYER, channels=(replace(EXPERT_LAYER.experts, ffn_size=8192),))] * 6)
    for gib in (40, 9, 4, 1):
        roomy = cluster(("a", "fast", 1), ("b", "slow", 1), fast_gib=gib, slow_gib=40)
        pricer = PlanPricer(Problem(roomy, wide, WORK, FREE))
        plan = one_stage(undivided([(0,), (1,)], 2), 2, wide)
        stage = balance(pricer.stages, plan, 0, 0, False)
        if stage is None:
            assert gib == 1
            continue
        chosen = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
        assert pricer.price(chosen).fits
        assert check(pricer.problem, chosen) == []
        assert isinstance(stage.parallelism, ExpertParallel)
        assert (stage.parallelism.experts[0] < 8) == (gib < 40)


def plans_of(problem: Problem) -> list[PricedPlan]:
    pricer = PlanPricer(problem)
    plans = list(first_plans(pricer.stages))
    return [PricedPlan(plan, pricer.price(plan)) for plan in plans]


@pytest.mark.parametrize("model", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_first_plans_and_their_neighbours_keep_every_rule(model: hx.ModelSpec) -> None:
    """Whatever operators make of plans that share experts is a plan of the space, and none is below the bound."""
    problem = Problem(FEW, model, WORK, FREE)
    pricer, rng = PlanPricer(problem), random.Random(3)
    bound_s = lower_bound(pricer).bound_s
    firsts = plans_of(problem)
    assert {len(priced.plan.pipelines[0].stages) for priced in firsts} == {1, 2, 3}
    stages, made = pricer.stages, 0
    for priced in firsts:
        assert check(problem, priced.plan) == []
        assert priced.cost.fits
        assert bound_s <= priced.cost.step_time_s
        for _ in range(12):
            operator = rng.choice((share_experts, shift_expert))
            plan = operator(stages, priced, rng)
            if plan is None:
                continue
            made += 1
            assert check(problem, plan) == []
            cost = pricer.price(plan)
            assert bound_s <= cost.step_time_s
            priced = PricedPlan(plan, cost)
    assert made > 20


def test_the_bound_is_below_every_way_to_share() -> None:
    """Random samples, experts and waves on one stage, on devices of two types."""
    for model in (EQUAL, MIXED, model_of(DENSE_LAYER, EXPERT_LAYER)):
        pricer, rng = PlanPricer(Problem(FEW, model, WORK, FREE)), random.Random(7)
        bound_s = lower_bound(pricer).bound_s
        for _ in range(60):
            groups = rng.choice([[(0,), (1,)], [(0,), (1,), (2, 3)], [(0,), (2,), (3,)], [(2,), (3,)], [(0,)]])
            size = rng.choice([n for n in (4, 8, 16) if n >= 2 * len(groups)])
            cuts = sorted(rng.randrange(17) for _ in range(sum(map(len, groups)) - 1))
            experts = iter([b - a for a, b in zip([0, *cuts], [*cuts, 16], strict=True)])
            shares = [2] * len(groups)
            for _ in range((size - sum(shares)) // 2):
                shares[rng.randrange(len(groups))] += 2
            members = [
                ExpertReplica(group, n, tuple(next(experts) for _ in group))
                for group, n in zip(groups, shares, strict=True)
            ]
            plan = one_stage(ExpertParallel(tuple(members), rng.choice([1, 2])), size, model)
            assert bound_s <= pricer.price(plan).step_time_s


def test_a_search_shares_what_no_machine_holds() -> None:
    """Where one layer exceeds all GPUs of a type, only experts shared over both make a plan; the switch allows them."""
    small = Cluster.of({"rtx_4090": 4, "rtx_3090": 4}, inter_gb_per_s=25, gpus_per_machine=1, name="cards")
    huge = model_of(replace(EXPERT_LAYER, channels=(replace(EXPERT_LAYER.experts, ffn_size=288 * 1024),)))
    assert huge.layer_of(huge.kinds[0]).num_params * 4 > 24 * GIB
    problem = hx.Problem(small, huge, WORK)
    assert hx.solve(problem, max_steps=40).plan is None
    result = hx.solve(problem.replace(space=FREE), max_steps=40)
    again = hx.solve(problem.replace(space=FREE), max_steps=40)
    assert result.plan is not None
    assert result.cost.fits
    assert any(isinstance(stage.parallelism, ExpertParallel) for line in result.plan.pipelines for stage in line.stages)
    assert again.plan == result.plan
    assert hx.check(problem.replace(space=FREE), result.plan) == []

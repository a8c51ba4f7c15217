"""What bounds a plan never exceeds it: pipelines alone, sync, and the policies that fit."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.messages import sample_overlaps
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_chains, recompute_policies
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule, StagePosition
from solvers.exact.assignments import DeviceClasses
from solvers.exact.pipeline_bounds import ReplicaWork, ends_lower_bound_s
from solvers.exact.sample_allocation import LeastRecompute
from solvers.exact.sync_bounds import SyncBound, tails_s
from tests.strategies import problems_with_plans, roomy_problems_with_plans

PLANS = st.one_of(problems_with_plans(), roomy_problems_with_plans())
SLACK = 1 + 1e-9
SETTINGS = settings(suppress_health_check=[HealthCheck.filter_too_much])


def one_policy(plan: Plan) -> Plan:
    """The plan with the first policy of each stage for all of its layers, and sharding groups by name."""

    def stage(own: Stage) -> Stage:
        return replace(own, recompute=own.recompute[:1])

    groups = plan.sharding.groups if isinstance(plan.sharding.groups, str) else "machine"
    pipelines = tuple(replace(p, stages=tuple(map(stage, p.stages))) for p in plan.pipelines)
    return replace(plan, pipelines=pipelines, sharding=Sharding(plan.sharding.stage, groups))


def holders(plan: Plan) -> int:
    return sum(max(len(stage.replicas) for stage in pipeline.stages) for pipeline in plan.pipelines)


def floor_of(model: PlanPricer, pipeline: Pipeline, schedule: Schedule) -> list[float]:
    """The floor of a pipeline's ends with the messages that it really sends, alone."""
    size, last = pipeline.micro_batch_size, len(pipeline.stages) - 1
    stages = []
    for s, stage in enumerate(pipeline.stages):
        chunks = [end - first for first, end in stage.layers]
        parts = []
        for replica, samples in zip(stage.replicas, stage.samples(size), strict=True):
            tp_group = model.tp_group(replica.devices)
            seconds = [
                model.stage_s(tp_group, n, s == 0, s == last and whole, samples, stage.policy)
                for n, whole in ((chunks[0], len(chunks) == 1), (sum(chunks), True))
            ]
            parts.append(ReplicaWork(samples, seconds[0], seconds[1]))
        stages.append(parts)
    sends = []
    for a, b in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        here, there = [r.devices for r in a.replicas], [r.devices for r in b.replicas]
        sends.append(
            [
                (model.message_s(here[i], there[j], common), model.message_s(there[j], here[i], common))
                for i, j, common in sample_overlaps(a.samples(size), b.samples(size))
            ]
        )
    return ends_lower_bound_s(schedule, stages, sends, pipeline.num_chunks, pipeline.num_micro_batches)


@SETTINGS
@given(PLANS)
def test_no_replica_ends_before_its_floor(task: tuple[Problem, Plan]) -> None:
    problem, plan = task[0], one_policy(task[1])
    model = PlanPricer(problem)
    for pipeline, inside in zip(plan.pipelines, model.pipelines(plan), strict=True):
        alone = model.pipelines(Plan((pipeline,), plan.schedule))[0]
        floor = floor_of(model, pipeline, plan.schedule)
        assert all(low <= end * SLACK for low, end in zip(floor, alone.executor_end_s, strict=True))
        # And a pipeline alone is never slower than among others.
        assert all(a <= b * SLACK for a, b in zip(alone.executor_end_s, inside.executor_end_s, strict=True))


def test_the_floor_of_equal_stages_is_exact() -> None:
    """Two equal stages, 1F1B: fill, M turns, drain (Narayanan et al., PipeDream); GPipe as well."""
    stages = [[ReplicaWork(1, (1.0, 2.0), (1.0, 2.0))]] * 2
    assert ends_lower_bound_s(ONE_F_ONE_B, stages, [[(0.0, 0.0)]], 1, 5) == [18.0, 16.0]
    assert ends_lower_bound_s(GPIPE, stages, [[(0.5, 0.5)]], 1, 5) == [1.5 + 5 * 1 + 2 + 0.5 + 5 * 2, 1.5 + 5 * 3]


def ending(cost: PipelineCost, late: int | None, end_s: float) -> PipelineCost:
    """The pipeline with all replicas ending at once but number `late`, at `end_s`."""
    ends = tuple(end_s if k == late else 0.0 for k in range(len(cost.executor_end_s)))
    return replace(cost, executor_end_s=ends, end_s=max(ends))


@SETTINGS
@given(PLANS)
def test_tails_are_what_follows_each_end(task: tuple[Problem, Plan]) -> None:
    """One replica that ends late delays the step by what follows it: exactly, but for how the optimiser is sharded."""
    problem, plan = task[0], one_policy(task[1])
    model = PlanPricer(problem)
    costs = model.pipelines(plan)
    nothing = [ending(cost, None, 0.0) for cost in costs]
    late_s = 1.0 + model.price(plan, nothing).step_time_s
    most = holders(plan) if plan.sharding.stage else 1
    exact = plan.sharding == Sharding() or (plan.sharding.groups == "all" and most == len(plan.pipelines))
    for p, (cost, tails) in enumerate(zip(costs, tails_s(model, plan, most), strict=True)):
        last_s = [executor.last_backward_s for stage in cost.stages for executor in stage.executors]
        for k, after_s in enumerate([tail.step_s(0.0, own_s) for tail, own_s in zip(tails, last_s, strict=True)]):
            late = [*nothing[:p], ending(cost, k, late_s), *nothing[p + 1 :]]
            follows_s = model.price(plan, late).step_time_s - late_s
            assert after_s <= follows_s + 1e-9
            if exact:
                assert after_s == pytest.approx(follows_s, abs=1e-9)


@SETTINGS
@given(PLANS)
def test_sync_takes_no_less_than_its_floor(task: tuple[Problem, Plan]) -> None:
    problem, plan = task[0], one_policy(task[1])
    assume(len(problem.usable_by_machine) > 1)
    device_classes = DeviceClasses.of(problem)
    seat_of = {device: k for k, own in enumerate(device_classes.devices) for device in own}
    assignment = tuple(
        tuple(tuple(tuple(seat_of[d] for d in replica.devices) for replica in stage.replicas) for stage in p.stages)
        for p in plan.pipelines
    )
    cuts = [(tuple(stage.layers for stage in pipeline.stages),) for pipeline in plan.pipelines]
    groups = plan.sharding.groups if plan.sharding.stage else "all"
    assert isinstance(groups, str)
    floor_s = SyncBound(device_classes).seconds(assignment, groups, cuts)
    model = PlanPricer(problem)
    costs = model.pipelines(plan)
    if plan.sharding.stage < 2:  # from ZeRO-2 on rings run inside the pipelines
        costs = tuple(ending(cost, None, 0.0) for cost in costs)
    assert floor_s.shape == (1,)
    assert floor_s[0] <= model.price(plan, costs).step_time_s * SLACK


@SETTINGS
@given(PLANS)
def test_rooms_say_what_the_cost_model_says(task: tuple[Problem, Plan]) -> None:
    """The first of a chain that fits, unsharded; exactly, for every replica of every pipeline alone."""
    problem, plan = task[0], one_policy(task[1])
    model, policies = PlanPricer(problem), recompute_policies(problem.workload)
    rooms = LeastRecompute(model)
    for pipeline in plan.pipelines:
        count = len(pipeline.stages)
        for s, stage in enumerate(pipeline.stages):
            at = StagePosition(s, count, pipeline.num_micro_batches, pipeline.num_chunks)
            lengths = tuple(end - first for first, end in stage.layers)
            for chain in recompute_chains(policies, stage.num_layers, True):
                fits: dict[int, int] = {}
                for k, recompute in enumerate(chain):
                    stages = (*pipeline.stages[:s], replace(stage, recompute=recompute), *pipeline.stages[s + 1 :])
                    cost = model.pipelines(Plan((replace(pipeline, stages=stages),), plan.schedule))[0]
                    for r, replica_cost in enumerate(cost.stages[s].executors):
                        if replica_cost.excess_bytes <= 0:
                            fits.setdefault(r, k)
                for r, samples in enumerate(stage.samples(pipeline.micro_batch_size)):
                    tp_group = model.tp_group(stage.replicas[r].devices)
                    found = rooms.first_fits(tp_group, lengths, plan.schedule, at, StateSharding(), chain)
                    said = found[samples - 1] if samples <= len(found) else None
                    assert said == fits.get(r)

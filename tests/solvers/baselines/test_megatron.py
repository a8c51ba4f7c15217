"""Megatron-LM: its rules on layers, its space, and what it plans where the answer is known."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import Replica, Replicated
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, layer_ranges
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from hexiopt.solving import Budget
from hexiopt.solving.result import Result
from solvers.baselines._estimates import GridEstimates
from solvers.baselines.megatron import Megatron, MegatronLayers, _best_splits, _PipelineTimes
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import SPACES
from tests.solvers.baselines.random_plans import random_plans


@cache
def answer(problem: Problem) -> Result:
    return Megatron().solve(problem, Budget(3600.0))


def plan_for(problem: Problem) -> Plan:
    plan = answer(problem).plan
    assert plan is not None
    return plan


def pair(network_gb_per_s: float = 50.0, **workload: object) -> Problem:
    """Two equal machines of eight."""
    cluster = problems.cluster(("a100_80gb_sxm", 8, 200), ("a100_80gb_sxm", 8, 200), network_gb_per_s=network_gb_per_s)
    return Problem(cluster, problems.model("llama2_13b", 40), Workload(16, 2048, **workload))  # type: ignore[arg-type]


# Layers.


def splits(num_layers: int, stages: int, chunks: int = 1) -> Iterator[MegatronLayers]:
    """All splits that Megatron-LM accepts: every stage's layers divide into `chunks`."""
    total, rest = divmod(num_layers, chunks)
    if rest or total < stages:
        return
    if stages == 1:
        yield MegatronLayers(num_layers, 0, 0, chunks)
        return
    for middle in range(1, total if stages > 2 else 2):
        ends = total - middle * (stages - 2)
        for first in range(1, ends):
            yield MegatronLayers(first * chunks, middle * chunks if stages > 2 else 0, (ends - first) * chunks, chunks)


@given(st.data())
def test_the_best_split_is_the_best_of_all(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 5))
    chunks = data.draw(st.sampled_from((1, 1, 2))) if stages > 1 else 1
    num_layers = data.draw(st.integers(stages, 14)) * chunks
    seconds = st.floats(0.1, 5.0)
    added_s = [0.0] * stages
    for end in (0, -1):
        added_s[end] += data.draw(seconds)
    pipeline = _PipelineTimes(
        data.draw(st.lists(seconds, min_size=stages, max_size=stages)),
        data.draw(st.lists(seconds, min_size=stages, max_size=stages)),
        chunks * data.draw(st.integers(0, 4)),
        added_s,
        data.draw(st.lists(seconds, min_size=stages - 1, max_size=stages - 1)),
        data.draw(st.integers(1, 40)),
        chunks,
    )
    max_layers = data.draw(st.lists(st.integers(0, num_layers), min_size=stages, max_size=stages))
    even = data.draw(st.booleans())
    problem = Problem(
        problems.one_kind().cluster,
        problems.model("gpt2_345m", num_layers),
        Workload(8, 128),
        Space(uneven_layers=not even),
    )
    allowed = [
        pipeline.seconds(split.per_stage(stages))
        for split in splits(num_layers, stages, chunks)
        if all(n <= room for n, room in zip(split.per_stage(stages), max_layers, strict=True))
        and not (even and max(split.per_stage(stages)) - min(split.per_stage(stages)) > 1)
    ]
    best_splits = _best_splits(problem, pipeline, max_layers)
    assert bool(best_splits) == bool(allowed)
    if best_splits:
        assert best_splits[0][0] == pytest.approx(min(allowed))
        assert all(value == pytest.approx(pipeline.seconds(layers.per_stage(stages))) for value, layers in best_splits)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_rooms_of_blocks_against_the_price(chunks: int) -> None:
    """The most layers that fit where the first of every range recompute."""
    model = PlanPricer(pair())
    times, rooms = GridEstimates(model), set()
    stages = ((0, 1), (0, 3), (1, 3), (2, 3))  # stage, of how many
    for tp, size, (stage, count), block in itertools.product((1, 2), (1, 2), stages, (1, 3)):
        tp_group, at = model.tp_group(tuple(range(tp))), StagePosition(stage, count, 9, chunks)
        held, limit = in_flight(INTERLEAVED, at), tp_group.gpu.usable_memory_bytes

        def needed_bytes(length: int) -> float:
            each = (("full",) * min(length, block) + ("none",) * max(0, length - block)) * chunks  # noqa: B023
            memory = model.stages.memory_model(tp_group, size)  # noqa: B023
            return memory.stage_of_layers(each, at.first, at.last, held, StateSharding(1, 2)).total  # noqa: B023

        scan = next(n for n in itertools.count(1) if needed_bytes(n) > limit) - 1
        room = times.max_layers_by_stage([frozenset([tp_group])] * count, size, "full", 9, 2, chunks, block)[stage]
        assert room == scan * chunks
        rooms.add(room)
    assert len(rooms) > 3


# Its space.


@cache
def interleaved_case() -> tuple[Problem, Plan]:
    problem = pair(schedule="interleaved", optimizer_sharding="1")
    drawn = random_plans(SPACES["megatron"], problem, random.Random(0), 4000)
    plan = next(p for p in drawn if len(p.pipelines) == 2 and len(p.pipelines[0].stages) == 4)
    assert SPACES["megatron"].first_violation(problem, plan) is None
    return problem, plan


def change_pipeline(plan: Plan, at: int, **changes: object) -> Plan:
    """The plan with one pipeline changed."""
    lines = list(plan.pipelines)
    lines[at] = replace(lines[at], **changes)  # type: ignore[arg-type]
    return replace(plan, pipelines=tuple(lines))


def test_what_is_not_in_its_space() -> None:
    problem, plan = interleaved_case()
    line = plan.pipelines[0]
    stage = line.stages[0]
    others = line.stages[1:]
    line_1 = plan.pipelines[1]
    other = line_1.stages[0]
    replicas = Replica(stage.devices, 1), Replica(other.devices, 1)
    together = replace(stage, parallelism=Replicated(replicas))
    recomputed = replace(stage, recompute=("full" if stage.policy != "full" else "none",))
    chunks, counts = line.num_chunks, [each_stage.num_layers for each_stage in line.stages]
    flat, moved = (
        [replace(old, layers=layers, recompute=(old.policy,)) for old, layers in zip(line.stages, ranges, strict=True)]
        for ranges in (
            layer_ranges(counts, 1),
            layer_ranges([counts[0] + chunks, counts[1] - chunks, *counts[2:]], chunks),
        )
    )
    last_ones = replace(stage, recompute=(*["none"] * (stage.num_layers - 1), "full"))
    rules = {
        "schedule": replace(plan, pipelines=(replace(line, stages=tuple(flat)),), schedule=GPIPE),
        "ZeRO-1 over machine": replace(plan, sharding=Sharding(1, "machine")),
        "replicated": replace(plan, pipelines=(replace(line, stages=(together, *others), micro_batch_size=2),)),
        "unequal batches": change_pipeline(plan, 0, num_micro_batches=2 * line.num_micro_batches),
        "different layers": change_pipeline(plan, 0, stages=tuple(moved)),
        "several recompute policies": change_pipeline(plan, 0, stages=(recomputed, *others)),
        "not full of the first": change_pipeline(plan, 0, stages=(last_ones, *others)),
        "not the ranks of a grid": replace(
            plan,
            pipelines=(
                replace(line, stages=(other, *others)),
                replace(line_1, stages=(stage, *line_1.stages[1:])),
            ),
        ),
    }
    for word, broken in rules.items():
        assert word in (SPACES["megatron"].first_violation(problem, broken) or ""), word


def test_a_middle_stage_has_as_many_layers_as_the_others() -> None:
    problem = problems.one_kind()
    for per_stage, allowed in (((2, 4, 4, 14), True), ((2, 5, 4, 13), False)):
        ends = [sum(per_stage[:k]) for k in range(5)]
        stages = tuple(Stage.of((2 * k, 2 * k + 1), ends[k], ends[k + 1]) for k in range(4))
        plan = Plan((Pipeline(stages, 32),), ONE_F_ONE_B, plan_for(problem).sharding)
        assert (SPACES["megatron"].first_violation(problem, plan) is None) == allowed


# What it plans.


def test_tensor_parallelism_stays_in_a_machine_and_pipelines_cross_the_network() -> None:
    """On a slow network every gradient ring and TP group of a homogeneous cluster is inside a machine."""
    problem = pair(network_gb_per_s=1.25)
    plan = plan_for(problem)
    machine_of = problem.cluster.machine_of
    for stage_groups in zip(*(line.stages for line in plan.pipelines), strict=True):
        assert len({int(machine_of[d]) for stage in stage_groups for d in stage.devices}) == 1
    assert {int(machine_of[d]) for d in plan.devices()} == {0, 1}


def test_slow_machines_are_left_out_where_the_network_is_slow() -> None:
    problem = problems.slow_network()
    plan = plan_for(problem)
    assert {problem.cluster.gpu_of(d).name for d in plan.devices()} == {"rtx_4090"}


def test_few_micro_batches_are_interleaved() -> None:
    assert plan_for(pair()).schedule == INTERLEAVED
    assert answer(pair()).objective < answer(pair(schedule="1f1b")).objective


def test_gpipe_is_not_its_schedule() -> None:
    result = Megatron().solve(pair(schedule="gpipe"), Budget(3600.0))
    assert result.plan is None
    assert result.reason


def test_layers_in_chunks_stand_in_virtual_order() -> None:
    problem, plan = interleaved_case()
    for line in plan.pipelines:
        ranges = [layers for turn in zip(*(stage.layers for stage in line.stages), strict=True) for layers in turn]
        assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == problem.model.num_layers
    assert MegatronLayers(4, 2, 6, 2).per_stage(4) == (4, 2, 2, 6)

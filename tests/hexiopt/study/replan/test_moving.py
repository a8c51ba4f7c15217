"""What a change of plans moves: by hand, against atoms counted one by one, and over networks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan.holdings import Interval
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.study.replan.moving import Moving, Transfer, _missing, _shard, moving
from tests.models import TINY
from tests.solvers.problems import BATCH_OF_4, cluster

ATOMS = 24  # of a unit
GPUS = cluster(("a", "fast", 2), ("b", "slow", 2), network_gb_per_s=10.0)
PROBLEM = Problem(GPUS, TINY, BATCH_OF_4, Space())
STATES = 2 + 4 + 8  # bytes of a parameter: bf16, FP32 master weight, two moments


def stages(*groups: tuple[int, ...], layers: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    counts = layers or (TINY.num_layers // len(groups),) * len(groups)
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return tuple(Stage.of(group, end - n, end) for group, end, n in zip(groups, ends, counts, strict=True))


def plan(*pipelines: tuple[Stage, ...], zero: int = 0, groups: str = "all") -> Plan:
    return Plan(
        tuple(Pipeline(pipeline_stages, 4 // len(pipelines)) for pipeline_stages in pipelines),
        sharding=Sharding(zero, groups),
    )


def test_the_same_plan_moves_nothing() -> None:
    for zero in (0, 1):
        same = plan(stages((0,), (1,)), stages((2,), (3,)), zero=zero)
        assert moving(PROBLEM, same, PROBLEM, same) == Moving(PROBLEM, (), from_checkpoint=False)


def test_layers_come_from_who_has_them() -> None:
    """One layer moves from device 0 to device 1 of one pipeline: that layer's states, over the machine's link."""
    before, after = (plan(stages((0,), (1,), layers=(n, TINY.num_layers - n))) for n in (2, 1))
    moved = moving(PROBLEM, before, PROBLEM, after)
    size = float(STATES * TINY.layer_params)
    assert moved.transfers == (Transfer(1, 0, size),)
    assert moved.seconds() == pytest.approx(size / 25e9)


def test_frozen_weights_move_as_stored_with_adapters_and_their_moments() -> None:
    """A device that joins a pipeline reads its layers' frozen bytes, and of an adapter 4 bytes of weight and 8 of
    moments."""
    lora = {"training": "lora", "lora": {"storage": "nf4", "rank": 2}}
    problem = replace(PROBLEM, workload=PROBLEM.workload.replace(**lora))
    before, after = (plan(stages((0,), (1,), layers=(n, TINY.num_layers - n))) for n in (2, 1))
    vectors, adapters = TINY.layer.vectors.whole, problem.parameters.layer_params
    expected = 0.5625 * (TINY.layer_params - vectors) + problem.workload.element_bytes * vectors + 12 * adapters
    assert moving(problem, before, problem, after).num_bytes == pytest.approx(expected)


def test_a_copy_in_the_same_machine_is_nearer() -> None:
    before = plan(stages((0,)), stages((2,)))
    moved = moving(PROBLEM, before, PROBLEM, plan(stages((1,)), stages((3,))))
    assert {(transfer.device, transfer.source) for transfer in moved.transfers} == {(1, 0), (3, 2)}
    assert moved.num_bytes == pytest.approx(2 * STATES * TINY.num_params)


def test_tensor_parallel_ranks_fetch_their_part() -> None:
    moved = moving(PROBLEM, plan(stages((0,))), PROBLEM, plan(stages((0, 2))))
    assert [(transfer.device, transfer.source) for transfer in moved.transfers] == [(2, 0)]
    assert moved.num_bytes == pytest.approx(STATES * TINY.num_params / 2)
    assert moved.seconds() == pytest.approx(moved.num_bytes / 10e9)


def test_a_lost_shard_sends_all_back_to_a_checkpoint() -> None:
    """Under ZeRO-1 nobody else has a device's moments; under ZeRO-0 the other pipeline has all."""
    less = PROBLEM.replace(space=Space(exclude=("b:1",)))
    for zero, lost in ((0, False), (1, True)):
        before = plan(stages((0,)), stages((2,)), stages((1,)), stages((3,)), zero=zero)
        after = plan(stages((0,)), stages((2,)), zero=zero)
        moved = moving(PROBLEM, before, less, after)
        assert moved.from_checkpoint == lost
        assert all((transfer.source is None) == lost for transfer in moved.transfers)
        assert moved.num_bytes == pytest.approx(2 * 2 * TINY.num_params + 12 * TINY.num_params if lost else 0.0)
    read = Moving(PROBLEM, (Transfer(0, None, 6e9), Transfer(1, None, 4e9)), from_checkpoint=True)
    assert read.seconds() == pytest.approx(1.0)
    assert read.seconds(checkpoint_gb_per_s=2.0) == pytest.approx(5.0)
    assert read.seconds(checkpoint_gb_per_s=1000.0) == pytest.approx(1.0), "no faster than the interfaces"


def test_a_new_last_stage_fetches_the_tied_matrix() -> None:
    """The first stage has it already, and the last one needs it for the head."""
    problem = PROBLEM.replace(model=replace(TINY, tied_embeddings=True))
    moved = moving(problem, plan(stages((0,), (1,))), problem, plan(stages((0,), (2,))))
    half = problem.model.layer_params * TINY.num_layers // 2
    assert moved.num_bytes == STATES * (half + problem.model.vocabulary_params + problem.model.head_params)


def test_a_wider_zero_group_takes_its_shards_from_all_holders() -> None:
    before, after = plan(stages((0,)), stages((1,)), zero=1), plan(stages((0,)), stages((1,)), stages((2,)), zero=1)
    moved = moving(PROBLEM, before, PROBLEM, after)
    # Device 1 holds [1/2, 1) of the moments and needs [1/3, 2/3); device 2 needs [2/3, 1) and all weights.
    moments, weights = 12.0 * TINY.num_params, 2.0 * TINY.num_params
    fetched = {device: sum(t.num_bytes for t in moved.transfers if t.device == device) for device in (1, 2)}
    assert fetched == pytest.approx({1: moments / 6, 2: moments / 3 + weights})


@st.composite
def holdings(draw: st.DrawFn) -> list[Interval]:
    """Up to six devices with one interval each."""
    intervals = []
    for device in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        start = draw(st.integers(0, ATOMS - 1))
        intervals.append((device, start / ATOMS, draw(st.integers(start + 1, ATOMS)) / ATOMS))
    return intervals


def atoms(held: list[Interval]) -> dict[int, list[int]]:
    """Who holds each atom."""
    return {k: [device for device, start, end in held if start < (k + 0.5) / ATOMS < end] for k in range(ATOMS)}


@given(holdings(), holdings())
def test_missing_parts_are_those_of_atoms(have: list[Interval], needs: list[Interval]) -> None:
    expected: dict[tuple[int, tuple[int, ...]], int] = {}
    holders = atoms(have)
    for k, wanting in atoms(needs).items():
        for device in wanting:
            if device not in holders[k]:
                key = device, tuple(holders[k])
                expected[key] = expected.get(key, 0) + 1
    missing = {(device, sources): part * ATOMS for device, sources, part in _missing(have, needs)}
    assert missing == pytest.approx(expected)


@given(holdings(), st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_shards_cut_what_is_held_once_in_each_group(held: list[Interval], groups: list[int]) -> None:
    """In each group every part that somebody holds is in exactly one shard, of somebody who holds it."""
    shards = _shard(held, groups)
    for group in set(groups):
        intervals = [interval for interval in held if groups[interval[0]] == group]
        covered = sum(1 for wanting in atoms(intervals).values() if wanting) / ATOMS
        assert sum(end - start for device, start, end in shards if groups[device] == group) == pytest.approx(covered)
    for device, start, end in shards:
        assert any(holder == device and a - 1e-9 <= start and end <= b + 1e-9 for holder, a, b in held)

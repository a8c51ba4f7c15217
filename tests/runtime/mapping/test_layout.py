"""Layouts of thousands of random plans: everything is held, sent and worked on exactly once."""

import random
from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from hexiopt.cost.extra_communicators import gradient_groups
from hexiopt.cost.rings import gradient_rings
from hexiopt.errors import InputError
from hexiopt.exports.trainable import untrainable
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.form import LLAMA
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import holding, in_flight
from hexiopt.schedules.registry import SCHEDULES
from hexiopt.schedules.schedule import Schedule, StagePosition, operations
from runtime.mapping.layout import layout_of
from runtime.mapping.parts import shards, split
from tests.runtime.ranks import CLUSTER, random_model, random_plan, random_sequence_plan
from tests.slow import slow_but

SEQ_LEN = 13
SEEDS = [range(first, first + 250) for first in range(0, 2000, 250)]


def random_case(seed: int) -> tuple[Plan, ModelSpec, int]:
    """Every second plan has sequence layouts."""
    rng = random.Random(seed)
    return random_sequence_plan(rng, SEQ_LEN, 12, 9) if seed % 2 else random_plan(rng, 12, 9)


@pytest.mark.parametrize("seeds", slow_but(SEEDS[:1], SEEDS), ids=str)
def test_every_element_is_held_by_those_who_should(seeds: range) -> None:
    for seed in seeds:
        plan, model, _ = random_case(seed)
        layout = layout_of(plan, model)
        held = [part for same in layout.held for part in same.parts]
        assert sum(prod(part.local_shape) for part in held) == model.num_params
        slices = Counter((part.name, part.start, part.end) for part in held)
        assert max(slices.values()) == 1
        for rank, executor in enumerate(layout.executor_of):
            parts = {part.name: part for part in executor.parts(model, rank)}
            mine = [part for same in layout.held if rank in same.ranks for part in same.parts]
            assert sum(prod(p.local_shape) for p in mine) == sum(prod(p.local_shape) for p in parts.values())
            assert all(parts[p.name].start <= p.start and p.end <= parts[p.name].end for p in mine)


@pytest.mark.parametrize("seeds", slow_but(SEEDS[1:2], SEEDS[:4]), ids=str)
def test_every_hidden_state_comes_once_and_from_who_has_it(seeds: range) -> None:
    for seed in seeds:
        plan, model, _ = random_case(seed)
        for line in layout_of(plan, model).lines:
            count = len(line.stages)
            for chunk in range(count * line.num_chunks - 1):
                routes = line.routes(chunk, SEQ_LEN)
                for stages, is_sender in (
                    (line.stages[chunk % count], True),
                    (line.stages[(chunk + 1) % count], False),
                ):
                    for executor in stages:
                        for rank, tokens in zip(executor.ranks, executor.tokens(SEQ_LEN), strict=True):
                            met = np.zeros((SEQ_LEN, line.micro_batch_size), int)
                            for route in routes:
                                if rank == (route.sender if is_sender else route.receiver):
                                    for run in route.tokens:
                                        met[slice(*run), slice(*route.samples)] += 1
                            want = np.zeros_like(met)
                            for run in tokens:
                                want[slice(*run), slice(*executor.samples)] = 1
                            assert (met == want).all()


@pytest.mark.parametrize("seeds", slow_but(SEEDS[2:3], SEEDS[:4]), ids=str)
def test_every_token_is_embedded_and_has_its_loss_once(seeds: range) -> None:
    """By a TP group together, or by one rank of a sequence layout, which also are its owners between layers."""
    for seed in seeds:
        plan, model, _ = random_case(seed)
        for line in layout_of(plan, model).lines:
            for stage in (line.stages[0], line.stages[-1]):
                read = np.zeros((SEQ_LEN, line.micro_batch_size), int)
                for executor in stage:
                    for rank in executor.ranks if executor.sequence else executor.ranks[:1]:
                        for run in executor.reads(rank, SEQ_LEN):
                            read[slice(*run), slice(*executor.samples)] += 1
                    if executor.sequence is None:
                        assert {executor.reads(rank, SEQ_LEN) for rank in executor.ranks} == {((0, SEQ_LEN),)}
                    else:
                        assert [executor.reads(rank, SEQ_LEN) for rank in executor.ranks] == [*executor.tokens(SEQ_LEN)]
                assert (read == 1).all()


def test_groups_are_those_of_each_sequence_layout() -> None:
    """Devices of a plan stand in any order; ranks of a group ascend, with their own tokens."""
    model = replace(random_model(random.Random(0), 1), num_kv_heads=2)
    groups = (SequenceGroup((9, 2), (3, 1), (2, 4)), SequenceGroup((5,), (9,), (6,)))
    stage = Stage(SequenceParallel(groups, "zigzag"), ((0, 1),), ("none",))
    (executor,) = layout_of(Plan((Pipeline((stage,), 1),)), model).lines[0].stages[0]
    assert executor.ranks == (0, 1, 2)
    assert executor.tokens(SEQ_LEN) == (((2, 3),), ((3, 12),), ((0, 2), (12, 13)))
    assert list(executor.groups()) == [(0, 1, 2), (0, 2), (1,)]
    assert layout_of(Plan((Pipeline((stage,), 1),)), model).groups() == [(0, 1, 2), (0, 2)]


def test_channels_are_those_of_the_memory_model() -> None:
    """Groups that sum gradients and pairs have bounds, TP groups NCCL's own channels. The price of a plan counts
    about as many groups: these ranks cut at whole heads and columns, of which small models have few, it into equal
    parts.
    """
    alike = 0
    for seed in range(0, 400, 2):
        plan, model, _ = random_case(seed)
        plan = replace(plan, sharding=Sharding(0))
        layout = layout_of(plan, model)
        channels = layout.channels(SEQ_LEN)
        assert set(channels.pairs) == set(layout.pairs(SEQ_LEN))
        inside = {ranks for executor in layout.executor_of for ranks in executor.groups()}
        assert set(channels.groups) == set(layout.groups()) - inside
        number = Counter(layout.devices[rank] for ranks in channels.groups for rank in ranks)
        uncut = all(
            len(holders) == 1
            for line in plan.pipelines
            for s in line.stages
            for holders in s.parallelism.parameter_copies
        )
        for device, counted in gradient_groups(
            plan, gradient_rings(plan, None, model.parameter_groups, CLUSTER)
        ).items():
            predicted = number[device]
            assert counted == predicted if uncut else 0.4 * predicted <= counted <= predicted + 2
            alike += counted == predicted
    assert alike > 450


def test_sharding_groups_sum_every_element_once() -> None:
    """Each group has a share of every element on one rank; those ranks sum it between them."""
    for seed in range(500):
        plan, model, _ = random_case(seed)
        for held in layout_of(plan, model, CLUSTER).held:
            assert sorted(rank for group in held.groups for rank in group) == list(held.ranks)
            pieces = held.between()
            assert bool(pieces) == (len(held.groups) > 1)
            for k, (ranks, first, end, units) in enumerate(pieces):
                assert first == (pieces[k - 1][2] if k else 0)
                for unit in range(first, end):
                    owners = {group[unit * len(group) // units] for group in held.groups}
                    assert owners == set(ranks)
            assert not pieces or pieces[-1][2] == pieces[-1][3]


def test_pipelines_share_the_batch_in_order() -> None:
    for seed in range(500):
        plan, model, batch = random_case(seed)
        at = 0
        for line in layout_of(plan, model).lines:
            assert line.first_sample == at
            at += line.num_micro_batches * line.micro_batch_size
            for executors in line.stages:
                ends = [0, *(executor.samples[1] for executor in executors)]
                assert [executor.samples[0] for executor in executors] == ends[:-1]
                assert ends[-1] == line.micro_batch_size
        assert at == batch


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_stage_does_everything_once_and_in_order(schedule: Schedule) -> None:
    for count in range(1, 6):
        for chunks in range(1, 4 if schedule.chunked and count > 1 else 2):
            for batches in range(1, 9):
                if chunks > 1 and batches % count:
                    continue
                for stage in range(count):
                    at = StagePosition(stage, count, batches, chunks)
                    order = operations(schedule, at)
                    assert len(order) == len(set(order)) == 2 * chunks * batches
                    for chunk in range(chunks):
                        for backward in (False, True):
                            micro_batches = [
                                op.micro_batch for op in order if (op.chunk, op.backward) == (chunk, backward)
                            ]
                            assert micro_batches == list(range(batches))
                        forwards = [order.index(op) for op in order if op.chunk == chunk and not op.backward]
                        backwards = [order.index(op) for op in order if op.chunk == chunk and op.backward]
                        assert all(f < b for f, b in zip(forwards, backwards, strict=True))
                    if chunks == 1:
                        held = np.cumsum([-1 if op.backward else 1 for op in order])
                        assert in_flight(schedule, at) == holding(held.max())


def test_heads_are_cut_whole() -> None:
    model = replace(random_model(random.Random(0), 2), num_kv_heads=2)
    even, odd = shards(model, 4), shards(model, 3, (1, 4, 1))
    assert [shard.share(6) for shard in even] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert [shard.groups(6, 2) for shard in even] == [(0, 1), (0, 2), (1, 2), (1, 2)]
    assert [shard.share(6) for shard in odd] == [(0, 1), (1, 5), (5, 6)]
    assert [shard.groups(6, 2) for shard in odd] == [(0, 1), (0, 2), (1, 2)]
    assert split(7, 3) == [(0, 3), (3, 5), (5, 7)]
    with pytest.raises(InputError, match=r"heads: \[5, 2\] over 2 devices"):
        shards(model, 2, (5, 2))


TWO_DEVICES = {"pipelines": (Pipeline((Stage.of((0, 1), 0, 2),), 1),)}


@pytest.mark.parametrize(
    ("plan", "model", "workload", "message"),
    [
        ({"sharding": Sharding(3)}, {}, {}, None),
        (
            {},
            {"architecture": "decoder", "form": LLAMA},
            {},
            "its type cannot be trained, only planned; take the config.json of one of llama",
        ),
        ({}, {"activation": "xielu"}, {}, "activation xielu cannot be trained"),
        ({}, {"rope_type": "yarn"}, {}, "rope_type yarn: its parameters are not stated"),
        ({}, {"config": '{"rope_scaling": {"rope_type": "dynamic"}}'}, {}, "take one of default, linear"),
        ({}, {}, {"precision": "fp16"}, "fp16 cannot be trained"),
        ({}, {}, {"training": "lora", "lora": {"storage": "nf4"}}, "nf4 cannot be trained, only planned"),
        ({}, {}, {"optimizer": "lion"}, "workload.optimizer: lion cannot be trained, only planned, as torch does not"),
        (TWO_DEVICES, {}, {"sequence_parallel": False}, "sequence_parallel: false cannot be trained with tensor"),
        ({}, {}, {"sequence_parallel": False}, None),
        ({}, {}, {}, None),
    ],
)
def test_what_cannot_be_trained_is_said(
    plan: dict[str, object], model: dict[str, object], workload: dict[str, object], message: str | None
) -> None:
    shape = replace(random_model(random.Random(0), 2), **{"architecture": "llama", "attention_window": None, **model})
    whole = Plan((Pipeline((Stage.of((0,), 0, 2),), 1),))
    refusal = untrainable(shape, Workload(1, SEQ_LEN, **{"precision": "fp32", **workload}), replace(whole, **plan))
    assert refusal is None if message is None else message in str(refusal)

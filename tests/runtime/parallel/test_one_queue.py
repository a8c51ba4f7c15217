"""The trainer, unchanged, over NCCL's order: plans train as one process does; hazards, put back, are known for what
they are."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from runtime.device import DeviceClock
from runtime.mapping import buckets as buckets_module
from runtime.mapping.actions import RankActions, check_actions, rank_actions
from runtime.mapping.buckets import BucketCollective, CollectiveKind, bucket_parts
from runtime.mapping.layout import Layout, layout_of
from runtime.mapping.lowering import Action, ActionKind
from runtime.network import ProcessGroups
from runtime.training import trainee as trainee_module
from tests.conftest import STRESS
from tests.runtime.mapping.test_lowering import one_ahead
from tests.runtime.parallel.test_host_waits import MODEL, plan_of
from tests.runtime.parallel.test_sequence_training import SEQ_LEN as LONG
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, equal_one_process, features, trainee
from tests.runtime.ranks import CLUSTER, random_aligned_plan, random_plan, random_sequence, random_sequence_plan
from tests.runtime.stream_order import HungError, run_in_order, synchronize
from tests.slow import slow_but

QUICK, SLOW, ALL = 18, 60, 160  # plans without sequence layouts
QUICK_LONG, SLOW_LONG, ALL_LONG = 7, 20, 60  # with them
WAYS: tuple[dict[str, bool], ...] = ({}, {}, {"lazy": True}, {"one_queue": False})


def small(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_plan(random.Random(1000 + seed), 5 if seed < QUICK else 8)


def small_long(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_sequence_plan(random.Random(1000 + seed), LONG, 4 if seed < QUICK_LONG else 6)


@pytest.mark.parametrize("seed", slow_but(range(QUICK), range(ALL if STRESS else SLOW)))
def test_a_plan_trains_as_one_process_over_one_queue(seed: int) -> None:
    """Every fourth with communicators made at first use, every fourth with a queue for each instead."""
    equal_one_process(small(seed), 4 if STRESS else 1, SEQ_LEN, partial(run_in_order, **WAYS[seed % 4]))


@pytest.mark.parametrize("seed", slow_but(range(QUICK_LONG), range(ALL_LONG if STRESS else SLOW_LONG)))
def test_a_plan_with_sequence_layouts_trains_over_one_queue(seed: int) -> None:
    equal_one_process(small_long(seed), 4 if STRESS else 1, LONG, run_in_order)


def test_the_quick_ones_have_what_matters() -> None:
    plan_features = set().union(*(features(*small(seed)[:2]) for seed in range(QUICK)))
    wanted = {"gpipe", "1f1b", "interleaved", "layer ranges", "replicas", "TP 2", "TP 3", "2 pipelines", "4 stages"}
    wanted |= {"tied embeddings on different stages", "unequal micro-batches", "fewer micro-batches than stages"}
    wanted |= {"ZeRO-0 over all", "ZeRO-1 over all", "ZeRO-1 over machine", "ZeRO-1 over stated", "uneven heads"}
    assert wanted <= plan_features


# ------------------------------------------------------------------ hazards, put back

Change = Callable[[Layout, list[RankActions]], Sequence[RankActions]]
TWO_STAGES = plan_of(ONE_F_ONE_B, 2, 1, 4)
ONCE = plan_of(ONE_F_ONE_B, 2, 1, 1)
BESIDE_ONE = Plan(  # a pipeline of two stages beside one of a single stage
    (
        Pipeline((Stage.of((0,), 0, 8),), 2),
        Pipeline((Stage.of((1,), 0, 4), Stage.of((2,), 4, 8)), 2),
    ),
    ONE_F_ONE_B,
)


class WaitingClock(DeviceClock):
    """Synchronises with the device before it looks."""

    def mark(self) -> float:
        synchronize()
        return super().mark()


def train(plan: Plan, change: Change | None = None, *, waits: bool = False, warm: bool = True, **order: bool) -> None:
    """Two steps over `stream_order`, of actions that are changed after they have been checked."""
    batch = sum(pipeline.num_sequences for pipeline in plan.pipelines)

    def change_actions(layout: Layout, *arguments: Any, **more: Any) -> Sequence[RankActions]:
        actions = rank_actions(layout, *arguments, **more)
        return actions if change is None else change(layout, actions)

    def work(rank: int) -> None:
        rank_trainee = trainee(plan, MODEL, batch)
        tokens = torch.randint(MODEL.vocab_size, (batch, SEQ_LEN + 1))
        for _ in range(2):
            rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)

    with (
        patch.object(trainee_module, "rank_actions", change_actions),
        patch.object(trainee_module, "clock_of", lambda device: WaitingClock() if waits else DeviceClock()),
        patch.object(ProcessGroups, "_warm", ProcessGroups._warm if warm else lambda self, device: None),
    ):
        run_in_order(len(plan.devices()), work, **order)


def looks_one_ahead(layout: Layout, actions: list[RankActions]) -> list[RankActions]:
    return [one_ahead(order) for order in actions]


def first_rank_sums_backwards(layout: Layout, actions: list[RankActions]) -> list[RankActions]:
    """One rank starts the sums of its gradients in another order than its peers."""
    sums = iter([action for action in reversed(actions[0]) if isinstance(action, BucketCollective)])
    first = tuple(next(sums) if isinstance(action, BucketCollective) else action for action in actions[0])
    return [first, *actions[1:]]


@pytest.mark.parametrize("plan", [TWO_STAGES, BESIDE_ONE, plan_of(INTERLEAVED, 2, 2, 4), plan_of(GPIPE, 3, 1, 3)])
def test_a_host_may_wait_for_all_after_every_operation(plan: Plan) -> None:
    """Whatever the order of communicators: what it waits for does not depend on what it has yet to do."""
    for order in ({"one_queue": True}, {"one_queue": False}):
        train(plan, waits=True, **order)


def test_a_clock_that_synchronises_with_the_next_receive_posted_hangs() -> None:
    """The host waits for its next input, which the peer sends once it has what this rank has yet to send."""
    train(TWO_STAGES, looks_one_ahead, one_queue=False)  # as long as nothing waits
    with pytest.raises(
        HungError, match=r"rank 0 synchronises, and so waits for 0RECV_B0: receive from 1: rank 1 has not come to it"
    ):
        train(TWO_STAGES, looks_one_ahead, one_queue=False, waits=True)


def test_a_receive_posted_one_operation_ahead_hangs_in_one_queue() -> None:
    with pytest.raises(HungError) as hung:
        train(TWO_STAGES, looks_one_ahead)
    assert str(hung.value).splitlines() == [
        "rank 0 waits for 0RECV_B0: receive from 1: rank 1 has it behind 1RECV_F1: receive from 0",
        "rank 1 waits for 1RECV_F1: receive from 0: rank 0 has it behind 0RECV_B0: receive from 1",
    ]


def test_communicators_made_when_first_used_hang_where_receives_look_ahead() -> None:
    with pytest.raises(HungError, match=r"rank 0 makes the communicator of ranks \(0, 1\): not there are ranks \[1\]"):
        train(ONCE, looks_one_ahead, one_queue=False, lazy=True, warm=False)
    train(ONCE, looks_one_ahead, one_queue=False, lazy=True)  # all made before the first step, in one order
    train(ONCE, one_queue=False, lazy=True, warm=False)  # actions in one order make them in it, too


def test_sums_started_in_another_order_hang() -> None:
    with pytest.raises(
        HungError, match=r"rank \d's sum of gradient bucket \d+: .* meets rank \d's sum of gradient bucket \d+"
    ):
        train(BESIDE_ONE, first_rank_sums_backwards)


@pytest.mark.parametrize(
    ("plan", "change", "message"),
    [
        (
            TWO_STAGES,
            looks_one_ahead,
            "rank 0 waits in gradients back to 0F0 of pipeline 0 from rank 1 to 0",
        ),
        (BESIDE_ONE, first_rank_sums_backwards, r"rank 0 waits in sum of gradient bucket \d+ for rank \d, which is at"),
    ],
)
def test_the_check_before_a_run_finds_them_too(plan: Plan, change: Change, message: str) -> None:
    layout = layout_of(plan, MODEL)
    actions = rank_actions(layout, plan.schedule, MODEL, SEQ_LEN, bucket_parts(layout.held, 0))
    check_actions(layout, SEQ_LEN, actions)
    with pytest.raises(InputError, match=message):
        check_actions(layout, SEQ_LEN, change(layout, actions))


# ------------------------------------------------------------------ ZeRO-2 and 3

QUICK_LOCKSTEP, SLOW_LOCKSTEP, ALL_LOCKSTEP = 10, 60, 200


def small_aligned(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_aligned_plan(random.Random(4000 + seed), 5 if seed < QUICK_LOCKSTEP else 8)


@pytest.mark.parametrize("seed", slow_but(range(QUICK_LOCKSTEP), range(ALL_LOCKSTEP if STRESS else SLOW_LOCKSTEP)))
def test_a_plan_of_zero_2_or_3_trains_as_one_process_over_one_queue(seed: int) -> None:
    """Gradients and losses to 1e-13; the loss of the second step and later ones follows from the weights' updates."""
    errors = equal_one_process(
        small_aligned(seed), 4 if STRESS else 2, SEQ_LEN, partial(run_in_order, **WAYS[seed % 4])
    )
    assert max(errors) <= 1e-13


@pytest.mark.parametrize("zero", [2, 3])
def test_sequence_layouts_share_whole_units(zero: int) -> None:
    """Each rank of a layout has its own tokens and a share of every layer of its stage; so have those of a pipeline
    beside it."""
    rng, devices = random.Random(zero), iter(range(6))
    pipelines = []
    for count in (2, 1):
        slots = [tuple(next(devices) for _ in range(count)) for _ in range(2)]
        stages = tuple(
            Stage(random_sequence(rng, held, LONG, MODEL.num_heads) if count > 1 else TensorParallel(held), layers)
            for held, layers in zip(slots, (((0, 3),), ((3, 8),)), strict=True)
        )
        pipelines.append(Pipeline(stages, 2))
    plan = Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(zero))
    assert max(equal_one_process((plan, MODEL, 4), 2, LONG, run_in_order)) <= 1e-13


def test_the_quick_ones_of_zero_2_and_3_have_what_matters() -> None:
    plan_features = set().union(*(features(*small_aligned(seed)[:2]) for seed in range(QUICK_LOCKSTEP)))
    wanted = {"gpipe", "1f1b", "replicas", "TP 2", "2 pipelines", "2 stages", "3 stages", "none", "selective", "full"}
    wanted |= {"tied embeddings on different stages", "unequal sizes", "ZeRO-2 over all", "ZeRO-3 over all"}
    wanted |= {"ZeRO-3 over machine", "ZeRO-3 over stated", "uneven heads"}
    assert wanted <= plan_features, wanted - plan_features


def in_lockstep(zero: int) -> Plan:
    """Two pipelines of two stages, with three micro-batches each."""
    pipelines = (Pipeline((Stage.of((first,), 0, 4), Stage.of((first + 1,), 4, 8)), 3) for first in (0, 2))
    return Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(zero))


def last_batch_is_left_out(layout: Layout, actions: list[RankActions]) -> list[RankActions]:
    """Of the second pipeline, as if it had one micro-batch less than the first: with all that it does for it."""
    left = []
    for rank, order in enumerate(actions):
        last = layout.line_of[rank].num_micro_batches - 1
        # Gathers stand before what they are for, scatters after it.
        remaining: list[Action | BucketCollective] = []
        gathers: list[BucketCollective] = []
        skips = False
        for action in order:
            if isinstance(action, BucketCollective) and action.kind is CollectiveKind.GATHER:
                gathers.append(action)
            elif isinstance(action, BucketCollective):
                remaining += [] if skips and action.kind is CollectiveKind.SCATTER else [action]
            else:
                skips = action.micro_batch == last and layout.executor_of[rank].pipeline == 1
                remaining += [] if skips else [*gathers, action]
                gathers = []
        left.append(tuple(remaining))
    return left


@pytest.mark.parametrize("zero", [2, 3])
def test_unequal_counts_of_micro_batches_hang_and_are_found_before(zero: int) -> None:
    """Pipelines with three and two of them: what the first does for its third meets what the second does next."""
    plan = in_lockstep(zero)
    description = rf"{'gather of weight' if zero == 3 else 'scatter of gradient'} bucket \d+"
    with pytest.raises(
        HungError, match=rf"rank \d's .*{description}: .*of ranks .* meets rank \d's|meets rank \d's {description}"
    ):
        train(plan, last_batch_is_left_out)
    layout = layout_of(plan, MODEL, CLUSTER)
    actions = rank_actions(layout, plan.schedule, MODEL, SEQ_LEN, bucket_parts(layout.held, zero))
    with pytest.raises(
        InputError, match=rf"a step would hang: .*rank \d waits in {description} for rank \d, which is at"
    ):
        check_actions(layout, SEQ_LEN, last_batch_is_left_out(layout, actions))


def test_unequal_counts_put_into_a_plan_are_refused_with_one_line() -> None:
    """By the plan; and were that left out, before the first step."""
    short, long = (Pipeline((Stage.of((d,), 0, 8),), count) for d, count in ((0, 2), (1, 3)))
    with pytest.raises(InputError, match="ZeRO-3 over pipelines of unequally many micro-batches; give all as many"):
        Plan((short, long), ONE_F_ONE_B, Sharding(3))
    with patch.object(Sharding, "broken_rule", lambda *_: None):
        plan = Plan((short, long), ONE_F_ONE_B, Sharding(3))
    layout = layout_of(plan, MODEL, CLUSTER)
    with pytest.raises(InputError, match="a step would hang: stage 0 of pipeline 1, with 3 micro-batches, gathers or"):
        rank_actions(layout, plan.schedule, MODEL, SEQ_LEN, bucket_parts(layout.held, 3))


def first_rank_swaps_gathers(layout: Layout, actions: list[RankActions]) -> list[RankActions]:
    """Rank 0 gathers what it needs third before what it needs second: layers of equal sizes."""
    order = list(actions[0])
    second, third = [n for n, action in enumerate(order) if isinstance(action, BucketCollective)][1:3]
    order[second], order[third] = order[third], order[second]
    return [tuple(order), *actions[1:]]


def test_gathers_in_another_order_mix_up_weights_and_are_found_before() -> None:
    with pytest.raises(HungError, match=r"gather of weight bucket \d+: .* meets rank \d's gather of weight bucket"):
        train(in_lockstep(3), first_rank_swaps_gathers, one_queue=False)
    layout = layout_of(in_lockstep(3), MODEL, CLUSTER)
    actions = rank_actions(layout, ONE_F_ONE_B, MODEL, SEQ_LEN, bucket_parts(layout.held, 3))
    with pytest.raises(InputError, match=r"rank 0 waits in gather of weight bucket \d+ for rank 2, which is at gather"):
        check_actions(layout, SEQ_LEN, first_rank_swaps_gathers(layout, actions))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_host_may_wait_for_all_after_every_part(zero: int) -> None:
    for order in ({"one_queue": True}, {"one_queue": False}):
        train(in_lockstep(zero), waits=True, **order)


# ------------------------------------------------------------------ gradients beside the last backward


@pytest.mark.parametrize(("zero", "tied", "stages"), [*product((0, 1), (False, True), (1, 2))])
def test_sums_begin_beside_the_last_backward_on_every_stage(zero: int, tied: bool, stages: int) -> None:
    """With tied embeddings too, whose own sum is the last."""
    model = replace(MODEL, tied_embeddings=tied)
    pipelines = tuple(
        Pipeline(tuple(Stage.of((stages * p + s,), 8 // stages * s, 8 // stages * (s + 1)) for s in range(stages)), 2)
        for p in range(2)
    )
    layout = layout_of(Plan(pipelines, ONE_F_ONE_B), model, CLUSTER)
    with patch.object(buckets_module, "BUCKET_ELEMENTS", 600):
        shared = bucket_parts(layout.held, zero)
    for order in rank_actions(layout, ONE_F_ONE_B, model, SEQ_LEN, shared):
        backwards = [
            n for n, action in enumerate(order) if isinstance(action, Action) and action.kind == ActionKind.BACKWARD
        ]
        sums = [n for n, action in enumerate(order) if isinstance(action, BucketCollective)]
        assert sum(n < backwards[-1] for n in sums) >= 2
        assert sums[0] < backwards[-2]
        if tied and stages == 1:
            last = order[sums[-1]]
            assert isinstance(last, BucketCollective)
            assert any("embed_tokens" in part.name for part in shared[last.bucket].parts)

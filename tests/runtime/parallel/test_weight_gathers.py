"""Weights come beside the next forwards: the same ones as if every step waited for them, and no later than needed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from runtime.mapping import buckets
from runtime.mapping.actions import unit_buckets
from runtime.mapping.buckets import bucket_parts
from runtime.model.decoder import DecoderChunk
from runtime.parallel.weight_store import WeightStore
from tests.runtime.parallel.test_host_waits import MODEL
from tests.runtime.parallel.test_split_backwards import split_plan
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee
from tests.runtime.ranks import random_aligned_plan, random_plan, run_ranks
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

Case = tuple[Plan, ModelSpec, int]
STEPS = 3


def sharded_case(seed: int) -> Case:
    """ZeRO-1 over all, machines or lists of devices, with replicas, TP, layer ranges, tied matrices."""
    rng = random.Random(seed)
    while True:
        plan, model, batch = random_plan(rng, 6)
        if plan.sharding.stage:
            return plan, model, batch


def split_case(seed: int) -> Case:
    """Of split backwards."""
    plan, model, batch = split_plan(seed, 6)
    return replace(plan, sharding=Sharding(1)), model, batch


def aligned_case(seed: int) -> Case:
    """Of ZeRO-2, or of ZeRO-3, whose norms are of ZeRO-1."""
    return random_aligned_plan(random.Random(seed), 6)


UNTIED = replace(MODEL, tied_embeddings=False)
MAKERS: tuple[Callable[[int], Case], ...] = (sharded_case, split_case, aligned_case)


@contextmanager
def at_once() -> Iterator[None]:
    """Within, whoever begins to gather weights waits for them."""
    begin = WeightStore.give

    def give_and_wait(self: WeightStore, *arguments: Any) -> None:
        begin(self, *arguments)
        self.finish()

    with patch.object(WeightStore, "give", give_and_wait):
        yield


def train(case: Case, run: Callable[..., list[Any]], **more: Any) -> list[Any]:
    """By rank: losses and norms of all steps, those of a text beside it, and the weights and states at the end."""
    plan, model, batch = case

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, batch, **more)
        tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        steps = [rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr) for _ in range(STEPS)]
        loss = rank_trainee.loss(lambda first, end: tokens[first:end])
        rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        states = [state.numpy().copy() for _, held in rank_trainee.optimizer.states() for state in held.values()]
        return steps, loss, [weight.detach().numpy().copy() for weight in rank_trainee.weights.values()], states

    return run(len(plan.devices()), work)


def assert_equal_bits(results: list[Any], expected: list[Any]) -> None:
    for (steps, loss, weights, states), (want_steps, want_loss, want_weights, want_states) in zip(
        results, expected, strict=True
    ):
        assert (steps, loss) == (want_steps, want_loss)
        for array, other in zip(weights + states, want_weights + want_states, strict=True):
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize(("make", "seed"), slow_but([(aligned_case, 2)], product(MAKERS, range(12))))
def test_losses_and_weights_are_those_of_steps_that_wait(make: Callable[[int], Case], seed: int) -> None:
    """To the last bit, with buckets of a few parameters."""
    with patch.object(buckets, "BUCKET_ELEMENTS", 200):
        results = train(make(seed), run_ranks)
        with at_once():
            assert_equal_bits(results, train(make(seed), run_ranks))


@pytest.mark.parametrize(
    ("make", "seed"), slow_but([(sharded_case, 1), (split_case, 0), (aligned_case, 1)], product(MAKERS, range(12)))
)
def test_so_they_are_over_queues_as_of_gpus(make: Callable[[int], Case], seed: int) -> None:
    """Weights that nobody has waited for are no numbers there, and gathers in another order would hang."""
    run = partial(run_in_order, one_queue=bool(seed % 2))
    with patch.object(buckets, "BUCKET_ELEMENTS", 200):
        results = train(make(seed), run)
        with at_once():
            assert_equal_bits(results, train(make(seed), run))


@pytest.mark.slow
def test_so_they_are_of_compiled_layers() -> None:
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        results = train((two_pipelines(1), MODEL, 4), run_ranks, compile_layers=True)
        with at_once():
            assert_equal_bits(results, train((two_pipelines(1), MODEL, 4), run_ranks, compile_layers=True))


def two_pipelines(num_chunks: int) -> Plan:
    """Of two stages each."""
    cuts = [(0, 2), (2, 4), (4, 6), (6, 8)] if num_chunks == 2 else [(0, 4), (4, 8)]
    lines = [
        Pipeline(
            tuple(
                Stage.of_replicas(Stage.of((2 * p + s,), 0, 1).parallelism.replicas, tuple(cuts[s::2]), ("none",) * 4)
                for s in range(2)
            ),
            2,
        )
        for p in range(2)
    ]
    return Plan(tuple(lines), INTERLEAVED if num_chunks == 2 else ONE_F_ONE_B, Sharding(1))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_forward_waits_unit_by_unit_for_what_it_is_about_to_use(num_chunks: int) -> None:
    """Each part of the first forward of a layer range finds its own weights there, and leaves those of later ones on
    their way; they have been sent in that order."""
    plan = two_pipelines(num_chunks)

    def work(rank: int) -> Any:
        rank_trainee, log = trainee(plan, UNTIED, 4), list[tuple[str, Any]]()
        shared = bucket_parts(rank_trainee.layout.held, 1)
        of_units = unit_buckets(rank_trainee.layout.executor_of[rank], rank, shared, UNTIED)
        begin, wait, parts = WeightStore.give, WeightStore._wait, DecoderChunk.parts

        def note_begin(self: WeightStore, bucket: Any, *arguments: Any) -> None:
            log.append(("begin", bucket.number))
            begin(self, bucket, *arguments)

        def note_wait(self: WeightStore, numbers: Any) -> None:
            log.extend(("wait", number) for number in numbers if number in self._stepped)
            wait(self, numbers)

        def note_parts(self: DecoderChunk, *arguments: Any) -> Any:
            number = self.chunk.number

            def note(unit: int, part: Any) -> Any:
                def run(x: Any) -> Any:
                    log.append(("run", (number, unit)))
                    return part(x)

                return run

            return [note(unit, part) for unit, part in enumerate(parts(self, *arguments))]

        tokens = torch.randint(UNTIED.vocab_size, (4, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        with (
            patch.object(WeightStore, "give", note_begin),
            patch.object(WeightStore, "_wait", note_wait),
            patch.object(DecoderChunk, "parts", note_parts),
        ):
            for _ in range(2):
                rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        return log, of_units

    with patch.object(buckets, "BUCKET_ELEMENTS", 300):
        logs = run_ranks(4, work)
    for log, of_units in logs:
        first = next(k for k, (what, _) in enumerate(log) if what == "begin")
        after_first = log[first : first + next(k for k, (what, _) in enumerate(log[first:]) if what == "run")]
        began = [number for what, number in after_first if what == "begin"]
        first_unit = {number: unit for unit in sorted(of_units, reverse=True) for number in of_units[unit]}
        assert [first_unit[number] for number in began] == sorted(first_unit.values())
        there, since = set[int](), set[int]()
        for what, which in log[first:]:
            if what == "wait":
                there.add(which)
                since.add(which)
            elif what == "run":
                assert set(of_units[which]) <= there
                assert since <= set(of_units[which])
                since.clear()
        assert there == set(began)
        assert len(began) > 4

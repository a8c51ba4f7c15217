"""Plans train as one process does: gradients and loss curves, in float64."""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.adapters import Adapters
from runtime.mapping.parts import ParameterPart
from runtime.mapping.times import StepTimes
from runtime.settings import AdamW, Settings
from runtime.training.trainee import Trainee, initial_values
from tests.conftest import STRESS
from tests.runtime.ranks import CLUSTER, TIMEOUT_S, random_plan, run_ranks
from tests.slow import slow_but

SEQ_LEN = 7
SEEDS = (*range(29), 253)  # of plans
THIRD = (2, 7, 10, 12, 13, 15, 16, 22, 28, 253)  # small ones that have every feature between them
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]  # a world of so many ranks, each of which does the same
SETTINGS = AdamW(lr=3e-3, max_norm=0.5)
DRAWN = partial(initial_values, 1)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def whole(model: ModelSpec, batch: int) -> Plan:
    """One process, one micro-batch."""
    return Plan((Pipeline((Stage.of((0,), 0, model.num_layers),), 1, batch),), ONE_F_ONE_B, Sharding(0))


def trainee(
    plan: Plan,
    model: ModelSpec,
    batch: int,
    dtype: torch.dtype = torch.float64,
    gradient_dtype: torch.dtype = torch.float64,
    *,
    seq_len: int = SEQ_LEN,
    initial: Callable[[ParameterPart], torch.Tensor] = DRAWN,
    times: StepTimes | None = None,
    adapters: Adapters | None = None,
    **more: Any,
) -> Trainee:
    """`more` are fields of the workload and the settings."""
    of_settings = {field.name for field in fields(Settings)} & more.keys()
    stated = {name: more.pop(name) for name in of_settings}
    workload: dict[str, Any] = {"precision": "fp32"}
    if dtype == torch.bfloat16:
        workload = {"precision": "bf16", "gradient_bytes": gradient_dtype.itemsize}
    if adapters is not None:
        workload |= {"training": "lora", "lora": adapters.lora}
        stated["lora_alpha"] = adapters.alpha
    settings = Settings(**({"adam": SETTINGS, "timeout_s": TIMEOUT_S, "compile_layers": False} | stated))
    # Which plans are found is no matter here.
    problem = Problem(CLUSTER, model, Workload(batch, seq_len, **workload | more), Space(max_tp=1))
    return Trainee(problem, plan, settings, dtype, torch.device("cpu"), initial, times=times)


def train(
    plan: Plan,
    model: ModelSpec,
    batch: int,
    steps: int,
    seq_len: int = SEQ_LEN,
    run: RunRanks = run_ranks,
    **more: Any,
) -> list[Any]:
    """By rank: gradients of the first step, [(parts, flat share, where it begins)], and losses and norms of all."""

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, batch, seq_len=seq_len, **more)

        def sequences(step: int) -> Any:
            generator = torch.Generator().manual_seed(step % 2)
            tokens = torch.randint(model.vocab_size, (batch, seq_len + 1), generator=generator)
            return lambda first, end: tokens[first:end]

        rank_trainee.gradients(sequences(0))
        gradients = [
            (bucket.parts, bucket.summed_gradient.numpy().copy(), bucket.share.start) for bucket in rank_trainee.buckets
        ]
        return gradients, [rank_trainee.step(sequences(step), SETTINGS.lr) for step in range(steps)]

    return run(len(plan.devices()), work)


def equal_one_process(
    case: tuple[Plan, ModelSpec, int],
    steps: int = 20,
    seq_len: int = SEQ_LEN,
    run: RunRanks = run_ranks,
    alone: AbstractContextManager[Any] | None = None,
    both: Mapping[str, Any] = NOTHING,
    **more: Any,
) -> tuple[float, float]:
    """Returns the largest relative errors of a gradient and of a loss. The one process trains within `alone`, its
    trainee gets what is in `both`, those of the plan also what is in `more`."""
    plan, model, batch = case
    with alone or nullcontext():
        ((reference, curve),) = train(whole(model, batch), model, batch, steps, seq_len, run, **both)
    of_gradients = of_losses = 0.0
    of_name = {}
    for parts, flat, _ in reference:
        at = 0
        for part in parts:
            size = torch.Size(part.local_shape).numel()
            of_name[part.name] = torch.from_numpy(flat[at : at + size]).view(part.shape)
            at += size
    for gradients, losses in train(plan, model, batch, steps, seq_len, run, **both, **more):
        for parts, flat, start in gradients:
            want = torch.cat([of_name[p.name].narrow(p.dim, p.start, p.end - p.start).flatten() for p in parts])
            scale = max(float(of_name[p.name].norm()) for p in parts)
            share = want[start : start + len(flat)]
            difference = torch.from_numpy(flat)[: len(share)] - share
            of_gradients = max(of_gradients, float(difference.norm()) / scale)
        for (loss, _), (expected, _) in zip(losses, curve, strict=True):
            of_losses = max(of_losses, abs(loss / expected - 1))
        # Training doubles what rounding does to gradients about every step.
        assert [norm for _, norm in losses[:5]] == pytest.approx([norm for _, norm in curve[:5]], rel=1e-9)
    assert steps < 4 or curve[-2][0] < curve[0][0]
    assert of_gradients <= 1e-10
    assert of_losses <= 1e-10
    return of_gradients, of_losses


@pytest.mark.parametrize(
    ("seed", "steps"),
    slow_but([(seed, 4) for seed in (13, 22, 253)], product(SEEDS if STRESS else THIRD, (4, 20))),
)
def test_a_plan_trains_as_one_process(seed: int, steps: int) -> None:
    """Of processes that communicate over gloo; `test_one_queue.py` has plans of every feature in threads."""
    equal_one_process(random_plan(random.Random(seed)), steps)


@pytest.mark.parametrize("gradient_dtype", slow_but((torch.bfloat16,), (torch.bfloat16, torch.float32)))
def test_bf16_keeps_masters_in_float32(gradient_dtype: torch.dtype) -> None:
    """Weights are the masters, rounded, on every rank; the loss falls as it does in float64."""
    plan, model, batch = random_plan(random.Random(36))

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, batch, torch.bfloat16, gradient_dtype)
        tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        losses = [rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)[0] for _ in range(20)]
        for bucket, states in rank_trainee.optimizer.states():
            assert {state.dtype for state in states.values()} == {torch.float32}
            if not bucket.is_sharded:
                held = [rank_trainee.weights[name][place.where].flatten() for name, place in bucket.places.items()]
                size = sum(map(len, held))
                assert torch.cat(held).equal(states["weight"][:size].bfloat16())
        assert {weight.dtype for weight in rank_trainee.weights.values()} == {torch.bfloat16}
        return losses

    def exact(rank: int) -> Any:
        rank_trainee = trainee(plan, model, batch)
        tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        return [rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)[0] for _ in range(20)]

    (losses, *_), (want, *_) = (run_ranks(len(plan.devices()), way) for way in (work, exact))
    assert want[-1] < want[0] - 0.1
    assert losses == pytest.approx(want, rel=0.02)


def features(plan: Plan, model: ModelSpec) -> set[str]:
    """What of asymmetric training a plan is an example of."""
    pipelines, sharding = plan.pipelines, plan.sharding
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    replicas = [replica for stage in stages for replica in stage.parallelism.replicas]
    kind = sharding.groups if isinstance(sharding.groups, str) else "stated"
    names = {plan.schedule.name, model.architecture}
    names |= {f"ZeRO-{sharding.stage} over {kind}", f"{len(pipelines)} pipelines"}
    names |= {f"{len(pipeline.stages)} stages" for pipeline in pipelines}
    names |= {f"TP {len(replica.devices)}" for replica in replicas}
    names |= {policy for stage in stages for policies in stage.policies() for policy in policies}
    names |= {"uneven heads" for replica in replicas if replica.heads and len(set(replica.heads)) > 1}
    names |= {"replicas" for stage in stages if len(stage.parallelism.replicas) > 1}
    names |= {
        "unequal samples" for stage in stages if len({replica.samples for replica in stage.parallelism.replicas}) > 1
    }
    names |= {"layer ranges" for pipeline in pipelines if pipeline.num_chunks > 1}
    names |= {"fewer micro-batches than stages" for p in pipelines if p.num_micro_batches < len(p.stages)}
    names |= {"unequal micro-batches"} if len({pipeline.num_micro_batches for pipeline in pipelines}) > 1 else set()
    names |= {"unequal sizes"} if len({pipeline.micro_batch_size for pipeline in pipelines}) > 1 else set()
    if model.tied_embeddings and any(len(pipeline.stages) > 1 for pipeline in pipelines):
        names.add("tied embeddings on different stages")
    return names


def test_the_third_has_every_feature() -> None:
    every = {seed: features(*random_plan(random.Random(seed))[:2]) for seed in SEEDS}
    assert set().union(*(every[seed] for seed in THIRD)) == set().union(*every.values())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_gradients_are_added_where_buckets_have_them(weights: torch.dtype) -> None:
    """By autograd itself, where they are of the same type, which takes the host no time; else by a hook."""
    _, model, batch = random_plan(random.Random(2))

    def work(rank: int) -> Any:
        rank_trainee = trainee(whole(model, batch), model, batch, weights, torch.float32)
        tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1))
        rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        assert all(bucket.gradient.count_nonzero() for bucket in rank_trainee.buckets)
        places = [(name, view) for bucket in rank_trainee.buckets for name, view, _ in bucket.pieces(bucket.gradient)]
        return [
            None if (grad := rank_trainee.weights[name].grad) is None else grad.data_ptr() == view.data_ptr()
            for name, view in places
        ]

    (results,) = run_ranks(1, work)
    assert set(results) == {True if weights == torch.float32 else None}

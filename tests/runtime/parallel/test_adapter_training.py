"""Adapters beside frozen parameters: plans train them as one process does, and hold no more than they need."""

import random
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hexiopt.cost.executors.states import RankStates
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.adapters import DOWN, UP, Adapters, with_adapters
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import ParameterPart
from runtime.mapping.times import StepTimes
from runtime.parallel.gradient_sync import GradientSync
from runtime.settings import ExpertTraining
from runtime.training.trainee import initial_values
from tests.runtime.expert_plans import SHAPES, expert_features, expert_model, random_expert_plan
from tests.runtime.parallel.test_compiled import MODEL, ONE, check_equal, train
from tests.runtime.parallel.test_split_backwards import random_times, split_plan
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, equal_one_process, features, trainee, whole
from tests.runtime.parallel.test_training_of_kinds import MODELS, batch, small_plan
from tests.runtime.ranks import CLUSTER, random_plan, run_ranks
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

ALL = Adapters(Lora(3), 6.0)
TYPES = tuple(SHAPES)
QUICK, SLOW = 8, 30
CLOSE = 1e-13


def nonzero_values(part: ParameterPart) -> torch.Tensor:
    """As drawn, but for B, which would leave A without a gradient."""
    if UP in part.name.split("."):
        return 10 * initial_values(1, replace(part, name=part.name.replace(UP, "matrix"), initial=None))
    return initial_values(1, part)


BOTH = {"adapters": ALL, "initial": nonzero_values}


def small(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_plan(random.Random(1035 + seed), 5 if seed < QUICK else 8)


def adapters_of(seed: int) -> Adapters:
    """Of several ranks and targets."""
    targets = ("all", "qv", "attention", ("o", "down"), "all", ("gate", "k"))[seed % 6]
    return Adapters(Lora(1 + seed % 4, targets), 2.0)


@pytest.mark.parametrize("seed", slow_but(range(QUICK), range(SLOW)))
def test_a_plan_trains_adapters_as_one_process_over_one_queue(seed: int) -> None:
    both = {"adapters": adapters_of(seed), "initial": nonzero_values}
    of_gradients, of_losses = equal_one_process(small(seed), 2, SEQ_LEN, run_in_order, both=both)
    assert max(of_gradients, of_losses) <= CLOSE


def test_plans_with_adapters_have_what_matters() -> None:
    plan_features = set().union(*(features(*small(seed)[:2]) for seed in range(QUICK)))
    wanted = {"gpipe", "1f1b", "interleaved", "layer ranges", "replicas", "TP 2", "TP 3"}
    wanted |= {"uneven heads", "full", "selective", "joined"}
    assert wanted | {"ZeRO-0 over all", "ZeRO-1 over all", "tied embeddings on different stages"} <= plan_features


@pytest.mark.parametrize("seed", slow_but((7,), (7, 253)))
def test_a_plan_trains_adapters_over_gloo(seed: int) -> None:
    of_gradients, of_losses = equal_one_process(random_plan(random.Random(seed)), 4, both=BOTH)
    assert max(of_gradients, of_losses) <= CLOSE


@pytest.mark.parametrize("seed", slow_but(range(3), range(12)))
def test_split_backwards_put_gradients_of_adapters_off(seed: int) -> None:
    with patch.object(StepTimes, "even", random_times(seed)):
        run = partial(run_in_order, one_queue=True)
        of_gradients, _ = equal_one_process(split_plan(seed, max_ranks=5), 1, SEQ_LEN, run, both=BOTH)
    assert of_gradients <= CLOSE


# ------------------------------------------------------------------ layers of several kinds


def with_experts(seed: int) -> tuple[Plan, ModelSpec, int]:
    """A plan that adapters can have: without later gradients of weights, and with ZeRO-1 at most."""
    rng = random.Random(seed)
    while True:
        plan, model, batch = random_expert_plan(rng, TYPES[seed % len(TYPES)], 5)
        if plan.sharding.stage <= 1 and not plan.schedule.splits:
            return plan, model, batch


EXPERT_SEEDS = range(14, 28)


@pytest.mark.parametrize("seed", slow_but(EXPERT_SEEDS[:7], EXPERT_SEEDS))
def test_a_plan_trains_adapters_beside_frozen_experts(seed: int) -> None:
    """Of all types, whoever shares experts; a loss that balances them reaches adapters through frozen routers."""
    case = with_experts(seed)
    is_latent = any(kind.attention is not None and kind.attention.kv_rank for kind in case[1].kinds)
    targets = "attention" if is_latent else ("attention", "qv", "qkv", "o")[seed % 4]
    adapters = Adapters(Lora(1 + seed % 4, targets), 2.0)
    both = {"adapters": adapters, "initial": nonzero_values, "experts": ExpertTraining(sequence_balance=0.1)}
    run = partial(run_in_order, one_queue=seed % 3 > 0)
    of_gradients, of_losses = equal_one_process(case, 2, SEQ_LEN, run, both=both)
    assert max(of_gradients, of_losses) <= CLOSE


def test_those_plans_share_experts_in_every_way() -> None:
    plan_features = set().union(*(expert_features(*with_experts(seed)[:2]) for seed in EXPERT_SEEDS))
    wanted = {"stated experts", "experts alone", "uneven samples", "TP beside experts", "even experts", *SHAPES}
    assert wanted <= plan_features, wanted - plan_features


OF_KINDS = (
    "latent attention",
    "Mamba-2, norms of two groups",
    "delta rule",
    "norms of all heads",
    "blocks of one part",
)


@pytest.mark.parametrize("seed", slow_but((0,), range(3)))
@pytest.mark.parametrize("name", OF_KINDS)
def test_a_plan_trains_adapters_in_layers_of_kinds(name: str, seed: int) -> None:
    plan = small_plan(random.Random(seed))
    of_gradients, _ = equal_one_process((plan, MODELS[name], batch(plan)), 2, both=BOTH)
    assert of_gradients <= CLOSE


def test_states_of_frozen_experts_are_what_is_priced() -> None:
    model, work = expert_model("qwen2_moe", 2), {"training": "lora", "lora": Lora(2, "attention")}
    full, lora = (Problem(CLUSTER, model, Workload(2, SEQ_LEN, "fp32", **more)) for more in ({}, work))
    states = RankStates.of(lora.parameters, [model.layer_of(kind).shard(1, model.vocab_size) for kind in model.kinds])
    parts = list(with_adapters(whole_parts(model), Adapters.of(lora.workload)))
    counts = tuple(model.depth.count(number) for number in range(len(model.kinds)))
    elements = [sum(prod(part.shape) for part in parts if part.trained == trained) for trained in (True, False)]
    assert elements[0] == states.params.stage(counts, True, True) == lora.parameters.num_trained_params
    assert 4 * elements[1] == states.frozen_bytes.stage(counts, True, True)
    assert elements[1] == full.parameters.num_trained_params


# ------------------------------------------------------------------ what is frozen


def one_stage(model: ModelSpec, policy: str, zero: int = 0) -> Plan:
    stage = Stage.of((0,), 0, model.num_layers)
    return Plan((Pipeline((replace(stage, recompute=(policy,)),), 2),), ONE_F_ONE_B, Sharding(zero))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_every_adapter_has_a_gradient_behind_a_frozen_embedding(policy: str) -> None:
    """Recomputed layers, whose inputs would need none, would have none, and sums would count that as zero."""

    def work(rank: int) -> Any:
        rank_trainee = trainee(one_stage(MODEL, policy), MODEL, 2, **BOTH)
        tokens = torch.randint(MODEL.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        rank_trainee.gradients(lambda first, end: tokens[first:end])
        views = {name: view for bucket in rank_trainee.buckets for name, view, _ in bucket.pieces(bucket.gradient)}
        return {name: view.abs().sum().item() for name, view in views.items()}

    (sums,) = run_ranks(1, work)
    assert len(sums) == 2 * 7 * MODEL.num_layers
    assert min(sums.values()) > 0, min(sums, key=sums.__getitem__)


def test_what_is_frozen_has_no_gradient_no_bucket_and_stays() -> None:
    def work(rank: int) -> Any:
        taken: list[str] = []
        came = GradientSync._add_to_buckets

        def count(self: GradientSync, name: str, weight: torch.Tensor) -> None:
            taken.append(name)
            came(self, name, weight)

        with patch.object(GradientSync, "_add_to_buckets", count):
            rank_trainee = trainee(one_stage(MODEL, "full"), MODEL, 2, torch.bfloat16, torch.bfloat16, **BOTH)
            before = {name: weight.detach().clone() for name, weight in rank_trainee.weights.items()}
            tokens = torch.randint(MODEL.vocab_size, (2, SEQ_LEN + 1))
            rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        for name, weight in rank_trainee.weights.items():
            is_adapter = DOWN in name or UP in name
            assert weight.requires_grad == is_adapter
            assert torch.equal(weight, before[name]) != is_adapter
            assert weight.dtype == (torch.float32 if is_adapter else torch.bfloat16)
            assert is_adapter or weight.grad is None
        assert rank_trainee.optimizer.masters == [None] * len(rank_trainee.buckets)
        assert {part.name for bucket in rank_trainee.buckets for part in bucket.parts} == {
            name for name, weight in rank_trainee.weights.items() if weight.requires_grad
        }
        return None

    run_ranks(1, work)


def test_two_byte_adapters_are_stepped_as_they_are_stored() -> None:
    """No masters; moments in FP32."""
    adapters = Adapters(Lora(3, adapter_bytes=2), 6.0)

    def work(rank: int) -> Any:
        rank_trainee = trainee(
            one_stage(MODEL, "none"),
            MODEL,
            2,
            torch.bfloat16,
            torch.bfloat16,
            adapters=adapters,
            initial=nonzero_values,
        )
        tokens = torch.randint(MODEL.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        losses = [rank_trainee.step(lambda first, end: tokens[first:end], 0.03)[0] for _ in range(10)]
        assert rank_trainee.optimizer.masters == [None] * len(rank_trainee.buckets)
        assert {bucket.gradient.dtype for bucket in rank_trainee.buckets} == {torch.bfloat16}
        assert {moment.dtype for own_moments in rank_trainee.optimizer.moments for moment in own_moments.values()} == {
            torch.float32
        }
        return losses

    (losses,) = run_ranks(1, work)
    assert losses[-1] < losses[0] - 0.02


def test_adapters_begin_as_nothing_whatever_the_plan() -> None:
    """B is zero, so that the first loss is that of the model alone; A is uniform, and the same of every cut."""

    def work(rank: int, adapters: Adapters | None) -> Any:
        rank_trainee = trainee(whole(MODEL, 2), MODEL, 2, adapters=adapters)
        tokens = torch.randint(MODEL.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        return rank_trainee.loss(lambda first, end: tokens[first:end])

    (with_them,), (without,) = (run_ranks(1, partial(work, adapters=adapters)) for adapters in (ALL, None))
    assert with_them == without
    down = next(part for part in with_adapters(whole_parts(MODEL), ALL) if DOWN in part.name)
    values, bound = initial_values(3, replace(down, shape=(400, 100), end=400)), 100**-0.5
    assert float(values.min()) == pytest.approx(-bound, rel=0.01)
    assert float(values.max()) == pytest.approx(bound, rel=0.01)
    assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.02)


# ------------------------------------------------------------------ compiled, and a loss in chunks


@pytest.mark.slow  # plain layers are compiled in a quick one
@pytest.mark.parametrize(("tp", "backend"), [(1, "aot_eager"), (2, "inductor")])
def test_compiled_layers_train_adapters_as_plain_ones(tp: int, backend: str) -> None:
    model = replace(MODEL, num_layers=2)
    stage = Stage(TensorParallel(tuple(range(tp))), ((0, 2),), ("selective", "full"))
    plan = Plan((Pipeline((stage,), 2),))
    check_equal(train(plan, model, backend, **BOTH), train(plan, model, **BOTH))


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_chunks_needs_no_gradient_of_a_frozen_head(tied: bool) -> None:
    model = replace(MODEL, tied_embeddings=tied)
    check_equal(train(ONE, model, chunk=5, **BOTH), train(ONE, model, **BOTH))

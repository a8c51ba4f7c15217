"""Plans whose ranks exchange tokens train as one process does: gradients and loss curves, in float64."""

import random
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.kinds import Dense
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import ONE_F_ONE_B, SPLIT_SCHEDULES
from runtime.parallel import token_exchange
from runtime.settings import ExpertTraining
from tests.conftest import STRESS
from tests.runtime.expert_plans import COUNT, SHAPES, expert_features, expert_model, random_expert_plan
from tests.runtime.model.test_decoder import tiny
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, equal_one_process, train, trainee
from tests.runtime.ranks import random_sequence_plan
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

TYPES = tuple(SHAPES)
QUICK, SLOW, ALL = range(30, 50), 120, 300  # 2, 12 and 30 of each type
BALANCED = ExpertTraining(sequence_balance=0.1, expert_bias_rate=0.01)


def small(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_expert_plan(random.Random(seed), TYPES[seed % len(TYPES)], 5 if seed in QUICK else 7)


@pytest.mark.parametrize("seed", slow_but(QUICK, range(ALL if STRESS else SLOW)))
def test_a_plan_with_experts_trains_as_one_process(seed: int) -> None:
    """Every other one with a loss and biases that balance experts."""
    settings = BALANCED if seed % 2 else ExpertTraining(expert_bias_rate=0.0)
    run = partial(run_in_order, one_queue=seed % 3 > 0)
    of_gradients, _ = equal_one_process(small(seed), 4 if STRESS else 2, SEQ_LEN, run, both={"experts": settings})
    assert of_gradients <= 1e-13


@pytest.mark.parametrize("seed", slow_but((2,), range(12)))
def test_experts_beside_chunks_and_dense_layers_train_as_one_process(seed: int) -> None:
    """Llama 4 in full: one expert a token, whose input is weighted, in every other layer."""
    plan, shape, batch = random_expert_plan(random.Random(seed), "llama4_text", 5)
    layers = {"num_hidden_layers": shape.num_layers, "moe_layers": None, "interleave_moe_layer_step": 2}
    model = tiny("llama4_text", **layers, num_local_experts=COUNT)
    assert {bool(kind.experts) for kind in model.kinds} == {True, False}
    case = plan, model, batch
    of_gradients, _ = equal_one_process(case, 2, SEQ_LEN, run_in_order, both={"experts": BALANCED})
    assert of_gradients <= 1e-13


@pytest.mark.parametrize("seed", slow_but((501,), range(500, 503)))
def test_a_plan_with_experts_trains_over_gloo(seed: int) -> None:
    equal_one_process(small(seed), 4, both={"experts": BALANCED})


@pytest.mark.parametrize("seed", slow_but(range(2), range(20)))
def test_experts_train_under_sequence_layouts(seed: int) -> None:
    """Each device holds all of them; a sequence's choices are counted over its devices."""
    rng = random.Random(seed)
    plan, _, batch = random_sequence_plan(rng, SEQ_LEN, 4)
    model = expert_model(TYPES[seed % 4], plan.pipelines[0].num_layers)  # with 6 heads, and no sinks
    equal_one_process((plan, model, batch), 2, SEQ_LEN, run_in_order, both={"experts": BALANCED})


def test_the_quick_ones_share_experts_in_every_way() -> None:
    features = set().union(*(expert_features(*small(seed)[:2]) for seed in QUICK))
    wanted = {"stated experts", "experts alone", "no experts", "uneven samples", "TP beside experts", "even experts"}
    wanted |= {"one replica", "replicas", "full", "selective", *SHAPES, SPLIT_SCHEDULES[0].name}
    wanted |= {"interleaved", *(f"ZeRO-{stage}" for stage in range(4))}
    assert wanted <= features, wanted - features


SHARED = ExpertParallel((ExpertReplica((0,), 1, (2,)), ExpertReplica((1, 2), 1, (0, 3)), ExpertReplica((3,), 0, (1,))))


def shared_plan(num_layers: int, batches: int = 2, zero: int = 1) -> Plan:
    """One stage whose four ranks share experts in every way."""
    stage = Stage(SHARED, ((0, num_layers),), ("none",))
    return Plan((Pipeline((stage,), batches, 2),), ONE_F_ONE_B, Sharding(zero))


@pytest.mark.parametrize("zero", [0, 1])
def test_an_mlp_trains_beside_experts(zero: int) -> None:
    model = expert_model("mixtral", 2)
    kinds = tuple(replace(kind, channels=(Dense(ffn_size=9), *kind.channels)) for kind in model.layers)
    case = shared_plan(2, zero=zero), model.replace(layers=kinds), 4
    of_gradients, _ = equal_one_process(case, 2, SEQ_LEN, run_in_order, both={"experts": BALANCED})
    assert of_gradients <= 1e-13


def test_a_capacity_that_drops_nothing_changes_nothing() -> None:
    """An expert that can take all copies of a rank's tokens; sizes are then known without asking."""
    model = expert_model("glm4_moe", 2)
    settings = ExpertTraining(expert_capacity=COUNT / 2, expert_bias_rate=0.0)
    dropless = ExpertTraining(expert_bias_rate=0.0)
    case = shared_plan(2), model, 4
    with patch.object(token_exchange.CellExchange, "_all_copies", None):
        ranks = train(*case, 1, run=run_in_order, experts=settings)
    expected = train(*case, 1, run=run_in_order, experts=dropless)
    for (gradients, losses), (others, curve) in zip(ranks, expected, strict=True):
        assert losses[0] == pytest.approx(curve[0], rel=1e-12)
        for (_, flat, _), (_, other, _) in zip(gradients, others, strict=True):
            assert flat == pytest.approx(other, rel=1e-9, abs=1e-13)


def test_a_capacity_that_drops_copies_changes_the_loss() -> None:
    model, plan = expert_model("mixtral", 2), shared_plan(2)
    losses = [
        train(plan, model, 4, 1, run=run_in_order, experts=ExpertTraining(expert_capacity=capacity))[0][1]
        for capacity in (None, 0.3)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_biases_move_by_the_sign_of_the_load(zero: int) -> None:
    """On every rank alike, by whole-number counts of all tokens of a step."""
    model, rate = expert_model("deepseek_v3", 2), 0.125

    def work(rank: int) -> Any:
        trained = trainee(shared_plan(2, zero=zero), model, 4, experts=ExpertTraining(expert_bias_rate=rate))
        tokens = torch.randint(model.vocab_size, (4, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        counts = dict[str, Tensor]()
        take = trained._experts._loads.take

        def watch() -> dict[str, Tensor]:
            counts.update(take())
            return counts

        with patch.object(trained._experts._loads, "take", watch):
            trained.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        trained.finish()
        return counts, {name: trained.weights[name].detach().clone() for name in counts}

    ranks = run_in_order(4, work)
    names = ranks[0][0].keys()
    assert len(names) == 2
    assert not ranks[3][0], "a rank with experts alone has no router"
    for name in names:
        total = sum(counts.get(name, torch.zeros(COUNT, dtype=torch.int64)) for counts, _ in ranks)
        assert isinstance(total, Tensor)
        assert total.sum() == 4 * SEQ_LEN * 2
        moved = -rate * (total * COUNT - total.sum()).sign()
        assert moved.unique().numel() > 1
        for _, biases in ranks[:3]:
            assert biases[name].tolist() == moved.tolist()


def test_experts_train_in_bf16() -> None:
    """By torch's grouped products, near float64."""
    model = expert_model("gpt_oss", 2, hidden_size=16, inner=8)
    plan = shared_plan(2)

    def curve(dtype: torch.dtype) -> Any:
        def work(rank: int) -> Any:
            trained = trainee(plan, model, 4, dtype, torch.float32 if dtype == torch.bfloat16 else dtype)
            tokens = torch.randint(model.vocab_size, (4, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
            return [trained.step(lambda first, end: tokens[first:end], SETTINGS.lr)[0] for _ in range(12)]

        return run_in_order(4, work)[0]

    losses, exact = curve(torch.bfloat16), curve(torch.float64)
    assert exact[-1] < exact[0] - 0.1
    assert losses == pytest.approx(exact, rel=0.02)

"""Under a trainer's preset, the plan that a solver finds can be exported; values that do not go with it are refused."""

import random

import pytest

from hexiopt.errors import InputError
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.check import check
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.hexiopt.exports.random_plans import LLAMA_7B
from tests.slow import slow_but

FREE = Problem(Cluster.of({"a100_80gb_sxm": 8}, name="c"), LLAMA_7B, Workload(64, 4096, "fp16"))


def random_problem(trainer: str, rng: random.Random) -> Problem:
    """A problem with awkward numbers: of machines, heads, layers and sequences."""
    gpus = rng.sample(("rtx_4090", "a100_80gb_sxm", "h100_80gb_sxm", "rtx_3090"), 2)
    counts = {gpus[0]: rng.randint(1, 6), gpus[1]: rng.randint(1, 5)}
    cluster = Cluster.of(counts, inter_gb_per_s=rng.choice((0.125, 1.25, 12.5)), gpus_per_machine=rng.choice((2, 3, 4)))
    if trainer == "device_map":
        cluster = Cluster.of({gpus[0]: counts[gpus[0]]}, gpus_per_machine=6)
    batch = rng.choice((5, 7, 12, 30, 64))
    if trainer == "flashflex":
        return Problem(cluster, LLAMA_7B, Workload(batch, 4096, "fp16"))
    heads, architecture = rng.choice((2, 6, 12, 16)), rng.choice(("llama", "mistral", "qwen2"))
    model = ModelSpec(
        name="small",
        architecture=architecture,
        num_layers=rng.randint(2, 9),
        hidden_size=64 * heads,
        num_heads=heads,
        num_kv_heads=rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        head_dim=64,
        ffn_size=rng.choice((1000, 1024, 1502)),
        vocab_size=rng.choice((1000, 32001)),
        max_positions=2048,
        tied_embeddings=rng.random() < 0.3,
        attention_bias=architecture == "qwen2",
    )
    return Problem(cluster, model, Workload(batch, rng.choice((512, 1000)), "bf16"))


@pytest.mark.parametrize("name", slow_but(list(TRAINERS)[::3], TRAINERS))
def test_plans_under_a_preset_are_exported(name: str) -> None:
    assert_exported(name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_many_plans_under_a_preset_are_exported(name: str) -> None:
    assert_exported(name, range(100, 104))


def assert_exported(name: str, seeds: range) -> None:
    exported = 0
    for seed in seeds:
        problem = restrict(random_problem(name, random.Random(f"{name} {seed}")), TRAINERS[name])
        result = make_solver("portfolio").solve(problem, Budget(3600.0, 30), seed=seed)
        if result.plan is None:
            continue
        assert not check(problem, result.plan)
        assert TRAINERS[name].write(problem, result.plan).devices
        exported += 1
    assert exported >= len(seeds) / 2


@pytest.mark.parametrize(
    ("trainer", "workload", "message"),
    [
        ("megatron", {"schedule": "gpipe"}, "workload.schedule: gpipe does not go with space.preset=megatron"),
        ("torchtitan", {"recompute": "selective"}, "take full or none"),
        ("flashflex", {"precision": "bf16"}, "workload.precision=fp16"),
    ],
)
def test_what_does_not_go_with_a_preset_is_refused(trainer: str, workload: dict[str, str], message: str) -> None:
    problem = FREE.replace(workload=FREE.workload.replace(**workload))
    with pytest.raises(InputError, match=message):
        restrict(problem, TRAINERS[trainer])


def test_what_is_stated_and_goes_with_a_preset_stays() -> None:
    problem = FREE.replace(
        workload=FREE.workload.replace(schedule="interleaved", optimizer_sharding="0"), space=Space(max_tp=4)
    )
    preset_problem = restrict(problem, TRAINERS["megatron"])
    assert (preset_problem.workload.schedule, preset_problem.workload.optimizer_sharding) == ("interleaved", "0")
    assert preset_problem.space.max_tp == 4
    assert not preset_problem.space.uneven_tp
    assert preset_problem.space.uneven_layers


def test_tp_degrees_that_do_not_suit_the_model_are_left_out() -> None:
    model = LLAMA_7B.replace(num_heads=12, num_kv_heads=12, head_dim=342)
    preset_problem = restrict(
        FREE.replace(model=LLAMA_7B.replace(num_heads=4, num_kv_heads=4, head_dim=1024)), TRAINERS["megatron"]
    )
    assert preset_problem.space.max_tp == 4
    assert restrict(FREE.replace(model=model), TRAINERS["megatron"]).space.max_tp == 4  # 12 heads by 8 GPUs do not go

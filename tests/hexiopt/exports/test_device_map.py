"""The map of modules to GPUs: the names of transformers' models, the GPUs of the plan, and what it cannot say."""

import json
import warnings
from typing import Any
from unittest.mock import patch

import pytest

import hexiopt as hx
from hexiopt.discovery.cards import cluster_of_cards
from hexiopt.errors import InputError
from hexiopt.exports.exporting import trainer_of, write_program
from hexiopt.exports.launchers.registry import LAUNCHERS
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.device_map import TRAINER
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from tests.runtime.model import test_decoder, test_decoder_with_experts
from tests.runtime.model.test_decoder import tiny
from tests.slow import slow_but

PC = hx.cluster(cluster_of_cards(["2x3090", "4090"]).data)
LLAMA = hx.model("llama2_7b")
CASES = test_decoder_with_experts.CASES | test_decoder.CASES


def problem(model: ModelSpec = LLAMA, cluster: Cluster = PC, **workload: Any) -> Problem:
    return Problem(cluster, model, Workload(**{"global_batch": 8, "seq_len": 1024} | workload))


def stages(*layers: tuple[int, int, int], policy: str = "full") -> tuple[Stage, ...]:
    """Stages of a device, a first layer and an end each."""
    return tuple(Stage.of((device,), first, end, policy) for device, first, end in layers)


def plan(*pipelines: tuple[Stage, ...]) -> Plan:
    return Plan(
        tuple(Pipeline(pipeline_stages, 4 // len(pipelines), 2) for pipeline_stages in pipelines),
        ONE_F_ONE_B,
        Sharding(0),
    )


def write_map(asked: Problem, made: Plan) -> tuple[dict[str, int], str]:
    files = write_program(asked, made, TRAINER).files
    return json.loads(files["device_map.json"]), files["device_map.md"]


def test_layers_are_on_the_gpus_of_the_plan() -> None:
    modules, text = write_map(problem(), plan(stages((2, 0, 20), (0, 20, 32))))
    assert [modules[f"model.layers.{k}"] for k in range(32)] == [2] * 20 + [0] * 12
    ends = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    assert [modules[name] for name in ends] == [2, 2, 0, 0]
    assert len(modules) == 36
    assert "Layers run one after another, without overlap" in text
    assert "numbered 0 rtx_3090, 1 rtx_3090, 2 rtx_4090: " in text
    assert "per_device_train_batch_size=2 gradient_accumulation_steps=4 gradient_checkpointing=True" in text


def test_several_layer_ranges_of_a_stage_are_said() -> None:
    two_stages = tuple(
        Stage(Stage.of((device,), 0, 1).parallelism, ranges, ("none",))
        for device, ranges in ((0, ((0, 5), (16, 20))), (1, ((5, 16), (20, 32))))
    )
    modules, text = write_map(problem(), Plan((Pipeline(two_stages, 4, 2),), INTERLEAVED, Sharding(0)))
    assert [modules[f"model.layers.{k}"] for k in range(32)] == [0] * 5 + [1] * 11 + [0] * 4 + [1] * 12
    assert "gradient_checkpointing=False" in text


def test_tied_matrices_stay_on_one_gpu_which_is_said() -> None:
    modules, text = write_map(problem(LLAMA.replace(tied_embeddings=True)), plan(stages((0, 0, 20), (2, 20, 32))))
    assert (modules["model.norm"], modules["lm_head"]) == (2, 0)
    assert "its logits are on GPU 0, where the plan was priced with them on GPU 2" in text


def test_adapters_and_their_storage_are_the_scripts() -> None:
    asked = problem(training="lora", lora=hx.Lora(rank=8, storage="nf4"), optimizer="adamw_8bit")
    _, text = write_map(asked, plan(stages((0, 0, 32), policy="none")))
    assert "Load the weights in nf4, and add adapters of rank 8 to all when they are loaded" in text
    assert "priced with adamw_8bit" in text


@pytest.mark.parametrize("case", slow_but(("llama-yarn", "gemma2", "nemotron_h", "granitemoe_swa"), CASES))
def test_names_are_those_of_transformers_models(case: str) -> None:
    """Every tensor, computed ones included, has a GPU, no name is of nothing, and the model runs under the map."""
    accelerate = pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    lm = (test_decoder if case in test_decoder.CASES else test_decoder_with_experts).causal_lm(case)
    with patch.dict(test_decoder.CASES, CASES):
        model = tiny(case)
    half = model.num_layers // 2
    modules, _ = write_map(problem(model, seq_len=32), plan(stages((0, 0, half), (2, half, model.num_layers))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        accelerate.utils.modeling.check_device_map(lm, modules)
    for name, _ in lm.named_buffers():
        assert any(name.startswith(f"{module}.") for module in modules), name
    tokens_bt = torch.arange(8)[None] % 37
    with torch.no_grad():
        before = lm(tokens_bt, use_cache=False).logits
        mapped = accelerate.dispatch_model(lm, dict.fromkeys(modules, "cpu"), main_device="cpu", force_hooks=True)
        assert torch.equal(mapped(tokens_bt, use_cache=False).logits, before)


def one_of_two() -> Problem:
    return problem(cluster=Cluster.of({"rtx_3090": 4}, inter_gb_per_s=1.0, gpus_per_machine=2))


REFUSED = [
    (problem(), plan((Stage.of((0, 1), 0, 32),)), "stage 0 of pipeline 0 has 2 GPUs; .* constraints.max_tp=1"),
    (problem(), plan(stages((0, 0, 32)), stages((1, 0, 32))), "has 2 pipelines; .* constraints.num_pipelines=1"),
    (one_of_two(), plan(stages((0, 0, 9), (2, 9, 32))), r"plan is on several; .*constraints.exclude=\[rtx_3090-1"),
    (
        problem(),
        plan((*stages((0, 0, 9)), *stages((1, 9, 32), policy="none"))),
        "stages or layers differ in recompute",
    ),
    (problem(hx.model("gpt2_345m")), plan(stages((0, 0, 24))), "names of modules are known of llama, "),
    (problem(precision="tf32"), plan(stages((0, 0, 32))), "is written for bf16, fp16 and fp32"),
    (
        problem(),
        Plan((Pipeline(stages((0, 0, 9), (1, 9, 32)), 4, 2),), SPLIT_SCHEDULES[0], Sharding(0)),
        "it has the .* schedule",
    ),
]


@pytest.mark.parametrize(("asked", "made", "why"), REFUSED, ids=[why[:30] for *_, why in REFUSED])
def test_what_a_map_cannot_say_is_refused(asked: Problem, made: Plan, why: str) -> None:
    with pytest.raises(InputError, match=why):
        write_program(asked, made, TRAINER)


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "ranks"])
def test_no_launcher_starts_it(launcher: str) -> None:
    with pytest.raises(InputError, match="is one process, which no launcher starts; take "):
        trainer_of(launcher, "device_map")
    assert trainer_of("device_map", None) is TRAINER


def test_the_preset_is_for_one_computer() -> None:
    space = restrict(problem(), TRAINER).space
    assert (space.num_pipelines, space.max_tp) == (1, 1)
    with pytest.raises(InputError, match=r"for one machine; leave the others out by constraints.exclude=\["):
        restrict(one_of_two(), TRAINER)

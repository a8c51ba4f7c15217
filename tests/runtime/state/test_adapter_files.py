"""Adapters in peft's files and in checkpoints: other plans go on, others' folders begin a run, and merged they are the
model that was trained."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hexiopt.errors import InputError
from hexiopt.files.huggingface import read_model
from hexiopt.plan.plan import Plan
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.mapping.adapters import Adapters
from runtime.mapping.model_parts import whole_parts
from runtime.state.adapter_files import CONFIG, FOLDER, WEIGHTS, PeftAdapter
from runtime.state.checkpoint import BaseWeights, Checkpoint, CheckpointProgress, TrainedModel
from runtime.state.saving import CheckpointWriter
from runtime.state.weights import HuggingFaceWeights, write_hugging_face
from runtime.training.beginning import exported_weights
from runtime.training.preparation import adapter_start, resumed_progress
from runtime.training.trainee import initial_values
from tests.runtime.model import test_decoder, test_decoder_with_experts
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee, whole
from tests.runtime.ranks import random_plan, run_ranks
from tests.runtime.state.test_checkpoint import BATCH, plans_for
from tests.slow import slow_but
from tests.solvers.problems import cluster

ADAPTERS = Adapters(Lora(2, ("q", "o", "gate", "down")), 3.0)
SEED = 1


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return replace(random_plan(random.Random(5))[1], vocab_size=32)


def trained_model(model: ModelSpec, base: Path | None = None) -> TrainedModel:
    weights = BaseWeights() if base is None else BaseWeights(str(base), HuggingFaceWeights(base, model).sha256)
    return TrainedModel(model, "adamw", ADAPTERS, weights)


def train(
    plan: Plan, trained: TrainedModel, folder: Path, first: int, end: int, *, resume: Path | None = None, **more: Any
) -> list[float]:
    """Losses of steps `first` to `end`, and a checkpoint after them."""
    model, base = trained.model, trained.base.path
    own_base = partial(initial_values, SEED) if base is None else HuggingFaceWeights(Path(base), model).read
    adapter = PeftAdapter(more.pop("adapter"), trained).read if "adapter" in more else partial(initial_values, SEED)

    def work(rank: int) -> Any:
        rank_trainee = trainee(
            plan,
            model,
            BATCH,
            adapters=trained.adapters,
            optimizer=trained.optimizer,
            initial=lambda part: (adapter if part.trained and trained.adapters else own_base)(part),
            **more,
        )
        if resume is not None:
            rank_trainee.optimizer.load(Checkpoint(resume).fill, first)

        def sequences(step: int) -> Callable[[int, int], torch.Tensor]:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(model.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
            return lambda low, high: tokens[low:high]

        losses = [rank_trainee.step(sequences(step), 30 * SETTINGS.lr)[0] for step in range(first, end)]
        writer = CheckpointWriter(folder, trained, keep=2, states=rank_trainee.optimizer.states())
        progress = CheckpointProgress("own", end, end * BATCH, SEQ_LEN, SEED)
        writer.save(progress, rank_trainee.optimizer.states(), lambda: None)
        writer.finish(lambda: None)
        assert writer.written_steps() == [end]
        return [*losses, rank_trainee.loss(sequences(end))]

    return run_ranks(len(plan.devices()), work)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def base(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    values = (
        (part.name, 20 * initial_values(9, part) if part.decays else initial_values(9, part))
        for part in whole_parts(model)
    )
    write_hugging_face(folder, model, values, torch.float32)
    return folder


@pytest.fixture(scope="module")
def checkpoint_folder(model: ModelSpec, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps under a plan of several processes."""
    folder = tmp_path_factory.mktemp("adapters")
    plan = plans_for(replace(model, num_layers=model.num_layers), 1)[0]
    train(plan, trained_model(model, base), folder, 0, 3)
    return folder / "step-00000003"


def test_other_plans_go_on_where_one_stopped(
    model: ModelSpec, base: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    Checkpoint(checkpoint_folder).check()
    trained = Checkpoint(checkpoint_folder).trained
    assert trained == trained_model(model, base)
    curve = train(whole(model, BATCH), trained, tmp_path / "whole", 0, 6)
    for k, plan in enumerate(plans_for(model, 3)[1:]):
        again = train(plan, trained, tmp_path / str(k), 3, 6, resume=checkpoint_folder)
        assert again == pytest.approx(curve[3:], rel=1e-9)
    assert curve[3] != pytest.approx(curve[4], rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "momentum", "sgd", "adamw_bf16"])
def test_states_of_other_optimizers_go_on_too(model: ModelSpec, tmp_path: Path, optimizer: str) -> None:
    trained, plan = TrainedModel(model, optimizer), whole(model, BATCH)
    curve = train(plan, trained, tmp_path / "whole", 0, 4)
    train(plan, trained, tmp_path / "half", 0, 2)
    path = tmp_path / "half" / "step-00000002"
    Checkpoint(path).check()
    assert Checkpoint(path).trained == trained
    assert train(plan, trained, tmp_path / "rest", 2, 4, resume=path) == pytest.approx(curve[2:], rel=1e-9)


# ------------------------------------------------------------------ peft


def test_a_checkpoint_has_what_peft_reads(model: ModelSpec, checkpoint_folder: Path) -> None:
    stated = json.loads((checkpoint_folder / FOLDER / CONFIG).read_text())
    assert (stated["peft_type"], stated["r"], stated["lora_alpha"]) == ("LORA", 2, 3)
    assert stated["target_modules"] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    tensors = load_file(checkpoint_folder / FOLDER / WEIGHTS)
    h, q = model.hidden_size, model.num_heads * model.head_dim
    shapes = {
        "self_attn.q_proj": ((2, h), (q, 2)),
        "self_attn.o_proj": ((2, q), (h, 2)),
        "mlp.gate_proj": ((2, h), (model.ffn_size, 2)),
        "mlp.down_proj": ((2, model.ffn_size), (h, 2)),
    }
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        f"base_model.model.model.layers.{layer}.{name}.{matrix}.weight": shape
        for layer in range(model.num_layers)
        for name, pair in shapes.items()
        for matrix, shape in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert all(value.any() for value in tensors.values())


def test_peft_computes_the_loss_that_was_trained(
    model: ModelSpec, base: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(theirs, checkpoint_folder / FOLDER).double()
    ours = train(whole(model, BATCH), trained_model(model, base), tmp_path, 3, 3, resume=checkpoint_folder)[-1]
    assert _loss(with_adapter, model, 3) == pytest.approx(ours, rel=1e-5)


KINDS = ["qwen2_moe", "nemotron_h", "bamba", "olmo2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma3_text"]
KINDS += ["nemotron_h-latent", "granitemoehybrid-experts", "llama4_text"]


@pytest.mark.parametrize("case", slow_but(KINDS[:3], KINDS))
def test_peft_and_transformers_compute_what_was_trained_in_layers_of_kinds(case: str, tmp_path: Path) -> None:
    """Under the names of each type: its modules in adapters, its tensors in what is merged."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    make = test_decoder_with_experts if case in test_decoder_with_experts.CASES else test_decoder
    make.causal_lm(case).save_pretrained(tmp_path / "base")
    model = read_model(tmp_path / "base" / "config.json")
    adapters = Adapters(Lora(2, "attention" if model.shares_experts else "all"), 3.0)
    trained = replace(trained_model(model, tmp_path / "base"), adapters=adapters)
    ours = train(whole(model, BATCH), trained, tmp_path, 0, 2)[-1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    untrained = _loss(theirs, model, 2)
    with_adapter = peft.PeftModel.from_pretrained(theirs, tmp_path / "step-00000002" / FOLDER)
    assert _loss(with_adapter, model, 2) == pytest.approx(ours, rel=2e-5) != pytest.approx(untrained, rel=1e-4)
    spec, tensors = exported_weights(tmp_path / "step-00000002")
    write_hugging_face(tmp_path / "merged", spec, tensors, torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert _loss(merged, model, 2) == pytest.approx(ours, rel=2e-5)
    opened = PeftAdapter(tmp_path / "step-00000002" / FOLDER, trained)
    assert all(opened.read(part).any() for part in trained.parts())


def _loss(theirs: Any, model: ModelSpec, step: int) -> float:
    tokens = torch.randint(model.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    with torch.no_grad():
        logits = theirs(input_ids=tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_merged_weights_are_the_model_that_was_trained(
    model: ModelSpec, base: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    spec, tensors = exported_weights(checkpoint_folder)
    write_hugging_face(tmp_path / "merged", spec, tensors, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).double()
    ours = train(whole(model, BATCH), trained_model(model, base), tmp_path / "own", 3, 3, resume=checkpoint_folder)[-1]
    assert _loss(theirs, model, 3) == pytest.approx(ours, rel=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).double()
    assert _loss(plain, model, 3) != pytest.approx(ours, rel=1e-3)


def test_a_folder_of_peft_begins_a_run(model: ModelSpec, base: Path, checkpoint_folder: Path, tmp_path: Path) -> None:
    trained = trained_model(model, base)
    resumed = train(whole(model, BATCH), trained, tmp_path / "one", 3, 3, resume=checkpoint_folder)
    begun = train(whole(model, BATCH), trained, tmp_path / "two", 3, 3, adapter=checkpoint_folder / FOLDER)
    assert begun == pytest.approx(resumed, rel=1e-6)


def test_what_peft_writes_is_read(model: ModelSpec, base: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    modules = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, target_modules=modules)
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path)
    trained = trained_model(model, base)
    opened, stored = PeftAdapter(tmp_path, trained), load_file(tmp_path / WEIGHTS)
    for part in trained.parts():
        assert torch.equal(opened.read(part), stored[f"base_model.model.{part.name}"])


def with_config(checkpoint_folder: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    stated = json.loads((checkpoint_folder / FOLDER / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(stated))
    save_file(load_file(checkpoint_folder / FOLDER / WEIGHTS), folder / WEIGHTS)
    return folder


def test_what_changes_nothing_is_read(model: ModelSpec, checkpoint_folder: Path, tmp_path: Path) -> None:
    harmless = {"revision": None, "peft_version": "0.18", "use_dora": False, "rank_pattern": {}, "lora_bias": False}
    PeftAdapter(with_config(checkpoint_folder, tmp_path / "own", **harmless), trained_model(model))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"r": 4}, "r: 4 is not what workload.lora.rank states (2); state the same"),
        ({"lora_alpha": 16}, "lora_alpha: 16 is not what train.lora_alpha states (3)"),
        ({"target_modules": ["q_proj"]}, "is not what workload.lora.targets states (down_proj, gate_proj"),
        ({"lora_dropout": 0.05}, "lora_dropout: 0.05 is not trained; take an adapter without it"),
        ({"use_dora": True}, "use_dora: True is not trained"),
        ({"use_rslora": True}, "use_rslora: True is not trained"),
        ({"modules_to_save": ["lm_head"]}, "is not trained; take an adapter without it"),
        ({"rank_pattern": {"q_proj": 8}}, "is not trained"),
        ({"layers_to_transform": [0]}, "is not trained"),
        ({"bias": "all"}, "bias: 'all' is not trained; take an adapter with none"),
        ({"init_lora_weights": "pissa"}, "changes the weights beside the adapter"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_adapters_of_other_forms_are_one_line(
    model: ModelSpec, checkpoint_folder: Path, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    folder = with_config(checkpoint_folder, tmp_path / "own", **changes)
    with pytest.raises(InputError) as error:
        PeftAdapter(folder, trained_model(model))
    assert line in str(error.value)


def test_adapters_of_another_model_are_one_line(model: ModelSpec, checkpoint_folder: Path, tmp_path: Path) -> None:
    folder = with_config(checkpoint_folder, tmp_path / "own")
    for other, line in (
        (replace(model, num_layers=model.num_layers + 1), "lacks 'base_model.model.model.layers."),
        (replace(model, num_layers=model.num_layers - 1), "has 'base_model.model.model.layers."),
        (replace(model, ffn_size=model.ffn_size + 2), "has the shape"),
    ):
        with pytest.raises(InputError, match=line):
            PeftAdapter(folder, trained_model(other))
    with pytest.raises(InputError, match=r"is not a folder; give one with adapter_config.json"):
        PeftAdapter(tmp_path / "none", trained_model(model))


# ------------------------------------------------------------------ what goes on


def problem(model: ModelSpec, **more: Any) -> Problem:
    lora = {"rank": 2, "targets": ("q", "o", "gate", "down")}
    settings = {"training": "lora", "lora": lora, "precision": "fp32"} | more
    return Problem(cluster(("a", "fast", 1)), model, Workload(BATCH, SEQ_LEN, **settings))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"training": "full", "lora": Lora()}, "trained with workload.training=lora, not full"),
        ({"lora": Lora(4, ("q", "o", "gate", "down"))}, "trained with workload.lora.rank=2, not 4"),
        ({"lora": Lora(2, "qv")}, "trained with workload.lora.targets=[q,o,gate,down], not [q,v]"),
        ({"optimizer": "sgd"}, "trained with workload.optimizer=adamw, not sgd"),
    ],
)
def test_a_run_goes_on_with_what_was_trained(
    model: ModelSpec, checkpoint_folder: Path, more: dict[str, Any], line: str
) -> None:
    assert resumed_progress(checkpoint_folder, problem(model), SEED).step == 3
    with pytest.raises(InputError) as error:
        resumed_progress(checkpoint_folder, problem(model, **more), SEED)
    assert line in str(error.value)


def test_a_run_goes_on_beside_the_same_weights(
    model: ModelSpec, base: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    task = problem(model)
    assert adapter_start(task, checkpoint_folder, None, None, None) == (base, 3.0)
    assert adapter_start(task, None, None, checkpoint_folder / FOLDER, None) == (None, 3.0)
    assert adapter_start(task, None, None, None, None) == (None, 4.0)
    others = ((part.name, 2 * initial_values(3, part)) for part in whole_parts(model))
    write_hugging_face(tmp_path / "other", model, others, torch.float32)
    with pytest.raises(InputError, match="are not the weights beside which"):
        adapter_start(task, checkpoint_folder, tmp_path / "other", None, None)
    with pytest.raises(InputError, match=r"export.weights: .* are not the weights beside which"):
        exported_weights(checkpoint_folder, tmp_path / "other")
    with pytest.raises(InputError, match=r"train.lora_alpha: 7 is not that of .*, 3; leave it out"):
        adapter_start(task, checkpoint_folder, None, None, 7.0)
    with pytest.raises(InputError, match="resume and adapter exclude each other"):
        adapter_start(task, checkpoint_folder, None, checkpoint_folder / FOLDER, None)
    full = problem(model, training="full", lora=Lora())
    for adapter, alpha in ((checkpoint_folder / FOLDER, None), (None, 2.0)):
        with pytest.raises(InputError, match=r"goes with workload.training=lora only; state that too"):
            adapter_start(full, None, None, adapter, alpha)

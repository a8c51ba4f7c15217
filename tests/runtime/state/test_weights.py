"""Weights in Hugging Face's files: what is written loads again, parts are cuts of the whole, and what is refused."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hexiopt.errors import InputError
from hexiopt.files.huggingface import read_model
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import EMBEDDING, HEAD, stage_parts, whole_parts
from runtime.mapping.parts import ParameterPart, shards
from runtime.state import weights
from runtime.state.weights import CONFIG, INDEX, SINGLE, HuggingFaceWeights, write_hugging_face
from runtime.training.trainee import initial_values
from tests.runtime.model.test_decoder import decoder, sequences, tiny
from tests.slow import slow_but

LLAMA = ModelSpec(
    name="tiny",
    architecture="llama",
    num_layers=2,
    hidden_size=12,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    ffn_size=10,
    vocab_size=17,
    max_positions=32,
)
TIED = replace(LLAMA, tied_embeddings=True)
MODELS = {
    "llama": replace(LLAMA, rope_theta=300, norm_eps=1e-2),
    "llama-biases": replace(TIED, attention_bias=True, mlp_bias=True),
    "mistral": replace(LLAMA, architecture="mistral", head_dim=2),
    "mistral-window": replace(LLAMA, architecture="mistral", attention_window=3),
    "qwen2": replace(LLAMA, architecture="qwen2", attention_bias=True, head_dim=2),
    "qwen2-window": replace(TIED, architecture="qwen2", attention_bias=True, attention_window=3),
    "qwen3": replace(LLAMA, architecture="qwen3", rope_theta=1e6),
    "qwen3-window": replace(TIED, architecture="qwen3", attention_bias=True, attention_window=3),
    **{case: tiny(case) for case in ("llama-llama3", "qwen3-mixed", "gemma2", "gemma3_text-scaled", "olmo3", "arcee")},
    **{case: tiny(case) for case in ("seed_oss", "granite_swa", "youtu-yarn", "deepseek_v3")},
    **{case: tiny(case) for case in ("bamba", "granitemoehybrid", "qwen3_next", "nemotron_h")},
}
NORM = "model.layers.1.input_layernorm.weight"
OTHER = 1500  # bytes of a shard, less than a model has


def tensors(model: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Random values of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        part.name: torch.randn(part.shape, generator=generator) * 0.3 + (len(part.shape) == 1)
        for part in whole_parts(model)
    }


def write(folder: Path, model: ModelSpec = LLAMA, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    values = tensors(model, seed)
    write_hugging_face(folder, model, values.items(), torch.float32, **options)
    return values


def read(path: Path, model: ModelSpec = LLAMA) -> dict[str, Tensor]:
    source = HuggingFaceWeights(path, model)
    return {part.name: source.read(part).clone() for part in whole_parts(model)}


def outcome(path: Path, model: ModelSpec) -> dict[str, Tensor] | str:
    """What is read, or the refusal."""
    try:
        return read(path, model)
    except InputError as error:
        return str(error)


def equal(values: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return values.keys() == other.keys() and all(torch.equal(values[name], other[name]) for name in values)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("case", slow_but(list(MODELS)[::4], MODELS))
def test_transformers_loads_what_is_written(case: str, tmp_path: Path) -> None:
    """The same logits, no parameter missing or left over, and a configuration that says the same model."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    transformers = pytest.importorskip("transformers")
    model = MODELS[case]
    write(tmp_path, model)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    ours, _ = decoder(model, tmp_path)
    inputs, _ = sequences(model)
    with torch.no_grad():
        logits = theirs(inputs.T, use_cache=False).logits.transpose(0, 1)
        # Gated delta rules are summed in FP32 in another order, which some processors round 2e-5 apart.
        close = 1e-4 if case == "qwen3_next" else 1e-5
        torch.testing.assert_close(ours.logits(ours.hidden(inputs)), logits, atol=close, rtol=close)
    assert logits.abs().max() > 1

    theirs.save_pretrained(tmp_path / "again")
    assert replace(read_model(tmp_path / "again" / CONFIG), name=model.name) == model
    assert equal(read(tmp_path / "again", model), read(tmp_path, model))


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("shard_bytes", [1, OTHER])
def test_what_is_written_is_read(case: str, shard_bytes: int, tmp_path: Path) -> None:
    model = MODELS[case]
    values = write(tmp_path, model, shard_bytes=shard_bytes)
    assert equal(read(tmp_path, model), values)
    assert read_model(tmp_path / CONFIG) == model


def test_one_file(tmp_path: Path) -> None:
    """It has what the library itself would write, and can be given by its own name."""
    values = write(tmp_path)
    assert files(tmp_path) == {CONFIG, SINGLE}
    assert equal(load_file(tmp_path / SINGLE), values)
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    (tmp_path / SINGLE).rename(tmp_path / "mine.safetensors")
    assert equal(read(tmp_path / "mine.safetensors"), values)


def test_several_files(tmp_path: Path) -> None:
    """Each holds at most the limit, or a single tensor; the index names all, and their size together."""
    values = write(tmp_path, shard_bytes=OTHER)
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names == [f"model-{k:05}-of-{len(names):05}.safetensors" for k in range(1, len(names) + 1)]
    assert files(tmp_path) == {CONFIG, INDEX, *names}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    for name in names:
        held = load_file(tmp_path / name)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= OTHER
        assert held.keys() == {key for key, file in index["weight_map"].items() if file == name}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_stored_in_the_type_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever the type, strides and order of what is given."""
    values = {name: value.repeat_interleave(2, dim=-1)[..., ::2] for name, value in reversed(tensors(LLAMA).items())}
    write_hugging_face(tmp_path, LLAMA, values.items(), dtype, shard_bytes=OTHER)
    assert equal(read(tmp_path), {part.name: values[part.name].to(dtype) for part in whole_parts(LLAMA)})
    assert json.loads((tmp_path / CONFIG).read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


@settings(max_examples=30)
@given(st.data())
def test_parts_are_cuts_of_the_whole(models: dict[str, tuple[Path, dict[str, Tensor]]], data: st.DataObject) -> None:
    """Of any split of the heads, ranks without any among them, and of any stage."""
    case = data.draw(st.sampled_from(["llama-biases", "qwen3"]))
    model, (folder, values) = MODELS[case], models[case]
    cuts = sorted(data.draw(st.lists(st.integers(0, model.num_heads), max_size=3)))
    heads = [high - low for low, high in zip([0, *cuts], [*cuts, model.num_heads], strict=True)]
    source = HuggingFaceWeights(folder, model)
    for shard in shards(model, len(heads), data.draw(st.sampled_from([None, heads]))):
        for part in stage_parts(model, [(0, 2)], shard, data.draw(st.booleans()), data.draw(st.booleans())):
            cut = source.read(part)
            assert cut.shape == part.local_shape
            assert torch.equal(cut, values[part.name].narrow(part.dim, part.start, part.end - part.start))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    folders = {case: tmp_path_factory.mktemp(case) for case in ("llama-biases", "qwen3")}
    return {case: (folder, write(folder, MODELS[case], shard_bytes=OTHER)) for case, folder in folders.items()}


def test_what_is_read_does_not_change_the_file(tmp_path: Path) -> None:
    values = write(tmp_path)
    HuggingFaceWeights(tmp_path, LLAMA).read(ParameterPart(NORM, (12,), 0, 3, 7)).zero_()
    assert equal(read(tmp_path), values)


def test_first_values_are_written_and_read(tmp_path: Path) -> None:
    """As a run writes and reads them."""
    values = {part.name: initial_values(1, part) for part in whole_parts(TIED)}
    write_hugging_face(tmp_path, TIED, values.items(), torch.float32)
    assert equal(read(tmp_path, TIED), values)


# ------------------------------------------------------------------ writing again, and being interrupted


@pytest.mark.parametrize(("before", "after"), [(OTHER, 10**9), (10**9, OTHER), (700, OTHER)])
def test_a_model_takes_the_place_of_another(before: int, after: int, tmp_path: Path) -> None:
    """No shard of the old one is left; what else is in the folder stays."""
    write(tmp_path, TIED, seed=1, shard_bytes=before)
    (tmp_path / "tokenizer.json").write_text("{}")
    values = write(tmp_path / "new", shard_bytes=after)
    expected = files(tmp_path / "new") | {"tokenizer.json"}
    shutil.rmtree(tmp_path / "new")
    write(tmp_path, shard_bytes=after)
    assert equal(read(tmp_path), values)
    assert files(tmp_path) == expected


def test_a_model_may_be_written_where_it_is_read(tmp_path: Path) -> None:
    values = write(tmp_path)
    source = HuggingFaceWeights(tmp_path, LLAMA)
    parts = ((part.name, source.read(part)) for part in whole_parts(LLAMA))
    write_hugging_face(tmp_path, LLAMA, parts, torch.float32)
    assert equal(read(tmp_path), values)


def test_an_interrupted_call_leaves_the_old_weights(tmp_path: Path) -> None:
    old = write(tmp_path, seed=1)
    before = files(tmp_path)

    def interrupted_weights() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors(LLAMA).items())[:-1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hugging_face(tmp_path, LLAMA, interrupted_weights(), torch.float32)
    with pytest.raises(AssertionError):
        write_hugging_face(tmp_path, LLAMA, list(tensors(LLAMA).items())[:-1], torch.float32)
    assert files(tmp_path) == before
    assert equal(read(tmp_path), old)


@pytest.mark.parametrize("shard_bytes", [OTHER, 10**9])
def test_interrupted_while_put_in_place_all_or_nothing_loads(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removal and each move is the last one in turn."""
    acts: list[tuple[Any, str, Any]] = [(Path, "unlink", Path.unlink), (os, "replace", os.replace)]
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here outlives the test, so the disk can take its time
    old = write(tmp_path / "old", seed=1, shard_bytes=OTHER)
    outcomes = set()
    for last in range(100):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(last))
        left = iter(range(last))

        def count_down(act: Callable[..., None], left: Iterator[int] = left) -> Callable[..., None]:
            def run(*args: Any, **options: Any) -> None:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                act(*args, **options)

            return run

        with monkeypatch.context() as patch:
            for owner, name, act in acts:
                patch.setattr(owner, name, count_down(act))
            try:
                new = write(folder, seed=2, shard_bytes=shard_bytes)
            except KeyboardInterrupt:
                new = tensors(LLAMA, seed=2)
            else:
                assert equal(read(folder), new)
                break
        result = outcome(folder, LLAMA)
        if isinstance(result, str):
            assert f"has neither {SINGLE} nor" in result
            outcomes.add("none")
        else:
            assert equal(result, old) or equal(result, new)
            outcomes.add("old" if equal(result, old) else "new")
    assert outcomes >= {"none", "old"}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda folder: folder.write_text(""), "cannot be written (File exists); choose a folder with room"),
        (lambda folder: (folder / SINGLE).mkdir(parents=True), "cannot be written ("),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(act: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    act(folder)
    refusal(lambda: write(folder), f"{folder}: {message}")


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "sync", full)
    refusal(lambda: write(tmp_path), f"{tmp_path}: cannot be written (No space left on device); choose a folder")
    assert files(tmp_path) == set()


# ------------------------------------------------------------------ refusals


def refusal(act: Callable[[], Any], *parts: str) -> None:
    """`act` raises an InputError of one line with all `parts`."""
    with pytest.raises(InputError) as caught:
        act()
    message = str(caught.value)
    assert len(message) < 600
    for part in parts:
        assert part in message


def write_changed(folder: Path, **values: Tensor | None) -> Path:
    """A single file with some tensors added, replaced, or (None) left out."""
    saved = {name: value for name, value in (tensors(LLAMA) | values).items() if value is not None}
    save_file(saved, folder / SINGLE)
    return folder / SINGLE


BELONG = "check that weights and config.json belong together"


def test_a_missing_parameter_is_refused(tmp_path: Path) -> None:
    file = write_changed(tmp_path, **{NORM: None})
    refusal(lambda: read(tmp_path), f"{tmp_path}: lacks '{NORM}' of the model tiny; {BELONG}")
    refusal(lambda: read(file, replace(LLAMA, num_layers=3)), f"{file}: lacks '{NORM}' and 9 more of the model tiny")


def test_another_shape_is_refused(tmp_path: Path) -> None:
    file = write_changed(tmp_path, **{NORM: torch.ones(13)})
    refusal(lambda: read(tmp_path), f"{file}: {NORM} has the shape [13], in the model tiny [12]; {BELONG}")


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_quantised_are_refused(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    file = write_changed(tmp_path, **{NORM: torch.ones(12).to(dtype)})
    refusal(
        lambda: read(tmp_path),
        f"{file}: {NORM} is of type {name}, and F64, F32, F16, BF16 are read; take the model before it was quantised",
    )


def test_a_parameter_that_would_be_dropped_is_refused(tmp_path: Path) -> None:
    bias = "model.layers.0.mlp.up_proj.bias"
    write_changed(tmp_path, **{bias: torch.ones(10)})
    refusal(lambda: read(tmp_path), f"{tmp_path}: has '{bias}', which the model tiny has not; {BELONG}")
    refusal(lambda: read(tmp_path, replace(LLAMA, num_layers=1)), "' and 9 more, which the model tiny has not")


def test_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    write_changed(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert equal(read(tmp_path), tensors(LLAMA))


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    embedding = tensors(LLAMA)[EMBEDDING]
    write_changed(tmp_path, **{HEAD: embedding.clone()})
    assert read(tmp_path, TIED).keys() == {part.name for part in whole_parts(TIED)}
    for other in (embedding + 1, embedding.double(), embedding[1:].clone()):
        write_changed(tmp_path, **{HEAD: other})
        refusal(
            lambda: read(tmp_path, TIED),
            f"{tmp_path / SINGLE}: {HEAD} is not {EMBEDDING}, to which tie_word_embeddings ties it; "
            "set tie_word_embeddings false, or remove the matrix",
        )


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refusal(lambda: read(tmp_path), f"{tmp_path}: has neither {SINGLE} nor {INDEX}; give a folder with a model saved")
    refusal(lambda: read(tmp_path / "no"), f"{tmp_path / 'no'}: the file does not exist; check the path")
    refusal(lambda: read(tmp_path / "a\0b"), "the file does not exist; check the path")
    refusal(lambda: read(tmp_path / ("long" * 100)), "cannot be read (File name too long); check path and permissions")
    (tmp_path / SINGLE).mkdir()
    refusal(lambda: read(tmp_path), f"{tmp_path / SINGLE}: the file is not a regular file; check the path")


def test_a_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    source = HuggingFaceWeights(tmp_path, LLAMA)
    (tmp_path / SINGLE).unlink()
    refusal(lambda: source.read(whole_parts(LLAMA)[0]), f"{tmp_path / SINGLE}: the file does not exist; check the path")


@given(st.data())
def test_a_damaged_file_is_refused(models: dict[str, tuple[Path, dict[str, Tensor]]], data: st.DataObject) -> None:
    """One that is too short or too long, or has another header: it is refused in one line, or all of it is there."""
    folder, _ = models["qwen3"]
    file = min(folder.glob("*.safetensors"))
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    kind = data.draw(st.sampled_from(["cut", "longer", "header"]))
    if kind == "cut":
        damaged = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "longer":
        damaged = raw + data.draw(st.binary(min_size=1, max_size=9))
    else:
        at = data.draw(st.integers(0, length - 1))
        damaged = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    try:
        file.write_bytes(damaged)
        result = outcome(folder, MODELS["qwen3"])
        assert isinstance(result, str) or kind == "header"
    finally:
        file.write_bytes(raw)


# ------------------------------------------------------------------ the index


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    write(tmp_path, shard_bytes=OTHER)
    return tmp_path


def reindex(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/out.safetensors", "a/b.safetensors", "..", "model.bin", "", 3]
)
def test_an_index_that_leaves_the_folder_is_refused(name: Any, shard_folder: Path) -> None:
    reindex(shard_folder, lambda weight_map: weight_map.update({NORM: name}))
    refusal(lambda: read(shard_folder), f"{shard_folder / INDEX}: weight_map.{NORM}: {name!r} is not ")


def test_a_missing_shard_is_refused(shard_folder: Path) -> None:
    first = min(shard_folder.glob("*.safetensors"))
    first.unlink()
    refusal(lambda: read(shard_folder), f"{first}: the file does not exist; check the path")


def test_an_index_that_is_not_that_of_its_files_is_refused(shard_folder: Path) -> None:
    index = json.loads((shard_folder / INDEX).read_text())["weight_map"]
    shard, other = index[NORM], min(set(index.values()))
    assert shard != other
    reindex(shard_folder, lambda weight_map: weight_map.pop(NORM))
    refusal(
        lambda: read(shard_folder),
        f"{shard_folder / shard}: has '{NORM}', which {INDEX} says is not there; fetch both again",
    )
    reindex(shard_folder, lambda weight_map: weight_map.update({NORM: other}))
    refusal(
        lambda: read(shard_folder),
        f"{shard_folder / other}: lacks '{NORM}', which {INDEX} says is there; fetch both again",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed JSON"),
        ("[]", "[] is not a mapping"),
        ("{}", "weight_map: is missing; state it"),
        ('{"weight_map": 3}', "weight_map: 3 is not a mapping"),
        ('{"weight_map": {}}', "lacks 'model.embed_tokens.weight' and 20 more"),
    ],
)
def test_an_index_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    refusal(lambda: read(tmp_path), str(tmp_path), message)

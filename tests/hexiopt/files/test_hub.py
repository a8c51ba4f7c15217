"""Models by their name on the Hub: from the local cache, from the Hub, or one line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

import hexiopt as hx
from hexiopt.files.hub import is_hub_name
from tests.conftest import Run

CASES = Path(__file__).parents[2] / "cases" / "models"
NAME = "acme/Small-1.5"


def write_cache(cache: Path, name: str = NAME) -> None:
    """A cache as the Hub's client leaves it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text((CASES / "qwen25_0_5b.json").read_text())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "hub"


def test_names_of_the_hub_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-7B")
    for other in ("here/model", "a/b/c", "./a/b", "../a", "/a", "a/m.yaml", "a/config.json", "word", "", "a b/c"):
        assert not is_hub_name(other), other


def test_a_cached_model_is_read_without_asking_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: pytest.fail("asked"))
    write_cache(cache)
    model = hx.model(NAME)
    assert (model.num_params, model.name) == (494_032_768, NAME)


def test_the_snapshot_of_the_main_branch_is_read(cache: Path) -> None:
    write_cache(cache)
    other = cache / "models--acme--Small-1.5" / "snapshots" / "aaa" / "config.json"
    other.parent.mkdir()
    other.write_text((CASES / "smollm2.json").read_text())
    assert hx.model(NAME).num_params == 494_032_768


def test_shipped_models_have_the_names_of_their_headers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hx.model("Qwen/Qwen3-8B") == hx.model("qwen3_8b")
    assert hx.model("openai-community/gpt2-medium") == hx.model("gpt2_345m")  # whose header breaks after the name
    with pytest.raises(hx.InputError, match="huggingface_hub is not installed"):
        hx.model(NAME)


def test_offline_nobody_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hx.InputError, match="HF_HUB_OFFLINE forbids to ask the Hub"):
        hx.model(NAME)


def test_the_hub_is_asked_for_what_is_not_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, file: str, **_: Any) -> str:
        asked.append(f"{name}/{file}")
        return str(CASES / "smollm2.json")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hx.model(NAME).num_params == 1_711_376_384
    assert asked == [f"{NAME}/config.json"]


def _error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("of the client",)
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.GatedRepoError, f"is gated: ask for access at huggingface.co/{NAME}"),
        (errors.RepositoryNotFoundError, "the Hub has no such model, or it is private; check the name"),
        (errors.RemoteEntryNotFoundError, "has no config.json on the Hub"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE forbids to ask the Hub"),
        (errors.HFValidationError, "is not a name of the Hub"),
        (OSError, "the Hub cannot be reached (of the client); check the network"),
        (RuntimeError, "the Hub cannot be reached (of the client); check the network"),
    ],
)
def test_one_line_says_why_not(error: type[Exception], says: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise _error(error)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fails)
    with pytest.raises(hx.InputError) as refused:
        hx.model(NAME)
    text = str(refused.value)
    tried = "is neither a file nor a folder, is not shipped, is not in the local cache of the Hub, and "
    assert text.startswith(f"model: {NAME} {tried}")
    assert says in text


def test_the_command_line_takes_a_name(hexiopt: Run, cache: Path) -> None:
    write_cache(cache)
    ran = hexiopt("plan", "cluster=small_mixed", f"model={NAME}", "solver.max_steps=1", "report=false")
    assert ran.code == 0, ran.err
    assert NAME in ran.out


def test_without_a_network_it_ends_at_once(tmp_path: Path) -> None:
    """A process of its own, whose Hub is an address that refuses connections."""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    code = f"import hexiopt as hx\ntry: hx.model({NAME!r})\nexcept hx.InputError as error: print(error)"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "the Hub cannot be reached" in ran.stdout
    assert "Retrying" not in ran.stderr

"""What `hexiopt train` refuses, in one line and before any process starts: settings, texts, plans.

A configuration is composed once; a case is what it changes of it.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.app.common import Job, RunOutcome, run_verb
from experiments.app.config import Config
from tests.experiments.command_line import job_of
from tests.experiments.test_train import edit_json, plan  # noqa: F401 (a fixture)


@cache
def train_job() -> Job:
    return job_of("train", ["cluster=small_mixed", "model=tiny", "report=false"], Path("trained"))


def refusal(path: Path | None, **train: Any) -> str:
    """The line that ends a run of the plan at `path`, or of one that is to be searched, with other settings."""

    def start() -> Job:
        config: Config = deepcopy(train_job().config)
        config.plan = None if path is None else str(path)
        for key, value in train.items():
            setattr(config.train, key, value)
        config.train.__post_init__()
        overrides = () if path is None else (f"plan={path}",)
        return Job(config, Path("trained").absolute(), train_job().choices, overrides, in_sweep=True)

    ended: RunOutcome = run_verb("train", start)
    assert ended.exit_code == 2, ended.message
    assert "\n" not in ended.message
    assert not Path("trained", "run.json").exists()
    return ended.message


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cases name, in the current folder; no case may search or start processes."""
    monkeypatch.chdir(tmp_path)
    for verb in ("train.search", "train._follow"):
        monkeypatch.setattr(f"experiments.{verb}", lambda *_, **__: pytest.fail("the run has begun"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "short.txt").write_text("to be")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "texts" / "b.txt").symlink_to("nowhere")
    (tmp_path / "no.npy").write_text("text")
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint16))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data": "nowhere.txt"}, "nowhere.txt: cannot be read (No such file or directory); check path"),
        ({"data": "empty.txt"}, "empty.txt: is empty; give a text of one sequence at least (workload.seq_len)"),
        ({"data": "empty.jsonl"}, "empty.jsonl: is empty"),
        ({"data": "none-*.jsonl"}, "does not exist"),
        ({"data": "texts"}, "texts/b.txt: cannot be read (No such file or directory)"),
        ({"data": "no.npy"}, "no.npy: is not a whole .npy file"),
        ({"validation": "empty.txt"}, "empty.txt: is empty"),
        ({"validation": "none.txt"}, "none.txt"),
        ({"validation": 1.5}, "train: validation"),
        ({"validation": 0}, "train: validation: 0 is no share between 0 and 1"),
        ({"validation_every": 0}, "train: validation_every"),
        ({"document_masking": True}, "train: document_masking: True needs to know where documents end"),
        ({"separator": [1]}, "train: separator"),
        ({"separator": "</s>"}, "train.separator: '</s>' is a text, and there is no train.tokenizer"),
        ({"tokenizer": "none.json"}, "none.json: the file does not exist"),
        ({"resume": "nowhere"}, "nowhere: is not a checkpoint"),
        ({"weights": "nowhere"}, "nowhere"),
        ({"weights": "a", "resume": "b"}, "train: resume and weights exclude each other"),
        ({"launch": "machine", "machine": "old"}, "train.master: is missing"),
        ({"loggers": ["excel"]}, "train: loggers: 'excel' is not known"),
        ({"loggers": ["wandb"], "launch": "torchrun"}, "loggers: there are none under torchrun"),
        ({"trace_steps": -1}, "train: trace_steps"),
        ({"trace_steps": 49}, "train.trace_steps: 49 after the first 2 are more than the 50 steps of this run"),
        ({"steps": 0}, "train: steps"),
        ({"on_failure": "pray"}, "train: on_failure"),
        ({"lr": -1}, "train: lr"),
        ({"device": "tpu"}, "train: device"),
        ({"lr_schedule": "steps"}, "train: lr_schedule"),
        ({"decay_share": 2}, "train: decay_share"),
    ],
    ids=str,
)
def test_settings_are_judged_and_texts_opened_before_the_search(setting: dict[str, Any], message: str) -> None:
    assert message in refusal(None, **setting)
    assert not Path("trained").exists()


def missing_layer(data: Any) -> None:
    data["pipelines"][0]["stages"][0]["layers"][1] -= 1


def extra_layer(data: Any) -> None:
    data["pipelines"][0]["stages"][-1]["layers"][1] += 1


def device_twice(data: Any) -> None:
    data["pipelines"][0]["stages"][0]["devices"] = data["pipelines"][0]["stages"][1]["devices"]


def wrong_shares(data: Any) -> None:
    data["pipelines"][0]["num_micro_batches"] += 1


def other_counts(data: Any) -> None:
    """ZeRO-3 over pipelines of unequally many micro-batches."""
    first, second = data["pipelines"]
    first["num_micro_batches"] = second["num_micro_batches"] + 1
    data["sharding"]["stage"] = 3


def other_model(data: Any) -> None:
    data["problem"]["model"]["num_hidden_layers"] += 1


def sequence(
    tokens: Sequence[int] = (20, 12), heads: Sequence[int] = (3, 1), order: str = "zigzag", groups: int = 1
) -> Callable[[Any], None]:
    """The first stage in a sequence layout over its device and one that is free, as so many equal groups."""

    def change(data: Any) -> None:
        stages = data["pipelines"][0]["stages"]
        group = {
            "devices": [*stages[0]["devices"], "new:1"],
            "tokens": [n // groups for n in tokens],
            "heads": list(heads),
        }
        stages[0] = {"layers": stages[0]["layers"], "sequence": {"groups": [group] * groups, "order": order}}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing_layer, "layer"),
        (extra_layer, "layer"),
        (device_twice, "device"),
        (wrong_shares, "sequences"),
        (other_model, "does not belong to the problem"),
        (other_counts, "sharding: ZeRO-3 over pipelines of unequally many micro-batches; give all as many"),
        (sequence(), "stage 0 of pipeline 0 has a sequence layout; allow them with space.sequence=true"),
        (sequence(tokens=[32, 0]), "has tokens (32, 0); give every device at least 1"),
        (sequence(order="spiral"), "spiral"),
        (sequence(groups=2), "is used 2 times"),
    ],
)
def test_a_bad_plan_starts_nothing(plan: Path, change: Callable[[Any], None], message: str) -> None:  # noqa: F811
    edit_json(plan, change)
    assert message in refusal(plan)
    assert not Path("trained").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data": "short.txt"}, "short.txt: has 5 tokens, and one window takes 33 (workload.seq_len + 1)"),
        ({"data": "tokens.npy"}, "vocab"),
        ({"separator": 999}, "train.separator: 999 is no token; the model's are from 0 to"),
        ({"launch": "torchrun"}, "RANK is not set"),
    ],
    ids=str,
)
def test_what_the_plan_cannot_be_trained_on_starts_nothing(
    plan: Path,  # noqa: F811
    setting: dict[str, Any],
    message: str,
) -> None:
    assert message in refusal(plan, **setting)

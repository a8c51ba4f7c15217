"""`train` with adapters: a whole run, which goes on, begins another one, and is exported merged."""

import json
from pathlib import Path

import pytest

from tests.experiments.command_line import Run

SMALL = ("workload=small", "workload.global_batch=4", "workload.seq_len=32", "workload.training=lora")
PLAN = ("cluster=small_mixed", "model=tiny", "constraints.num_pipelines=1", "constraints.num_stages=2")
STEPS = ("train.warmup_steps=1", "train.lr=0.02", "train.checkpoint_every=2")


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.slow  # tests of checkpoints and of peft's files do the same without processes of their own
def test_adapters_are_trained_resumed_and_exported(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("train", *PLAN, *SMALL, *STEPS, "solver.max_steps=40", "train.steps=4", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    whole = losses(tmp_path / "out")
    assert whole[-1] < whole[0] - 0.1
    last = tmp_path / "out" / "checkpoints" / "step-00000004"
    assert json.loads((last / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 32

    words = ("train", "plan=out/plan.json", *STEPS)
    half = tmp_path / "out" / "checkpoints" / "step-00000002"
    ran = hexiopt(*words, f"train.resume={half}", "train.steps=4", "hydra.run.dir=again")
    assert ran.code == 0, ran.err
    assert losses(tmp_path / "again") == pytest.approx(whole[2:], rel=1e-6)

    ran = hexiopt("export", f"export.checkpoint={last}", "export.precision=fp32", "hydra.run.dir=exported")
    assert ran.code == 0, ran.err
    weights = tmp_path / "exported" / "huggingface"
    ran = hexiopt(*words, f"train.weights={weights}", "train.steps=1", "hydra.run.dir=further")
    assert ran.code == 0, ran.err
    adapter = f"train.adapter={last / 'adapter'}"
    ran = hexiopt(*words, adapter, "train.steps=1", "hydra.run.dir=begun")
    assert ran.code == 0, ran.err
    assert losses(tmp_path / "further")[0] == pytest.approx(losses(tmp_path / "begun")[0], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((*SMALL, "workload.lora.storage=nf4"), "workload.lora.storage: nf4 cannot be trained, only planned"),
        (("workload=small", "workload.optimizer=adamw_8bit"), "adamw_8bit cannot be trained, only planned"),
        (("workload=small", "train.lora_alpha=8"), "train.lora_alpha: 8 goes with workload.training=lora only"),
        (("workload=small", "train.adapter=none"), "goes with workload.training=lora only; state that too"),
        ((*SMALL, "train.adapter=none"), "is not a folder; give one with adapter_config.json"),
        ((*SMALL, "train.lora_alpha=0"), "train: lora_alpha: 0.0 is out of range; it must be above 0"),
        ((*SMALL, "workload.lora.dropout=0.1"), "workload.lora.dropout: unknown key; known: adapter_bytes, rank"),
    ],
)
def test_what_is_not_trained_is_one_line(hexiopt: Run, words: tuple[str, ...], line: str) -> None:
    ran = hexiopt("train", *PLAN, *words)
    assert ran.code == 2
    assert line in ran.err
    assert len(ran.err.strip().splitlines()) == 1

"""A training run made from what its user states: every input is checked before any process starts."""

from collections.abc import Mapping
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from runtime.data.batches import Batches
from runtime.data.tokens import prepare
from runtime.launch.settings import Settings, TrainingRun
from runtime.state.checkpoint import Checkpoint
from runtime.state.weights import HuggingFaceWeights


def resumable_step(checkpoint: Path, model: ModelSpec) -> int:
    """The step that a checkpoint is at. Raises InputError where it is damaged, or of another model than `model`."""
    found = Checkpoint(checkpoint)
    if found.model.to_dict() | {"name": ""} != model.to_dict() | {"name": ""}:
        raise InputError(f"train.resume: {checkpoint} is of another model than {model.name}; train that one")
    found.check()
    return found.progress.step


def prepared_run(
    plan: Path, problem: Problem, folder: Path, settings: Settings, paths: Mapping[str, Path | None]
) -> TrainingRun:
    """The run of the plan file `plan` in `folder`, its text turned into tokens.

    `paths` are those of `data`, `tokenizer`, `resume` and `weights`, each may be None. Raises InputError where one
    cannot be read or does not suit the model; `resume` is `resumable_step`'s to check.
    """
    weights, workload = paths["weights"], problem.workload
    if weights is not None:
        HuggingFaceWeights(weights, problem.model)
    tokens = prepare(paths["data"], paths["tokenizer"], folder / "tokens", problem.model.vocab_size)
    Batches(tokens, workload.seq_len, workload.global_batch, settings.seed)
    return TrainingRun(plan, tokens.absolute(), folder / "checkpoints", settings, paths["resume"], weights)

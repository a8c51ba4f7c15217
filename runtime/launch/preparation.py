"""A training run made from what its user states: every input is checked before any process starts."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from runtime.data.batches import Batches
from runtime.data.corpus import prepare
from runtime.launch.settings import Settings, TrainingRun
from runtime.state.checkpoint import Checkpoint, CheckpointProgress, finished
from runtime.state.weights import HuggingFaceWeights


def resumed_progress(checkpoint: Path, problem: Problem, seed: int) -> CheckpointProgress:
    """How far the run of a checkpoint has come. Raises InputError where it is damaged, or does not go on with the model
    and the sequences of `problem` and `seed`. The global batch may be another: the run goes on at the same token."""
    found, model, seq_len = Checkpoint(checkpoint), problem.model, problem.workload.seq_len
    if found.model.to_dict() | {"name": ""} != model.to_dict() | {"name": ""}:
        raise InputError(f"train.resume: {checkpoint} is of another model than {model.name}; train that one")
    for what, then, now in (
        ("workload.seq_len", found.progress.seq_len, seq_len),
        ("train.seed", found.progress.seed, seed),
    ):
        if then != now:
            raise InputError(
                f"train.resume: {checkpoint} was trained with {what}={then}, not {now}, which would cut or order its "
                f"text anew; state {what}={then}, or start a run of its own from its weights (train.weights)"
            )
    found.check()
    return found.progress


def _own_name(checkpoints: Path, resume: Path | None) -> str:
    """The name of a run: that of the checkpoint it goes on from, else a new one. Raises InputError where the folder has
    checkpoints of another."""
    run = secrets.token_hex(4) if resume is None else Checkpoint(resume).progress.run
    for there in finished(checkpoints):
        if (other := Checkpoint(there).progress.run) != run:
            raise InputError(
                f"{there}: is of run {other}, not of this one; go on with train.resume={there}, or choose another "
                "hydra.run.dir"
            )
    return run


def prepared_run(
    plan: Path, problem: Problem, folder: Path, settings: Settings, paths: Mapping[str, Path | None]
) -> TrainingRun:
    """The run of the plan file `plan` in `folder`, its text turned into tokens.

    `paths` are those of `data`, `tokenizer`, `resume` and `weights`, each may be None. Raises InputError where one
    cannot be read or does not suit the model; `resume` is checked by `resumed_progress`.
    """
    weights, workload = paths["weights"], problem.workload
    if weights is not None:
        HuggingFaceWeights(weights, problem.model)
    tokens = prepare(paths["data"], paths["tokenizer"], folder / "tokens", problem.model.vocab_size)
    Batches(tokens, workload.seq_len, settings.seed)
    checkpoints = folder / "checkpoints"
    run = _own_name(checkpoints, paths["resume"])
    return TrainingRun(run, plan, tokens.absolute(), checkpoints, settings, paths["resume"], weights)

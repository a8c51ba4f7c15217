"""A training run made from what its user states: every input is checked before any process starts."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.problem.lora import Lora
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import FULL, LORA
from runtime.data.corpus import TOKENS, Corpus, Documents, prepare, separator_token
from runtime.mapping.adapters import Adapters
from runtime.settings import Settings
from runtime.state.adapter_files import PeftAdapter, stated_alpha, weights_beside
from runtime.state.checkpoint import Checkpoint, CheckpointProgress, TrainedModel, finished_checkpoints
from runtime.training.settings import TrainingRun


def resumed_progress(
    checkpoint: Path, problem: Problem, seed: int, validation_share: float = 0.0
) -> CheckpointProgress:
    """How far the run of a checkpoint has come. Raises InputError where it is damaged, or does not go on with the model
    and the sequences of `problem`, `seed` and what is held out. The global batch may be another: the run goes on at the
    same token."""
    stored, model, seq_len = Checkpoint(checkpoint), problem.model, problem.workload.seq_len
    if stored.model.to_dict() | {"name": ""} != model.to_dict() | {"name": ""}:
        raise InputError(f"train.resume: {checkpoint} is of another model than {model.name}; train that one")
    for what, then, now in (
        ("workload.seq_len", stored.progress.seq_len, seq_len),
        ("train.seed", stored.progress.seed, seed),
        ("train.validation", stored.progress.validation_share, validation_share),
    ):
        if then != now:
            raise InputError(
                f"train.resume: {checkpoint} was trained with {what}={then}, not {now}, which would cut or order its "
                f"text anew; state {what}={then}, or start a run of its own from its weights (train.weights)"
            )
    workload, trained = problem.workload, stored.trained
    facts, wanted = (
        _training_facts(trained.optimizer, trained.lora),
        _training_facts(workload.optimizer, workload.adapters),
    )
    for name, value in wanted.items():
        if facts[name] != value:
            raise InputError(
                f"train.resume: {checkpoint} was trained with workload.{name}={facts[name]}, not {value}, and lacks "
                f"what that goes on from; state workload.{name}={facts[name]}, or start a run of its own"
            )
    stored.check()
    return stored.progress


def _training_facts(optimizer: str, lora: Lora | None) -> dict[str, str]:
    """What a checkpoint and a run must have in common beside the model."""
    facts = {"optimizer": optimizer, "training": FULL if lora is None else LORA}
    if lora is not None:
        facts |= {"lora.rank": str(lora.rank), "lora.targets": f"[{','.join(lora.matrices)}]"}
    return facts


def adapter_start(
    problem: Problem, resume: Path | None, weights: Path | None, adapter: Path | None, alpha: float | None
) -> tuple[Path | None, float | None]:
    """The weights beside adapters, and their alpha, with which a run begins: as stated, or else as the checkpoint or
    the adapter folder says that it begins from.

    Raises InputError where they are others than there, or where nothing has adapters.
    """
    if problem.workload.adapters is None:
        for what, value in (("adapter", adapter), ("lora_alpha", alpha)):
            if value is not None:
                shown = f"{value:g}" if isinstance(value, float) else value
                raise InputError(f"train.{what}: {shown} goes with workload.training=lora only; state that too")
        return weights, None
    if resume is not None and adapter is not None:
        raise InputError("train: resume and adapter exclude each other; state one of them")
    if resume is None:
        alpha = stated_alpha(adapter) if adapter is not None and alpha is None else alpha
        adapters = Adapters.of(problem.workload, alpha)
        assert adapters is not None
        if adapter is not None:
            PeftAdapter(adapter, TrainedModel(problem.model, adapters=adapters))
        return weights, adapters.alpha
    trained = Checkpoint(resume).trained
    assert trained.adapters is not None, "`resumed_progress` has compared them"
    if alpha not in (None, trained.adapters.alpha):
        raise InputError(
            f"train.lora_alpha: {alpha:g} is not that of {resume}, {trained.adapters.alpha:g}; leave it out"
        )
    return weights_beside(resume, trained, weights, "train.weights"), trained.adapters.alpha


def _run_name(checkpoints: Path, resume: Path | None) -> str:
    """The name of a run: that of the checkpoint it goes on from, else a new one. Raises InputError where the folder has
    checkpoints of another."""
    run = secrets.token_hex(4) if resume is None else Checkpoint(resume).progress.run
    for there in finished_checkpoints(checkpoints):
        if (other := Checkpoint(there).progress.run) != run:
            raise InputError(
                f"{there}: is of run {other}, not of this one; go on with train.resume={there}, or choose another "
                "hydra.run.dir"
            )
    return run


def prepared_run(
    plan: Path,
    problem: Problem,
    folder: Path,
    settings: Settings,
    corpus: Corpus,
    *,
    resume: Path | None = None,
    weights: Path | None = None,
    adapter: Path | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> TrainingRun:
    """The run of the plan file `plan` in `folder`, its text turned into tokens, whose number `on_tokens` hears.

    Raises InputError where the text cannot be read or does not suit the model; `resume` is checked by
    `resumed_progress`, `weights` where they are opened, and `adapter` by `adapter_start`.
    """
    workload, separator = problem.workload, separator_token(corpus.separator, corpus.tokenizer)
    tokens, *apart = (
        prepare(source, corpus.tokenizer, folder / TOKENS, problem.model.vocab_size, separator, on_tokens).absolute()
        for source in corpus.sources()
    )
    validation = apart[0] if apart else None
    checkpoints = folder / "checkpoints"
    settings = replace(settings, separator=separator if corpus.document_masking else None)
    run = TrainingRun(
        _run_name(checkpoints, resume), plan, tokens, checkpoints, settings, validation, resume, weights, adapter
    )
    names = [source.where if isinstance(source, Documents) else source for source in corpus.sources()]
    run.batches(workload.seq_len, names[0])
    held_out = run.validation_batches(workload.seq_len, names[-1])
    if held_out is not None and held_out.num_windows < workload.global_batch:
        raise InputError(
            f"train.validation: has {held_out.num_windows} sequences, and a global batch {workload.global_batch}; "
            "give it more text, or take a smaller workload.global_batch"
        )
    return run

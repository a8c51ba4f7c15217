"""`hexiopt export plan=path/plan.json export.format=slurm`: a plan in the files of other systems; and of a checkpoint
(`export.checkpoint=...`), weights for other programs.

`export.format` is a launcher, which starts the processes of `export.trainer` (by default ours), a trainer alone, or
`ranks`, the table of who runs where that stands beside all of them. docs/exports.md has them all.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from experiments.app.cli import main
from experiments.app.common import Job
from experiments.app.verb_config import HUGGING_FACE
from hexiopt import export
from hexiopt.errors import InputError


def run(job: Job) -> float:
    """Export a plan, or a checkpoint; returns the plan's step time in seconds, or no number. Raises InputError."""
    config = job.config.export
    if (config.format == HUGGING_FACE) != (job.config.plan is None):
        argument = "plan=..." if job.config.plan else "no plan=..."
        raise InputError(
            f"export.format: {config.format} does not go with {argument}; give plan=path/plan.json with the format of "
            f"a trainer or launcher, or export.checkpoint=... with {HUGGING_FACE}"
        )
    return _export_weights(job) if job.config.plan is None else _export_plan(job)


def _export_plan(job: Job) -> float:
    config, plan = job.config.export, job.priced_plan()
    exported = export(
        plan,
        config.format,
        job.folder,
        config.trainer,
        master=config.master,
        job=config.job,
        image=config.image,
        minutes=config.minutes,
        gpu_names=config.gpu_names or {},
        remote_folder=config.folder,
    )
    for note in exported.notes:
        job.show(f"Note: {note}.")
    job.show_files("plan.json", *exported.files)
    if exported.start:
        job.show("", f"Start: {exported.start}")
    return plan.cost.step_time_s


def _export_weights(job: Job) -> float:
    if find_spec("torch") is None:
        raise InputError("export: needs torch; install hexiopt[train]")
    from runtime.state.weights import DTYPES, write_hugging_face
    from runtime.training.beginning import exported_weights

    config = job.config.export
    if config.checkpoint is None:
        raise InputError("export.checkpoint: is missing; name a folder step-NNNNNNNN, or a plan with plan=...")
    weights = None if config.weights is None else Path(config.weights).absolute()
    model, tensors = exported_weights(Path(config.checkpoint), weights)
    write_hugging_face(job.folder / HUGGING_FACE, model, tensors, DTYPES[config.precision])
    job.show_files(HUGGING_FACE)
    return float("nan")


if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))

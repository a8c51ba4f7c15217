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
from experiments.app.config import HUGGING_FACE
from experiments.price import priced
from hexiopt.errors import InputError
from hexiopt.exports.formats import LaunchOptions, Program, Trainer
from hexiopt.exports.launchers.registry import LAUNCHERS
from hexiopt.exports.rank_table import FILE as RANKS
from hexiopt.exports.rank_table import rank_rows, table_text
from hexiopt.exports.trainers.registry import OWN, TRAINERS
from hexiopt.readers.plan_file import PlanFile, plan_file_to_dict


def run(job: Job) -> float:
    """Export a plan, or a checkpoint; returns the plan's step time in seconds, or no number. Raises InputError."""
    config = job.config.export
    if (config.format == HUGGING_FACE) != (job.config.plan is None):
        given = "plan=..." if job.config.plan else "no plan=..."
        raise InputError(
            f"export.format: {config.format} does not go with {given}; give plan=path/plan.json with the format of a "
            f"trainer or launcher, or export.checkpoint=... with {HUGGING_FACE}"
        )
    return _export_weights(job) if job.config.plan is None else _export_plan(job)


def _export_plan(job: Job) -> float:
    config, file = job.config.export, job.plan_file()
    cost = priced(file, str(job.config.plan))
    trainer = _trainer(job)
    program = _program(trainer, file)
    rows = rank_rows(file.problem.cluster, file.plan, program.devices)
    written, notes, start = dict(program.files), [*program.notes], ""
    if config.format in LAUNCHERS:
        options = LaunchOptions(
            folder=config.folder or str(job.folder.absolute()),
            job=config.job,
            master=config.master,
            image=config.image,
            minutes=config.minutes,
            gpu_names=config.gpu_names,
        )
        launch = LAUNCHERS[config.format].write(file.problem.cluster, rows, program, options)
        written |= launch.files
        notes += launch.notes
        start = launch.start
    job.write_json("plan.json", plan_file_to_dict(file.problem, file.plan, cost, file.solver))
    job.write(RANKS, table_text(rows))
    for name, text in written.items():
        job.write(name, text)
    for note in notes:
        job.show(f"Note: {note}.")
    job.show_files("plan.json", RANKS, *written)
    if start:
        job.show("", f"Start: {start}")
    return cost.step_time_s


def _trainer(job: Job) -> Trainer:
    config = job.config.export
    if config.format in TRAINERS and config.trainer not in (None, config.format):
        raise InputError(
            f"export.trainer: {config.trainer} does not go with export.format={config.format}, which is a trainer too; "
            f"take export.format=torchrun, or another launcher, with export.trainer={config.trainer}"
        )
    return TRAINERS[config.format if config.format in TRAINERS else config.trainer or OWN]


def _program(trainer: Trainer, file: PlanFile) -> Program:
    """The plan in the trainer's terms. Raises InputError where it cannot train the model, or express the plan."""
    if trainer.name == OWN:
        from runtime.mapping.layout import untrainable

        wrong = untrainable(file.problem.model, file.problem.workload, file.plan)
    else:
        wrong = trainer.unsuitable(file.problem)
    if wrong is not None:
        raise InputError(f"export.format: {trainer.name}: {wrong}")
    return trainer.write(file.problem, file.plan)


def _export_weights(job: Job) -> float:
    if find_spec("torch") is None:
        raise InputError("export: needs torch; install hexiopt[train]")
    from runtime.mapping.parts import whole_parts
    from runtime.state.checkpoint import Checkpoint
    from runtime.state.weights import DTYPES, write_hugging_face

    config = job.config.export
    if config.checkpoint is None:
        raise InputError("export.checkpoint: is missing; name a folder step-NNNNNNNN, or a plan with plan=...")
    checkpoint = Checkpoint(Path(config.checkpoint))
    checkpoint.check()
    model = checkpoint.model
    tensors = ((part.name, checkpoint.read("weight", part)) for part in whole_parts(model))
    write_hugging_face(job.folder / HUGGING_FACE, model, tensors, DTYPES[config.precision])
    job.show_files(HUGGING_FACE)
    return float("nan")


if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))

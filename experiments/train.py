"""`hexiopt train cluster=small_mixed model=tiny`: trains with a plan, given or found first."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.app.common import FailedError, Job, found, search, solver_of
from experiments.app.reports import show_plan, show_training
from experiments.cli import main
from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.readers.plan_file import PlanFile, plan_file_to_dict, read_plan, solver_to_dict

if TYPE_CHECKING:
    from runtime.launch.session import TrainedStep
    from runtime.launch.settings import TrainingRun

_OF_A_MACHINE = ("train.machine=", "train.master=")


def run(job: Job) -> float:
    """Train; returns the last loss. Raises InputError before any process starts, NoPlanError, FailedError."""
    if find_spec("torch") is None:
        raise InputError("train: needs torch; install hexiopt[train]")
    from runtime.launch.admission import check_trainable, trainable
    from runtime.launch.supervisor import TrainingFailedError
    from runtime.launch.torchrun import train_as_torchrun

    config = job.config.train
    if job.config.plan:
        plan_path, plan_file = Path(job.config.plan).absolute(), job.plan_file()
    else:
        plan_path = _planned(job, trainable(job.problem), "plan.json")
        plan_file = read_plan(plan_path)
    check_trainable(plan_path, plan_file)
    started = _run_of(job, plan_path, plan_file.problem)
    if started is None:
        return float("nan")
    try:
        if config.launch == "torchrun":
            return train_as_torchrun(started, plan_file, config.device, config.force)
        if config.launch == "machine" and config.machine is None:
            return _write_launch_file(job, plan_path, plan_file)
        return _train_here(job, started, plan_file)
    except TrainingFailedError as error:
        raise FailedError(str(error)) from None


def _planned(job: Job, problem: Problem, name: str) -> Path:
    """Find a plan and write it; its path."""
    result = search(job, solver_of(job), problem)
    plan, cost = found(result)
    made_by = solver_to_dict(result)
    job.write_json(name, plan_file_to_dict(problem, plan, cost, made_by))
    show_plan(job, problem, plan, cost, made_by)
    return job.folder / name


def _run_of(job: Job, plan_path: Path, problem: Problem) -> "TrainingRun | None":
    """The run that the configuration describes, its inputs checked; None where it is complete already."""
    from runtime.data.batches import Batches
    from runtime.data.tokens import prepare
    from runtime.launch.settings import Settings, TrainingRun
    from runtime.parallel.optimizer import AdamW
    from runtime.state.checkpoint import Checkpoint
    from runtime.state.weights import HuggingFaceWeights

    config = job.config.train
    resume, weights, data, tokenizer = map(_path, (config.resume, config.weights, config.data, config.tokenizer))
    if resume is not None:
        checkpoint = Checkpoint(resume)
        if checkpoint.model.to_dict() | {"name": ""} != problem.model.to_dict() | {"name": ""}:
            raise InputError(f"train.resume: {resume} is of another model than {problem.model.name}; train that one")
        checkpoint.check()
        if checkpoint.progress.step >= config.steps:
            done = f"{resume} is at step {checkpoint.progress.step} of train.steps={config.steps}"
            job.show(f"The run is complete: {done}. To go on, set train.steps above that.")
            return None
    if weights is not None:
        HuggingFaceWeights(weights, problem.model)
    tokens = prepare(data, tokenizer, job.folder / "tokens", problem.model.vocab_size)
    Batches(tokens, problem.workload.seq_len, problem.workload.global_batch, job.config.seed)
    adam = {key: getattr(config, key) for key in ("lr", "beta1", "beta2", "weight_decay", "max_norm")}
    schedule = ("steps", "warmup_steps", "min_lr_share", "checkpoint_every", "keep_checkpoints", "timeout_s")
    settings = Settings(adam=AdamW(**adam), seed=job.config.seed, **{key: getattr(config, key) for key in schedule})
    return TrainingRun(plan_path, tokens.absolute(), job.folder.absolute() / "checkpoints", settings, resume, weights)


def _path(stated: str | None) -> Path | None:
    return None if stated is None else Path(stated).absolute()


def _write_launch_file(job: Job, plan_path: Path, plan_file: PlanFile) -> float:
    """Write one command for each machine of the plan."""
    from runtime.launch.launch_file import launch_script, machines_of

    names = machines_of(plan_file)
    master = job.config.train.master or f"{names[0]}:29500"
    kept = [o for o in job.overrides if o.startswith(("train.", "seed=")) and not o.startswith(_OF_A_MACHINE)]
    first = ["hexiopt", "train", f"plan={plan_path}", *kept]
    last = [f"train.master={master}", f"hydra.run.dir={job.folder.absolute()}"]
    job.write("launch.sh", launch_script({name: [*first, f"train.machine={name}", *last] for name in names}))
    job.show_files("launch.sh")
    return float("nan")


def _train_here(job: Job, started: "TrainingRun", plan_file: PlanFile) -> float:
    """Start and follow the processes of this machine; the last loss."""
    from hexiopt.report.training import TrainingProgress
    from runtime.launch.admission import check_machine, chosen_device, ranks_on
    from runtime.launch.launch_file import machines_of
    from runtime.launch.session import Session
    from runtime.launch.supervisor import MachinePlace, supervised

    config, problem, place = job.config.train, plan_file.problem, MachinePlace()
    if config.launch == "machine":
        if config.machine not in (names := machines_of(plan_file)):
            rule = f"has no device of the plan; name one of {', '.join(names)}"
            raise InputError(f"train.machine: {config.machine!r} {rule}")
        if config.master is None:
            raise InputError("train.master: is missing; state host:port of the machine with the plan's first device")
        place = MachinePlace(config.machine, config.master)
    ranks = ranks_on(plan_file, place.machine)
    device, told = chosen_device(config.device, len(ranks))
    if not config.force:
        check_machine(plan_file, ranks, device)
    if told is not None:
        job.show(told)
    plans = [started.plan]

    def replan(lost: Sequence[str]) -> Path:
        left = replace(problem, space=replace(problem.space, exclude=(*problem.space.exclude, *lost)))
        plans.append(_planned(job, left, "replanned.json").absolute())
        return plans[-1]

    name = "metrics.jsonl" if place.machine is None else f"metrics-{place.machine}.jsonl"
    board = _tensorboard(job)
    events = supervised(
        replace(started, device=device), job.folder.absolute(), config.on_failure, replan, config.max_restarts, place
    )
    quoted = TrainingProgress(config.steps, quiet=job.in_sweep)
    with (job.folder / name).open("w", encoding="utf-8") as metrics, quoted:

        def on_step(step: "TrainedStep") -> None:
            quoted.step(step)
            board(step)

        session = Session(problem, metrics, on_step, quoted.tell)
        session.follow(events)
    show_training(job, problem, read_plan(plans[-1]).plan, session.steps, session.timelines)
    return session.steps[-1].loss if session.steps else float("nan")


def _tensorboard(job: Job) -> Callable[["TrainedStep"], None]:
    """Writes each step for TensorBoard, if asked for. Raises InputError where it is not installed."""
    if not job.config.train.tensorboard:
        return lambda step: None
    from runtime.launch.tensorboard import Board

    board = Board(job.folder / "tensorboard")

    def write(step: "TrainedStep") -> None:
        values = asdict(step)
        board.step(values.pop("step"), values)

    return write


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""`hexiopt train cluster=small_mixed model=tiny`: trains with a given plan, or with one that it finds first."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.app.cli import main
from experiments.app.common import FailedError, Job, StoppedError, interrupt, plan_of, search
from experiments.app.own_files import shell_override
from experiments.app.reports import show_plan, show_training, write_plan
from experiments.app.verb_config import TrainConfig
from experiments.measure.profiled import on_profiled
from experiments.replan import replan_job
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import read_cluster
from hexiopt.files.plan_file import PlanFile, read_plan
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.study.replan.changes import relaxations
from hexiopt.study.solution import PlacedPlan

if TYPE_CHECKING:
    from runtime.data.corpus import Corpus
    from runtime.data.rows import DatasetRows
    from runtime.training.session import Session
    from runtime.training.settings import TrainingRun

_PATHS = ("tokenizer", "resume", "weights", "adapter")


def run(job: Job) -> float:
    """Train; returns the last loss. Raises InputError before it starts any process, NoPlanError, FailedError and
    StoppedError."""
    if find_spec("torch") is None:
        raise InputError("train: needs torch; install hexiopt[train]")
    config, folder = job.config.train, job.folder.absolute()
    if config.launch == "machine" and config.machine is not None:
        return _join(config.master, config.machine)
    replans = ("solver", "seed") if config.on_failure == "replan" else ()
    plan_file = job.plan_file(*replans) if job.config.plan else None
    problem = job.problem if plan_file is None else plan_file.problem
    paths = {key: None if getattr(config, key) is None else Path(getattr(config, key)).absolute() for key in _PATHS}
    resume, weights, adapter = paths["resume"], paths["weights"], paths["adapter"]
    if resume is not None and weights is not None and problem.workload.adapters is None:
        raise InputError("train: resume and weights exclude each other; state one of them")
    corpus = _corpus(config, paths["tokenizer"])
    corpus.check(folder)  # before torch is loaded and a plan is searched

    from experiments.reports.progress import TokenisingProgress
    from runtime.launch.admission import check_problem, check_trainable
    from runtime.launch.meeting import TrainingFailedError
    from runtime.settings import TRACE_AFTER, Settings
    from runtime.state.weights import HuggingFaceWeights
    from runtime.training.loggers import check_loggers
    from runtime.training.preparation import adapter_start, prepared_run, resumed_progress

    check_loggers(config.loggers)
    check_problem(problem, document_masking=config.document_masking)
    if weights is not None:
        HuggingFaceWeights(weights, problem.model)
    seed, reached = job.config.seed if config.seed is None else config.seed, 0
    if resume is not None:
        reached = resumed_progress(resume, problem, seed, config.validation_share).step
        if reached >= config.steps:
            done = f"{resume} is at step {reached} of train.steps={config.steps}"
            job.show(f"The run is complete: {done}. To go on, set train.steps above that.")
            return float("nan")
    weights, alpha = adapter_start(problem, resume, weights, adapter, config.lora_alpha)
    if config.trace_steps and reached + TRACE_AFTER + config.trace_steps > config.steps:
        raise InputError(
            f"train.trace_steps: {config.trace_steps} after the first {TRACE_AFTER} are more than the "
            f"{config.steps - reached} steps of this run; trace fewer, or raise train.steps"
        )
    plan = _find_plan(job, problem, "plan.json") if plan_file is None else Path(str(job.config.plan)).absolute()
    if interrupt.pressed:  # the search, whose best plan is kept
        return float("nan")
    plan_file = plan_file or read_plan(plan)
    check_trainable(plan, plan_file, document_masking=config.document_masking)
    _computing_on(job, plan_file.problem, plan_file.plan)  # refuses a profile that does not suit before the run
    derived = {"seed": seed, "separator": None, "validation_share": config.validation_share, "lora_alpha": alpha}
    settings = Settings.of(vars(config) | derived)
    with TokenisingProgress(quiet=job.in_sweep) as on_tokens:
        started = prepared_run(
            plan,
            plan_file.problem,
            folder,
            settings,
            corpus,
            resume=resume,
            weights=weights,
            adapter=adapter,
            on_tokens=on_tokens,
        )
    try:
        if config.launch == "torchrun":
            from runtime.launch.worker import train_as_torchrun

            return train_as_torchrun(started, plan_file, config.device, config.force, config.machine)
        return _follow(job, started, plan_file)
    except TrainingFailedError as error:
        raise FailedError(str(error)) from None


def _corpus(config: TrainConfig, tokenizer: Path | None) -> "Corpus":
    """What the run reads. Raises InputError."""
    from runtime.data.corpus import Corpus
    from runtime.data.rows import HUB, DatasetRows, is_rows

    def source(location: str | None, split: str) -> "Path | DatasetRows | None":
        if location is None:
            return None
        path = location if location.startswith(HUB) else str(Path(location).absolute())
        return DatasetRows(path, config.text_column, split, config.data_subset) if is_rows(path) else Path(path)

    apart = config.validation if isinstance(config.validation, str) else None
    data, validation = source(config.data, config.data_split), source(apart, config.validation_split)
    return Corpus(data, validation, tokenizer, config.separator, config.document_masking)


def _computing_on(job: Job, problem: Problem, plan: Plan) -> Problem:
    """The problem that predictions are made for: on the machine of `train.profile` where it is stated. Raises
    InputError."""
    file = job.config.train.profile
    return problem if file is None else on_profiled(problem, plan, read_cluster(file), f"train.profile: {file}")


def _join(master: str | None, machine: str) -> float:
    """Take part in a run as one of its machines, until it has ended."""
    from runtime.launch.agent import LostError, serve

    if master is None:
        raise InputError("train.master: is missing; state host:port of the head, as it shows them")
    try:
        serve(master, machine)
    except LostError as error:
        raise FailedError(str(error)) from None
    return float("nan")


def _find_plan(job: Job, problem: Problem, name: str) -> Path:
    """Find a plan and write it; returns its path."""
    plan = plan_of(search(job, problem))
    write_plan(job, plan, name)
    show_plan(job, plan)
    return job.folder.absolute() / name


def _find_plan_without(
    job: Job, problem: Problem, lost: Sequence[str], before: Path, checkpoint: Path | None, name: str
) -> Path:
    """The plan for `problem` without `lost` devices that reaches the last step first, after the plan `before` and from
    `checkpoint`, which all devices read; written as `name`.

    Constraints on its shape are dropped, with a note, where there is no plan that keeps them. Raises NoPlanLeftError
    where there is none at all that can be trained, whatever the reason.
    """
    from hexiopt.study.replan.report import replanning_table
    from runtime.launch.admission import check_trainable
    from runtime.launch.head import NoPlanLeftError
    from runtime.training.session import step_of

    file, reached = read_plan(before), 0 if checkpoint is None else step_of(checkpoint)
    steps = min(job.config.replan.horizon_steps, float(max(1, job.config.train.steps - reached)))
    old = PlacedPlan.of(file.problem, file.plan, file.solver)
    why: Exception | None = None
    for space, dropped in relaxations(problem.space.replace(exclude=(*problem.space.exclude, *lost))):
        try:
            left = replace(problem, space=space)
            replanning = replan_job(job, old, left, horizon_steps=steps, restores=True)
            best = replanning.best.plan
            job.write_json(name, best.to_dict())
            path = job.folder.absolute() / name
            check_trainable(path, read_plan(path), document_masking=job.config.train.document_masking)
        except Exception as error:  # of a solver too: the run goes on in any case
            why = error
            continue
        if dropped:
            keys = " and ".join(f"constraints.{key}={getattr(problem.space, key)}" for key in dropped)
            job.show(f"Note: planned without {keys}: {_one_line(why).partition(';')[0]}.")
        show_plan(job, best)
        job.show("", replanning_table(replanning))
        return path
    raise NoPlanLeftError(_one_line(why))


def _one_line(error: Exception | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _follow(job: Job, started: "TrainingRun", plan_file: PlanFile) -> float:
    """Be the head of a run, whose processes are on this machine or on those of the plan; returns the last loss. Raises
    FailedError and StoppedError."""
    from experiments.reports.progress import TrainingProgress
    from runtime.launch.admission import admit_ranks, ranks_on
    from runtime.launch.head import AfterFaults, Stop, training_events
    from runtime.launch.launch_file import launch_script, machines_of, meeting_address
    from runtime.launch.meeting import MeetingPlace, TrainingFailedError
    from runtime.training.loggers import Loggers
    from runtime.training.session import Session

    config, problem = job.config.train, plan_file.problem
    computing_on = _computing_on(job, problem, plan_file.plan)
    if config.launch == "machine":
        run, master = replace(started, device=config.device), meeting_address(config.master)
        place = MeetingPlace(master)
        job.write("launch.sh", launch_script(machines_of(plan_file, config.on_failure == "replan"), master))
        job.show(f"Waiting for the machines of the plan at {master}; each runs sh launch.sh NAME.")
        job.show_files("launch.sh")
    else:
        device, fallback = admit_ranks(plan_file, ranks_on(plan_file, None), config.device, config.force)
        run, place = replace(started, device=device), MeetingPlace()
        if fallback is not None:
            job.show(fallback)
    numbers = count(1)

    def replan(lost: Sequence[str], before: Path, checkpoint: Path | None) -> Path:
        return _find_plan_without(job, problem, lost, before, checkpoint, f"replanned-{next(numbers)}.json")

    goes_on = started.resume is not None and started.resume.parent == started.checkpoints
    with (
        (job.folder / "metrics.jsonl").open("a" if goes_on else "w", encoding="utf-8") as metrics,
        TrainingProgress(config.steps, quiet=job.in_sweep) as progress,
        closing(Loggers(config.loggers, job.folder.absolute(), run.run, asdict(config), progress.tell)) as loggers,
        interrupt.caught(),
    ):
        session = Session(computing_on, metrics, progress.step, loggers.log, progress.tell)
        faults = AfterFaults(config.on_failure, replan, config.max_restarts)
        stop = Stop(lambda: interrupt.pressed, config.stop_s)
        try:
            session.follow(training_events(run, run.checkpoints.parent, faults, place, force=config.force, stop=stop))
        except KeyboardInterrupt:  # the second
            raise StoppedError(_how_to_resume(run, session)) from None
        except TrainingFailedError as error:
            if not session.steps and started.resume is None:
                raise
            raise FailedError(f"{error}; ended {_how_to_resume(run, session)}") from None
    show_training(job, computing_on, read_plan(session.plan or started.plan).plan, session)
    if interrupt.pressed:
        raise StoppedError(_how_to_resume(run, session))
    return session.steps[-1].loss if session.steps else float("nan")


def _how_to_resume(run: "TrainingRun", session: "Session") -> str:
    """At which step a run is, and what goes on from there."""
    from runtime.state.checkpoint import finished_checkpoints

    written = finished_checkpoints(run.checkpoints)
    last = written[-1] if written else run.resume
    at = f"at step {session.steps[-1].step}" if session.steps else "before the first step"
    if last is None:
        first = f", before the first checkpoint (train.checkpoint_every={run.settings.checkpoint_every})"
        return at + (first if session.steps else "")
    return f"{at}; resume with {shell_override('train.resume', last)}"


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""`hexiopt train cluster=small_mixed model=tiny`: trains with a plan, given or found first."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.cli import main
from experiments.common import FailedError, Job, found, search
from experiments.reports import show_plan
from hexiopt.cost.model import CostModel
from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import AUTO
from hexiopt.readers.plan_file import PlanFile, plan_file_to_dict, read_plan, solver_to_dict
from solvers.registry import make_solver

_OF_A_MACHINE = ("train.machine=", "train.master=")


@dataclass(frozen=True)
class Ended:
    """A step of training that has ended; `mfu` counts all devices of the plan's cluster, also where others train."""

    step: int
    loss: float
    norm: float
    seconds: float
    tokens_per_s: float
    mfu: float

    @classmethod
    def of(cls, event: Mapping[str, Any], problem: Problem) -> "Ended":
        """The step that an event tells of."""
        workload, seconds = problem.workload, event["seconds"]
        flops = workload.tokens * problem.model.model_flops_per_token(workload.seq_len)
        peak_flops = problem.cluster.total_peak_flops(workload.precision)
        mfu = flops / (seconds * peak_flops)
        return cls(event["step"], event["loss"], event["norm"], seconds, workload.tokens / seconds, mfu)


def run(job: Job) -> float:
    """Train; returns the last loss. Raises InputError before any process starts, NoPlanError, FailedError."""
    if find_spec("torch") is None:
        raise InputError("train: needs torch; install hexiopt[train]")
    from runtime.data.batches import Batches
    from runtime.data.tokens import prepare
    from runtime.launch.admission import check_machine, chosen_device, ranks_on
    from runtime.launch.settings import Run
    from runtime.launch.supervisor import Place, TrainingFailedError, supervised
    from runtime.state.checkpoint import Checkpoint
    from runtime.state.weights import HuggingFaceWeights

    config = job.config.train
    if job.config.plan:
        plan_path = Path(job.config.plan).absolute()
    else:
        plan_path = _planned(job, trainable(job.problem), "plan.json")
    plan_file = job.plan_file() if job.config.plan else read_plan(plan_path)
    problem, plan = plan_file.problem, plan_file.plan
    check_trainable(plan_path, plan_file)
    resume = None
    if config.resume is not None:
        resume = Path(config.resume).absolute()
        checkpoint = Checkpoint(resume)
        if checkpoint.model.to_dict() | {"name": ""} != problem.model.to_dict() | {"name": ""}:
            raise InputError(f"train.resume: {resume} is of another model than {problem.model.name}; train that one")
        checkpoint.check()
        if checkpoint.progress.step >= config.steps:
            done = f"{resume} is at step {checkpoint.progress.step} of train.steps={config.steps}"
            job.show(f"The run is complete: {done}. To go on, set train.steps above that.")
            return float("nan")
    weights = None if config.weights is None else Path(config.weights).absolute()
    if weights is not None:
        HuggingFaceWeights(weights, problem.model)
    tokens = prepare(_path(config.data), _path(config.tokenizer), job.folder / "tokens", problem.model.vocab_size)
    settings = _settings(job)
    Batches(tokens, problem.workload.seq_len, problem.workload.global_batch, settings.seed)
    run_of_all = Run(plan_path, tokens.absolute(), job.folder.absolute() / "checkpoints", settings, resume, weights)

    used = [plan_path]

    def replan(lost: Sequence[str]) -> Path:
        left = replace(problem, space=replace(problem.space, exclude=(*problem.space.exclude, *lost)))
        used.append(_planned(job, left, "replanned.json").absolute())
        return used[-1]

    if config.launch == "torchrun":
        return _one_of_torchrun(run_of_all, plan_file, config.device, config.force)
    if config.launch == "machine" and config.machine is None:
        return _commands(job, problem, plan, plan_path)
    if config.launch == "machine" and config.machine not in (names := _machines(problem, plan)):
        raise InputError(f"train.machine: {config.machine!r} has no device of the plan; name one of {', '.join(names)}")
    if config.launch == "machine" and config.master is None:
        raise InputError("train.master: is missing; state host:port of the machine with the plan's first device")
    place = Place(config.machine, config.master) if config.launch == "machine" else Place()
    ranks = ranks_on(plan_file, place.machine)
    device, told = chosen_device(config.device, len(ranks))
    if not config.force:
        check_machine(plan_file, ranks, device)
    if told is not None:
        job.show(told)
    run_of_all = replace(run_of_all, device=device)
    name = "metrics.jsonl" if place.machine is None else f"metrics-{place.machine}.jsonl"
    ended: list[Ended] = []
    timelines: list[dict[str, Any]] = []
    board = _tensorboard(job)
    events = supervised(run_of_all, job.folder.absolute(), config.on_failure, replan, config.max_restarts, place)
    try:
        with (job.folder / name).open("w", encoding="utf-8") as metrics, _shown(job, settings.steps) as shown:
            for event in events:
                if event["event"] == "timeline":
                    timelines.append(event)
                    continue
                if event["event"] == "step":
                    ended.append(Ended.of(event, problem))
                    event = {"event": "step", **asdict(ended[-1])}
                    shown.step(ended[-1])
                    board(ended[-1])
                print(json.dumps(event), file=metrics, flush=True)
                if event["event"] == "restart":
                    ended = [one for one in ended if one.step <= _step_of(event["from"])]
                    shown.tell(f"{event['reason']}; going on from {event['from'] or 'the start'}")
    except TrainingFailedError as error:
        raise FailedError(str(error)) from None
    _conclude(job, problem, read_plan(used[-1]).plan, ended, timelines)
    return ended[-1].loss if ended else float("nan")


def _one_of_torchrun(run: Any, plan_file: PlanFile, wanted: str, force: bool) -> float:
    """One rank of all, started by torchrun, which says which. Returns the last loss."""
    from runtime.launch.admission import check_machine, chosen_device
    from runtime.launch.rank import run_rank

    try:
        rank, local, size = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    except KeyError as missing:
        raise InputError(f"train.launch=torchrun: {missing.args[0]} is not set; start it by torchrun") from None
    if size != len(plan_file.plan.devices()):
        raise InputError(
            f"train.launch=torchrun: {size} processes for {len(plan_file.plan.devices())} devices of the plan; "
            "set --nnodes and --nproc-per-node to them, or take train.launch=machine"
        )
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    device, told = chosen_device(wanted, num_local)
    if not force:
        check_machine(plan_file, range(rank - local, rank - local + num_local), device)
    if told is not None and local == 0:
        print(told, file=sys.stderr)
    run = replace(run, device=device)
    losses = [float("nan")]

    def tell(event: dict[str, Any]) -> None:
        if event["event"] in ("error", "stopped"):
            raise FailedError(event["reason"].strip().splitlines()[-1])
        if event["event"] == "step":
            losses.append(event["loss"])
        if rank == 0 and event["event"] != "beat":
            print(json.dumps(event), flush=True)

    run_rank(run, plan_file, rank, local, master, tell)
    return losses[-1]


def _commands(job: Job, problem: Problem, plan: Plan, plan_path: Path) -> float:
    """Write one command for each machine of the plan."""
    names = _machines(problem, plan)
    master = job.config.train.master or f"{names[0]}:29500"
    kept = [o for o in job.overrides if o.startswith(("train.", "seed=")) and not o.startswith(_OF_A_MACHINE)]
    lines = [
        "#!/bin/sh",
        "# launch.sh MACHINE: what each machine of the plan runs; the folder is shared.",
        'case "$1" in',
    ]
    for name in names:
        words = ["hexiopt", "train", f"plan={plan_path}", *kept, f"train.machine={name}", f"train.master={master}"]
        lines.append(f"{shlex.quote(name)}) exec {shlex.join([*words, f'hydra.run.dir={job.folder.absolute()}'])} ;;")
    lines += [f"*) echo \"launch.sh: no machine '$1'; name one of {', '.join(names)}\" >&2; exit 2 ;;", "esac"]
    job.write("launch.sh", "\n".join(lines) + "\n")
    job.show_files("launch.sh")
    return float("nan")


def _machines(problem: Problem, plan: Plan) -> list[str]:
    """The machines that a plan uses, the one with rank 0 first."""
    cluster = problem.cluster
    machines = sorted({int(cluster.machine_of[device]) for device in plan.devices()})
    return [cluster.machines[machine].name for machine in machines]


def _path(stated: str | None) -> Path | None:
    return None if stated is None else Path(stated)


def _step_of(checkpoint: str | None) -> int:
    return 0 if checkpoint is None else int(Path(checkpoint).name.removeprefix("step-"))


def trainable(problem: Problem) -> Problem:
    """The problem, whose plans can be trained: an open ZeRO stage is 1. Raises InputError where none can."""
    from runtime.mapping.layout import untrainable

    cannot = untrainable(problem.model, problem.workload)
    if cannot is not None:
        raise InputError(cannot)
    if problem.workload.optimizer_sharding != AUTO:
        return problem
    return replace(problem, workload=replace(problem.workload, optimizer_sharding="1"))


def check_trainable(path: str | Path, plan_file: PlanFile) -> None:
    """Raise InputError where the plan of a file is not valid or cannot be trained."""
    from runtime.mapping.layout import untrainable

    problem, plan = plan_file.problem, plan_file.plan
    cannot = untrainable(problem.model, problem.workload, plan)
    if cannot is not None:
        raise InputError(cannot)
    wrong = check(problem, plan)
    if wrong:
        raise InputError(f"{path}: {wrong[0].text}; plan again")


def _planned(job: Job, problem: Problem, name: str) -> Path:
    """Find a plan and write it; its path."""
    result = search(job, make_solver(job.config.solver.name, **job.config.solver.options()), problem)
    plan, cost = found(result)
    made_by = solver_to_dict(result)
    job.write_json(name, plan_file_to_dict(problem, plan, cost, made_by))
    show_plan(job, problem, plan, cost, made_by)
    return job.folder / name


def _settings(job: Job) -> Any:
    from runtime.launch.settings import Settings
    from runtime.parallel.optimizer import AdamW

    config = job.config.train
    return Settings(
        steps=config.steps,
        adam=AdamW(
            lr=config.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            max_norm=config.max_norm,
        ),
        warmup_steps=config.warmup_steps,
        min_lr_share=config.min_lr_share,
        seed=job.config.seed,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        timeout_s=config.timeout_s,
    )


def _tensorboard(job: Job) -> Callable[[Ended], None]:
    """Writes what is known of each step for TensorBoard, if asked for. Raises InputError where it is not installed."""
    if not job.config.train.tensorboard:
        return lambda ended: None
    if find_spec("tensorboard") is None:
        raise InputError("train.tensorboard: needs tensorboard; install hexiopt[tensorboard]")
    from runtime.launch.tensorboard import Board

    board = Board(job.folder / "tensorboard")

    def write(ended: Ended) -> None:
        values = asdict(ended)
        board.step(values.pop("step"), values)

    return write


def _shown(job: Job, steps: int) -> Any:
    from hexiopt.report.training import TrainingProgress

    return TrainingProgress(steps, quiet=job.in_sweep)


def _conclude(
    job: Job, problem: Problem, plan: Plan, ended: Sequence[Ended], timelines: Sequence[Mapping[str, Any]]
) -> None:
    """Print and draw what came of it."""
    from hexiopt.report.measured import MeasuredOperation, MeasuredRank, both_timelines, measured_table
    from hexiopt.report.training import draw_training, training_table

    if not ended:
        return
    written = ["metrics.jsonl", "checkpoints"]
    if timelines and not job.in_sweep:
        cost = CostModel(problem).price(plan)
        ranks = [
            MeasuredRank(
                one["pipeline"],
                one["stage"],
                one["replica"],
                one["device"],
                tuple(MeasuredOperation(bool(b), *rest) for b, *rest in one["operations"]),
                one["peak_bytes"],
            )
            for one in timelines
        ]
        job.show("", measured_table(problem, plan, cost, ranks))
        job.write("timeline.json", json.dumps(both_timelines(problem, plan, cost, ranks), allow_nan=False))
        written.append("timeline.json")
    steps, losses = [one.step for one in ended], [one.loss for one in ended]
    if job.pictures:
        job.draw("loss.png", lambda path: draw_training(steps, losses, path))
        written.append("loss.png")
    job.show("", training_table(ended))
    job.show_files(*written)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""`hexiopt calibrate run=FOLDER`: factors of a cluster, fitted to what its runs measured.

`run` is a folder of `hexiopt train`, or a log of Megatron-LM or torchtitan with the plan that it ran as `plan=`; a list
fits several. `calibration.yaml` is what `calibration:` of a cluster file names.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.app.common import Job
from experiments.measure.calibrating import MeasuredRun, fit, predict, step_of
from experiments.measure.training_logs import logged_step_times
from hexiopt.errors import InputError
from hexiopt.files.calibration_file import calibration_text
from hexiopt.files.plan_file import read_plan
from hexiopt.files.training_files import plan_of_run, read_rank_times, read_steps
from hexiopt.problem.factors import Calibration
from hexiopt.report.style import count, seconds
from hexiopt.report.tabular import plain_table
from hexiopt.study.solution import PlacedPlan

FILE = "calibration.yaml"
_NONE = Calibration({})
_MEANING = {"between": "rate of links between machines", "inside": "rate of links inside machines"}


def calibrate_runs(job: Job) -> float:
    """Fit, show the runs before and after, write the factors; returns no number. Raises InputError."""
    paths = job.config.run
    runs = [_measured_run(Path(str(path)), job.config.plan) for path in (paths if isinstance(paths, list) else [paths])]
    if len({run.plan.problem.cluster.calibrated for run in runs}) > 1:
        raise InputError("run: the runs' clusters have different calibrations; give runs of one cluster file")
    runs_in_words = f"{count(len(runs), 'run')}: {', '.join(run.name for run in runs)}"
    calibration = fit(runs, runs_in_words)
    job.write(FILE, calibration_text(calibration, _head(runs_in_words)))
    job.show(_factor_table(calibration))
    job.show("", _run_table(runs, calibration))
    job.show_files(FILE)
    return float("nan")


def _measured_run(path: Path, plan: str | None) -> MeasuredRun:
    """What a run measured; `plan` is the file of what it ran, which only a folder of our own executor knows itself."""
    if path.is_dir():
        file = read_plan(plan or plan_of_run(path))
        times_s, device_s = list(read_steps(path)["seconds"]), read_rank_times(path)
        if not times_s:
            raise InputError(f"{path}: has no step; give the folder of a run that has trained")
    elif plan is None:
        raise InputError(
            f"run: {path} does not say what it ran; give its plan too: plan=path/plan.json (hexiopt import)"
        )
    else:
        file, device_s = read_plan(plan), {}
        times_s = logged_step_times(path, file.problem.workload.tokens, len(file.plan.devices()))
    placed = PlacedPlan.of(file.problem, file.plan, file.solver)
    return MeasuredRun(path.name, placed, step_of(times_s), device_s)


def _head(runs_in_words: str) -> list[str]:
    return [
        f"Fitted by hexiopt calibrate to {runs_in_words}.",
        "A cluster file names this file as `calibration: PATH`; hexiopt explain says where the factors are used.",
    ]


def _factor_table(calibration: Calibration) -> object:
    rows = [
        (name, f"{factor:.4g}", _MEANING.get(name, f"speed of operators on {name.partition('.')[2]}"))
        for name, factor in calibration.factors.items()
    ]
    return plain_table(
        ("Factor", "Value", "Of what the cost model has"), rows, left=("Factor", "Of what the cost model has")
    )


def _run_table(runs: Sequence[MeasuredRun], calibration: Calibration) -> object:
    rows = []
    for run in runs:
        cluster = run.plan.problem.cluster
        before_s, after_s = (predict(run, factors)[0] for factors in (_NONE, calibration.over(cluster)))
        errors = [f"{one_s / run.step_s - 1:+.1%}" for one_s in (before_s, after_s)]
        rows.append((run.name, seconds(run.step_s), seconds(before_s), errors[0], seconds(after_s), errors[1]))
    return plain_table(("Run", "Measured", "Before", "Error", "After", "Error"), rows, left=("Run",))

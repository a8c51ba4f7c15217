"""Predictions beside what a machine of one's own made of the plans: `hexiopt validate data=gpu.json`."""

from pathlib import Path

import numpy as np

from experiments.app.common import Job
from experiments.measure.trial_files import TriedPlan, read_trials
from experiments.reports.validation import Prediction, draw_validation, validation_csv
from experiments.validation.score import Scored
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.report.tabular import plain_table
from hexiopt.units import GIB

_HEADER = ("Plan", "Step, ms", "priced", "error", "GiB at most", "priced", "error")


def price_trials(job: Job, path: Path) -> float:
    """Price every plan of a file of trials and show the errors; returns their mean of step times, in percent.

    Raises InputError where no plan has been trained with.
    """
    trials = read_trials(path)
    known = [trial for trial in trials if trial.trouble is None]
    if not known:
        raise InputError(f"{path}: none of its {len(trials)} plans could be trained; its measured.trouble says why")
    costs = [PlanPricer(trial.plan_file.problem).price(trial.plan_file.plan) for trial in known]
    predictions = [_prediction(*pair) for pair in enumerate(zip(known, costs, strict=True))]
    rows = [_row(trial, cost) for trial, cost in zip(known, costs, strict=True)]
    job.write("validation.csv", validation_csv(predictions))
    job.show(plain_table(_HEADER, rows, left=("Plan",)))
    for trial in trials:
        if trial.trouble is not None:
            job.show(f"not trained: {trial.name}: {trial.trouble}")
    scored = Scored.of_ratios(np.array([row.predicted_step_s / row.measured_step_s for row in predictions]))
    job.show("", f"{len(known)} of {len(trials)} plans: mean error {scored.mean_percent:.1f} %.")
    written = ["validation.csv"]
    if job.pictures:
        title = f"{path.name}: {len(known)} plans, mean error {scored.mean_percent:.1f} %"
        job.draw("validation.png", lambda target: draw_validation(predictions, title, target))
        written.append("validation.png")
    job.show_files(*written)
    return scored.mean_percent


def _prediction(number: int, tried: tuple[TriedPlan, Cost]) -> Prediction:
    (trial, cost), (problem, plan) = tried, (tried[0].plan_file.problem, tried[0].plan_file.plan)
    pipeline = plan.pipelines[0]
    return Prediction(
        number + 1,
        trial.name,
        problem.cluster.machines[0].gpu.name,
        len(plan.devices()),
        problem.model.name,
        problem.workload.precision,
        "iter_time_s",
        trial.step_s,
        framework="hexiopt",
        micro_batch_size=pipeline.micro_batch_size,
        recompute="/".join(dict.fromkeys(pipeline.stages[0].recompute)),
        chunks=pipeline.num_chunks,
        predicted=cost.step_time_s,
        measured_step_s=trial.step_s,
        predicted_step_s=cost.step_time_s,
    )


def _row(trial: TriedPlan, cost: Cost) -> list[str]:
    """Memory is that of tensors, as what was measured: without the reserve."""
    predicted = cost.tensor_bytes
    return [
        trial.name,
        f"{1e3 * trial.step_s:.4g}",
        f"{1e3 * cost.step_time_s:.4g}",
        f"{100 * (cost.step_time_s / trial.step_s - 1):+.1f} %",
        f"{trial.peak_bytes / GIB:.3g}",
        f"{predicted / GIB:.3g}",
        f"{100 * (predicted / trial.peak_bytes - 1):+.1f} %",
    ]

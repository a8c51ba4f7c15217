"""`hexiopt validate data=FILE.csv`: predicts measured training runs, and says how far the predictions are off.

The columns are those of `experiments/data/measured_training_throughput.csv`, which is predicted where no file is given.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from experiments.cli import main
from experiments.common import FailedError, Job
from experiments.validation.cases import Given, case_of
from experiments.validation.metrics import in_metric, step_time_s
from experiments.validation.predict import Case, predicted
from experiments.validation.rows import Row, read_rows
from experiments.validation.score import Predicted, Scored, by_family, is_half_precision, spearman
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import RUNS, shipped_measurements
from hexiopt.errors import InputError
from hexiopt.profiles.files import read_profile
from hexiopt.profiles.layers import Profile
from hexiopt.profiles.network import sailor_network
from hexiopt.report.validation import (
    Errors,
    Prediction,
    draw_validation,
    errors_table,
    left_out_table,
    validation_csv,
)

_FAMILY = 8  # rows from which ρ says something
_TYPE = 10  # rows from which a GPU type is summed up


def run(job: Job) -> float:
    """Predict every row; returns the mean error in percent. Raises InputError, FailedError where none can be."""
    path = Path(job.config.data) if job.config.data else RUNS
    rows, given = read_rows(path), _given(job)
    found: list[tuple[Prediction, Predicted | None]] = []
    with Progress(transient=True, disable=job.in_sweep) as progress:
        for row in progress.track(rows, description="predicting"):
            found.append(_predict(row, given))
    predictions = [prediction for prediction, _ in found]
    known = [pair for _, pair in found if pair is not None]
    job.write("validation.csv", validation_csv(predictions))
    reasons = Counter(prediction.reason for prediction in predictions if prediction.reason)
    if not known:
        raise FailedError(f"{path}: none of its {len(rows)} rows can be predicted: {', '.join(reasons)}")
    job.show(errors_table(_by_source_and_gpu(known), "By source and GPU (ρ of the worst family of 8 rows or more)"))
    half = [pair for pair in known if is_half_precision(pair[0].row)]
    job.show("", errors_table(_by_type(half), "BF16 and FP16 rows of GPU types with 10 rows or more"))
    families = [errors for errors in _by_family(known) if errors.num_rows >= _FAMILY]
    job.show("", errors_table(families, "Families of 8 rows or more: one model on one cluster"))
    if reasons:
        job.show("", left_out_table(reasons))
    overall = Scored.of(known)
    job.show("", f"{len(known)} of {len(rows)} rows predicted: mean error {overall.mean_percent:.1f} %.")
    written = ["validation.csv"]
    if job.pictures:
        title = f"{path.name}: {len(known)} runs, mean error {overall.mean_percent:.1f} %"
        job.draw("validation.png", lambda target: draw_validation(predictions, title, target))
        written.append("validation.png")
    job.show_files(*written)
    return overall.mean_percent


def _given(job: Job) -> Given:
    """The measurements to predict with. Raises InputError."""
    config, shipped = job.config.validate, shipped_measurements()
    profile, network = shipped.profile, shipped.network
    if config.profiles is not None:
        profile = Profile([entry for name in config.profiles for entry in read_profile(Path(name)).entries])
    if config.network is not None:
        network = sailor_network(Path(config.network)) if config.network else None
    return Given(profile, network)


def _predict(row: Row, given: Given) -> tuple[Prediction, Predicted | None]:
    said = row.line, row.source, row.gpu, row.gpus, row.model_name, row.precision, row.metric, row.value
    try:
        case = case_of(row, given)
    except (InexpressibleError, InputError) as error:  # InputError: a model or problem that breaks a rule
        return Prediction(*said, reason=str(error)), None
    seconds = predicted(case).step_time_s
    pipeline = case.plan.pipelines[0]
    value = in_metric(case, seconds)
    prediction = Prediction(
        *said,
        framework=case.framework,
        micro_batch_size=pipeline.micro_batch_size,
        recompute=pipeline.stages[0].policy,
        chunks=pipeline.num_chunks,
        predicted=value,
        measured_step_s=step_time_s(case),
        predicted_step_s=seconds,
    )
    return prediction, (case, value)


def _by_source_and_gpu(known: Sequence[Predicted]) -> list[Errors]:
    groups: dict[tuple[str, str], list[Predicted]] = {}
    for pair in known:
        groups.setdefault((pair[0].row.source, pair[0].row.gpu), []).append(pair)
    return [_errors(source, gpu, own) for (source, gpu), own in groups.items()]


def _by_type(known: Sequence[Predicted]) -> list[Errors]:
    groups: dict[str, list[Predicted]] = {}
    for pair in known:
        groups.setdefault(_types(pair[0]), []).append(pair)
    return [_errors("all", gpu, own) for gpu, own in groups.items() if len(own) >= _TYPE]


def _types(case: Case) -> str:
    """The GPU types without their memory: `a100 sxm`."""
    names = (gpu.name.split("_") for gpu in case.problem.cluster.types)
    return " + ".join(sorted({" ".join(word for word in words if not word.endswith("gb")) for words in names}))


def _by_family(known: Sequence[Predicted]) -> list[Errors]:
    found = by_family(known)
    return [_errors(f"{source}: {model}", cluster, own) for (source, model, cluster), own in found.items()]


def _errors(name: str, gpu: str, own: Sequence[Predicted]) -> Errors:
    scored = Scored.of(own)
    orders = [
        spearman([case.row.value for case, _ in family], [value for _, value in family])
        for family in by_family(own).values()
        if len(family) >= _FAMILY
    ]
    rho = min(orders, default=None)
    percents = scored.mean_percent, scored.median_percent, scored.p90_percent, scored.bias_percent
    return Errors(name, gpu, scored.num_rows, *percents, rho)


if __name__ == "__main__":
    sys.exit(main(["validate", *sys.argv[1:]]))

"""`hexiopt validate data=FILE.csv`: predicts measured training runs and reports the errors of the predictions.

The file has the columns of `experiments/data/measured_training_throughput.csv`, which is the default; with it, the
layers that Zorse measured are predicted too. A .json file is one that `make gpu` has written.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.progress import Progress

from experiments.app.cli import main
from experiments.app.common import Job
from experiments.reports.validation import (
    Errors,
    Prediction,
    draw_validation,
    errors_table,
    left_out_table,
    validation_csv,
)
from experiments.validation.cases import Given, case_of
from experiments.validation.errors import held_out, write_errors
from experiments.validation.features import states_feature
from experiments.validation.layers import measured_layers, predicted_s
from experiments.validation.memory import allocated_ratios, process_ratios, reserved_ratios
from experiments.validation.metrics import in_metric, step_time_s
from experiments.validation.own import tried_plans
from experiments.validation.predict import Case, cost_model
from experiments.validation.rows import Row, read_rows
from experiments.validation.score import Predicted, Scored, family, gpu_types, grouped, is_half_precision, spearman
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import RUNS, shipped_measurements
from hexiopt.cost.cost import Cost
from hexiopt.errors import InputError
from hexiopt.files.link_files import sailor_network
from hexiopt.files.profile_files import read_profile
from hexiopt.ledger import Ledger, Vocabulary
from hexiopt.numbers.constants import constant_values
from hexiopt.problem.profile import Profile

_FAMILY = 8  # least number of rows for a meaningful ρ
_MANY_TOKENS = 1024  # of a micro-batch, from which on the host does not bind an eager trainer
_TYPE = 10  # least number of rows for a summary of a GPU type


def run(job: Job) -> float:
    """Predict every row; returns the mean error in percent. Raises InputError where no row can be predicted."""
    path = Path(job.config.data) if job.config.data else RUNS
    if path.suffix == ".json":
        return tried_plans(job, path)
    rows, given = read_rows(path), _given(job)
    results: list[tuple[Prediction, Case | None, Cost | None]] = []
    with Progress(transient=True, disable=job.in_sweep) as progress:
        for row in progress.track(rows, description="predicting"):
            results.append(_predict(row, given))
    predictions = [prediction for prediction, _, _ in results]
    known = [(case, prediction.predicted) for prediction, case, _ in results if case is not None]
    priced = [(case, cost) for _, case, cost in results if case is not None and cost is not None]
    skipped = grouped((left for left in predictions if left.reason), lambda left: left.reason)
    if not known:
        reasons = ", ".join(f"{reason} ({len(group)})" for reason, group in skipped.items())
        raise InputError(f"{path}: none of its {len(rows)} rows can be predicted: {reasons}")
    job.write("validation.csv", validation_csv(predictions))
    if job.config.validate.errors:
        write_errors(Path(job.config.validate.errors), path, priced)
    by_source = _errors_by(known, lambda case: (case.row.source, f"{case.row.gpu} {case.problem.workload.precision}"))
    job.show(errors_table(by_source, f"By source, GPU and precision (ρ of the worst family of {_FAMILY} rows or more)"))
    adapted = [pair for pair in known if pair[0].problem.workload.adapters is not None]
    half = [pair for pair in known if is_half_precision(pair[0].row)]
    by_type = _errors_by(half, lambda case: ("all", gpu_types(case)), at_least=_TYPE)
    families = _errors_by(known, family, at_least=_FAMILY)
    for errors, title in (
        (by_type, f"BF16 and FP16 rows of GPU types with {_TYPE} rows or more"),
        (_errors_by(adapted, _size), "Adapters"),
        (families, f"Families of {_FAMILY} rows or more: one model on one cluster"),
        (_memory_errors(priced), "Peaks of memory: of tensors, of the allocator with its reserve, and of the process"),
        (_layer_errors() if not job.config.data else [], "Forward and backward of a layer, by Zorse"),
    ):
        if errors:
            job.show("", errors_table(errors, title))
    if skipped:
        job.show("", left_out_table({reason: [left.line for left in group] for reason, group in skipped.items()}))
    job.show(*(f"note: {note}" for note in _notes(path, rows)))
    job.show("", *held_out(priced))
    overall = Scored.of(known)
    job.show("", f"{len(known)} of {len(rows)} rows predicted: mean error {overall.mean_percent:.1f} %.")
    written = ["validation.csv"]
    if job.pictures:
        title = f"{path.name}: {len(known)} runs, mean error {overall.mean_percent:.1f} %"
        job.draw("validation.png", lambda target: draw_validation(predictions, title, target))
        written.append("validation.png")
    job.show_files(*written)
    return overall.mean_percent


def _notes(path: Path, rows: Sequence[Row]) -> Iterator[str]:
    """What of the file was not read."""
    columns = {name for row in rows for name in row.others}
    harmless = frozenset(filter(states_feature, columns))
    yield from Ledger(str(path), dict.fromkeys(sorted(columns)), Vocabulary(harmless)).notes()


def _given(job: Job) -> Given:
    """The measurements to predict with. Raises InputError."""
    config, shipped = job.config.validate, shipped_measurements()
    profile, network = shipped.profile, shipped.network
    if config.profiles is not None:
        profile = Profile(tuple(entry for name in config.profiles for entry in read_profile(Path(name)).entries))
    if config.network is not None:
        network = sailor_network(Path(config.network)) if config.network else None
    return Given(profile, network)


def _training(case: Case) -> str:
    return "" if case.problem.workload.adapters is None else ", adapters"


def _size(case: Case) -> tuple[str, str]:
    """Whether a micro-batch has enough tokens that the GPU binds, not the host."""
    tokens = case.problem.workload.seq_len * case.plan.pipelines[0].micro_batch_size
    few = "fewer than" if tokens < _MANY_TOKENS else "at least"
    return f"micro-batches of {few} {_MANY_TOKENS:,} tokens", case.row.gpu


def _memory_errors(priced: Sequence[tuple[Case, Cost]]) -> list[Errors]:
    """Errors of peaks of memory, by source."""
    rows = []
    kinds = ("of tensors", allocated_ratios), ("of the allocator", reserved_ratios), ("of the process", process_ratios)
    for name, ratios_of in kinds:
        for (source, what), group in grouped(priced, lambda pair: (pair[0].row.source, _training(pair[0]))).items():
            ratios = [ratio for case, cost in group for ratio in ratios_of(case, cost)]
            if ratios:
                rows.append(_errors_of(source, name + what, Scored.of_ratios(np.array(ratios))))
    return rows


def _layer_errors() -> list[Errors]:
    """Errors of the times of measured layers, by GPU type and precision, and of all."""
    values = constant_values()
    ratios = [(layer, sum(predicted_s(layer, values)) / layer.seconds) for layer in measured_layers()]
    kinds = grouped(ratios, lambda pair: f"{pair[0].gpu} {pair[0].workload.precision}")
    named = [*sorted(kinds.items()), ("all", ratios)]
    return [
        _errors_of("Zorse", kind, Scored.of_ratios(np.array([ratio for _, ratio in group]))) for kind, group in named
    ]


def _errors_of(name: str, kind: str, scored: Scored, rho: float | None = None) -> Errors:
    percents = scored.mean_percent, scored.median_percent, scored.p90_percent, scored.bias_percent
    return Errors(name, kind, scored.num_rows, *percents, rho)


def _predict(row: Row, given: Given) -> tuple[Prediction, Case | None, Cost | None]:
    facts = row.line, row.source, row.gpu, row.gpus, row.model_name, row.precision, row.metric, row.value
    try:
        case = case_of(row, given)
    except InexpressibleError as error:
        return Prediction(*facts, reason=str(error)), None, None
    model, pipeline = cost_model(case), case.plan.pipelines[0]
    cost = model.price(case.plan)
    seconds = cost.step_time_s
    prediction = Prediction(
        *facts,
        framework=case.framework,
        micro_batch_size=pipeline.micro_batch_size,
        recompute="/".join(dict.fromkeys(pipeline.stages[0].recompute)),
        chunks=pipeline.num_chunks,
        predicted=in_metric(case, seconds),
        measured_step_s=step_time_s(case),
        predicted_step_s=seconds,
    )
    return prediction, case, cost


def _errors_by(known: Sequence[Predicted], key: Callable[[Case], tuple[str, str]], at_least: int = 1) -> list[Errors]:
    """The errors of each group of at least `at_least` rows; its key is (name, GPU)."""
    rows = []
    for named, group in grouped(known, lambda pair: key(pair[0])).items():
        if len(group) >= at_least:
            rows.append(_errors_of(*named, Scored.of(group), _rho(group)))
    return rows


def _rho(known: Sequence[Predicted]) -> float | None:
    """The least Spearman's ρ of all families with enough rows; None where there is none."""
    families = grouped(known, lambda pair: family(pair[0])).values()
    return min(
        (
            spearman([case.row.value for case, _ in group], [value for _, value in group])
            for group in families
            if len(group) >= _FAMILY
        ),
        default=None,
    )


if __name__ == "__main__":
    sys.exit(main(["validate", *sys.argv[1:]]))

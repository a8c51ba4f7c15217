"""`hexiopt validate data=FILE.csv`: predicts measured training runs and reports the errors of the predictions.

The file has the columns of `experiments/data/measured_training_throughput.csv`, which is the default; with it, the
layers that Zorse measured are predicted too. A .json file is one that `make gpu` has written.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from experiments.app.cli import main
from experiments.app.common import Job
from experiments.reports.validation import draw_validation, errors_table, left_out_table, validation_csv
from experiments.validation.cases import Measurements
from experiments.validation.features import states_feature
from experiments.validation.own import price_trials
from experiments.validation.rows import Row
from experiments.validation.runs import FAMILY, GPU_TYPE, Runs, layer_errors
from experiments.validation.score import Scored
from experiments.validation.shipped import RUNS, shipped_measurements
from hexiopt.errors import InputError
from hexiopt.files.link_files import sailor_network
from hexiopt.files.profile_files import read_profile
from hexiopt.ledger import Ledger, Vocabulary
from hexiopt.problem.profile import Profile


def run(job: Job) -> float:
    """Predict every row; returns the mean error in percent. Raises InputError where no row can be predicted."""
    path = Path(job.config.data) if job.config.data else RUNS
    if path.suffix == ".json":
        return price_trials(job, path)
    measurements = _measurements(job)
    with Progress(transient=True, disable=job.in_sweep) as progress:
        runs = Runs.of(path, measurements, lambda rows: progress.track(rows, description="predicting"))
    if not runs.priced:
        reasons = ", ".join(f"{reason} ({len(lines)})" for reason, lines in runs.skipped_lines.items())
        raise InputError(f"{path}: none of its {len(runs.rows)} rows can be predicted: {reasons}")
    job.write("validation.csv", validation_csv(runs.predictions))
    if job.config.validate.errors:
        runs.write_errors(Path(job.config.validate.errors), path)
    title = f"By source, GPU and precision (ρ of the worst family of {FAMILY} rows or more)"
    job.show(errors_table(runs.by_source(), title))
    for errors, title in (
        (runs.by_type(), f"BF16 and FP16 rows of GPU types with {GPU_TYPE} rows or more"),
        (runs.of_adapters(), "Adapters"),
        (runs.by_family(), f"Families of {FAMILY} rows or more: one model on one cluster"),
        (runs.of_peaks(), "Peaks of memory: of tensors, of the allocator with its reserve, and of the process"),
        (layer_errors() if not job.config.data else [], "Forward and backward of a layer, by Zorse"),
    ):
        if errors:
            job.show("", errors_table(errors, title))
    if runs.skipped_lines:
        job.show("", left_out_table(runs.skipped_lines))
    job.show(*(f"note: {note}" for note in _notes(path, runs.rows)))
    job.show("", *runs.held_out_lines())
    overall = Scored.of(runs.predicted_metrics)
    job.show("", f"{len(runs.priced)} of {len(runs.rows)} rows predicted: mean error {overall.mean_percent:.1f} %.")
    written = ["validation.csv"]
    if job.pictures:
        title = f"{path.name}: {len(runs.priced)} runs, mean error {overall.mean_percent:.1f} %"
        job.draw("validation.png", lambda target: draw_validation(runs.predictions, title, target))
        written.append("validation.png")
    job.show_files(*written)
    return overall.mean_percent


def _notes(path: Path, rows: Sequence[Row]) -> Iterator[str]:
    """What of the file was not read."""
    columns = {name for row in rows for name in row.others}
    harmless = frozenset(filter(states_feature, columns))
    yield from Ledger(str(path), dict.fromkeys(sorted(columns)), Vocabulary(harmless)).notes()


def _measurements(job: Job) -> Measurements:
    """The measurements to predict with. Raises InputError."""
    config, shipped = job.config.validate, shipped_measurements()
    profile, network = shipped.profile, shipped.network
    if config.profiles is not None:
        profile = Profile(tuple(entry for name in config.profiles for entry in read_profile(Path(name)).entries))
    if config.network is not None:
        network = sailor_network(Path(config.network)) if config.network else None
    return Measurements(profile, network)


if __name__ == "__main__":
    sys.exit(main(["validate", *sys.argv[1:]]))

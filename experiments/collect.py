"""`hexiopt collect 'collect.folders=[multirun/...]'`: the jobs of sweeps as one table, a row for each job, or for each
solver of a comparison.

Without folders it takes the newest sweep in multirun/. Each overridden key is a column, with the value used where a job
does not override it, followed by exit code, message and the prediction of the plan file; jobs that were asked for and
have not ended have no exit code. It prints the jobs, fastest first, writes `results.csv`, and `results.parquet` where
pyarrow is installed, and draws `results.png`.
"""

import sys
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from experiments.app.cli import main
from experiments.app.common import Job
from hexiopt import read_sweep
from hexiopt.errors import InputError
from hexiopt.files.sweep_files import newest_sweep
from hexiopt.frame import Frame


def run(job: Job) -> float:
    """Gather sweeps; returns the least step time in seconds. Raises InputError where there is no job."""
    folders = [Path(folder) for folder in job.config.collect.folders] or [_newest(Path("multirun"))]
    try:
        rows = read_sweep(*folders)
    except InputError as error:
        raise InputError(f"collect.folders: {error}") from None
    job.write("results.csv", rows.to_csv())
    written = ["results.csv"]
    if find_spec("pyarrow") is not None:
        sink = BytesIO()
        _of_one_type(rows).to_pandas().to_parquet(sink, index=False)
        job.write("results.parquet", sink.getvalue())
        written.append("results.parquet")
    title = rows.title
    if job.pictures:
        from hexiopt.report.compared.sweep import sweep_figure
        from hexiopt.report.panels.canvas import save

        job.draw("results.png", lambda path: save(sweep_figure(rows, title), path))
        written.append("results.png")
    if not job.in_sweep:
        from hexiopt.report.compared.sweep import sweep_table

        table, left_out = sweep_table(rows)
        more = [f"and {left_out:,} more, slower or without a plan, in results.csv"] if left_out else []
        job.show(title, "", table, *more)
        if "results.parquet" not in written:
            job.show("results.parquet is not written: pyarrow is not installed (pip install pyarrow)")
    job.show_files(*written)
    return min((time_s for time_s in rows["result.step_time_s"] if time_s is not None), default=float("inf"))


def _of_one_type(rows: Frame) -> Frame:
    """The rows, where a column with numbers and words has words alone: a Parquet file's columns have one type."""
    mixed = [
        name for name in rows.columns if len({type(value) is str for value in rows[name] if value is not None}) > 1
    ]
    cells = ({key: str(row[key]) for key in mixed if row[key] is not None} for row in rows)
    return Frame.of([{**row, **words} for row, words in zip(rows, cells, strict=True)], rows.columns)


def _newest(root: Path) -> Path:
    folder = newest_sweep(root)
    if folder is None:
        raise InputError(f"collect.folders: [] and there is no sweep in {root}/; name the folders of a sweep")
    return folder


if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))

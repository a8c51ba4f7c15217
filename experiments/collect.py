"""`hexiopt collect 'collect.folders=[multirun/...]'`: the jobs of sweeps as one table, one row per job.

Without folders it takes the newest sweep in multirun/. Each overridden key is a column, followed by exit code, message
and the prediction of the plan file. It writes `results.csv`, and `results.parquet` where pyarrow is installed.
"""

import sys
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from experiments.app.common import Job
from experiments.cli import main
from hexiopt.errors import InputError
from hexiopt.readers.sweep_files import job_folders, jobs_frame


def run(job: Job) -> float:
    """Gather sweeps; returns the least step time in seconds. Raises InputError where there is no job."""
    folders = [Path(folder) for folder in job.config.collect.folders] or [_newest(Path("multirun"))]
    try:
        rows = jobs_frame([path for folder in folders for path in job_folders(folder)])
    except InputError as error:
        raise InputError(f"collect.folders: {error}") from None
    job.write("results.csv", rows.to_csv())
    written = ["results.csv"]
    if find_spec("pyarrow") is not None:
        sink = BytesIO()
        rows.to_pandas().to_parquet(sink, index=False)
        job.write("results.parquet", sink.getvalue())
        written.append("results.parquet")
    job.show(f"{len(rows)} jobs, {rows['exit_code'].count(0)} done")
    if len(written) == 1:
        job.show("results.parquet is not written: pyarrow is not installed (pip install pyarrow)")
    job.show_files(*written)
    return min((time_s for time_s in rows["result.step_time_s"] if time_s is not None), default=float("inf"))


def _newest(root: Path) -> Path:
    sweeps = [path.parent for path in root.glob("**/multirun.yaml")] if root.is_dir() else []
    if not sweeps:
        raise InputError(f"collect.folders: [] and there is no sweep in {root}/; name the folders of a sweep")
    return max(sweeps, key=lambda path: (path.stat().st_mtime, str(path)))


if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))

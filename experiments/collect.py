"""`hexiopt collect 'collect.folders=[multirun/...]'`: the jobs of sweeps as one table, one row per job.

Without folders it takes the newest sweep in multirun/. Each overridden key is a column, followed by exit code, message
and the prediction of the plan file. It writes `results.csv`, and `results.parquet` where pyarrow is installed.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.app.common import STATUS_FILE, Job
from experiments.cli import main
from hexiopt.errors import InputError
from hexiopt.readers.plan_file import MAX_PLAN_BYTES
from hexiopt.reading import read_mapping

_RESULT = (
    *("solver", "seed", "status", "step_time_s", "tokens_per_s", "mfu"),
    *("lower_bound_s", "gap", "runtime_s", "steps"),
)
_COLUMNS = ["exit_code", "message", *(f"result.{name}" for name in _RESULT), "num_pipelines", "num_stages"]


def run(job: Job) -> float:
    """Gather sweeps; returns the least step time in seconds. Raises InputError where there is no job."""
    folders = [Path(folder) for folder in job.config.collect.folders] or [_newest(Path("multirun"))]
    rows = pd.DataFrame((row for folder in folders for row in _jobs(folder)), dtype=object)  # so that 3 stays 3
    keys = sorted({*rows.columns} - {"folder", *_COLUMNS})
    rows = rows.reindex(columns=["folder", *keys, *_COLUMNS])
    job.write("results.csv", rows.to_csv(index=False))
    written = ["results.csv"]
    if find_spec("pyarrow") is not None:
        sink = BytesIO()
        rows.to_parquet(sink, index=False)
        job.write("results.parquet", sink.getvalue())
        written.append("results.parquet")
    job.show(f"{len(rows)} jobs, {(rows['exit_code'] == 0).sum()} done")
    if len(written) == 1:
        job.show("results.parquet is not written: pyarrow is not installed (pip install pyarrow)")
    job.show_files(*written)
    times_s = rows["result.step_time_s"].dropna()
    return float(times_s.min()) if len(times_s) else float("inf")


def _newest(root: Path) -> Path:
    sweeps = [path.parent for path in root.glob("**/multirun.yaml")] if root.is_dir() else []
    if not sweeps:
        raise InputError(f"collect.folders: [] and there is no sweep in {root}/; name the folders of a sweep")
    return max(sweeps, key=lambda path: (path.stat().st_mtime, str(path)))


def _jobs(folder: Path) -> Iterator[dict[str, Any]]:
    found = folder.glob(f"**/{STATUS_FILE}")
    paths = sorted(found, key=lambda path: [(len(part), part) for part in path.parts])
    if not paths:
        raise InputError(f"collect.folders: {str(folder)!r} holds no {STATUS_FILE}; name the folder of a sweep")
    for path in paths:
        status, plan_path = read_mapping(path), path.parent / "plan.json"
        given = (str(override).lstrip("+").partition("=") for override in status.get("overrides", []))
        row: dict[str, Any] = {"folder": str(path.parent), **{key: value for key, _, value in given}}
        row |= {"exit_code": status.get("exit_code"), "message": status.get("message", "")}
        if plan_path.is_file():
            plan = read_mapping(plan_path, max_bytes=MAX_PLAN_BYTES)
            solver, pipelines = plan.get("solver", {}), plan.get("pipelines", [])
            said = {**solver, **plan.get("prediction", {}), "solver": solver.get("name")}
            row |= {f"result.{name}": said.get(name) for name in _RESULT}
            row |= {"num_pipelines": len(pipelines), "num_stages": sum(len(p.get("stages", [])) for p in pipelines)}
        else:
            row["result.step_time_s"] = status.get("step_time_s")
        yield row


if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))

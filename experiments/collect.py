"""`hexiopt collect 'collect.folders=[multirun/...]'`: the jobs of sweeps as one table, a row a job.

Without folders, the newest sweep below multirun/. A column for each overridden key, then exit code,
message and what the plan file predicts.
"""

import csv
import io
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.cli import main
from experiments.common import STATUS_FILE, Job
from hexiopt.errors import InputError
from hexiopt.readers.plan_file import MAX_PLAN_BYTES
from hexiopt.reading import read_mapping

_RESULTS = (
    "solver",
    "seed",
    "status",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "lower_bound_s",
    "gap",
    "runtime_s",
    "steps",
)


def run(job: Job) -> float:
    """Gather sweeps; returns the best step time in seconds. Raises InputError where there is no job."""
    folders = [Path(folder) for folder in job.config.collect.folders] or [_newest(Path("multirun"))]
    rows = [row for folder in folders for row in _jobs(folder)]
    keys = sorted({key for row in rows for key in row["overrides"]})
    columns = [
        "exit_code",
        "message",
        *(f"result.{name}" for name in _RESULTS),
        "num_pipelines",
        "num_stages",
    ]
    header = ["folder", *keys, *columns]
    table = [
        [row["folder"], *(row["overrides"].get(key) for key in keys), *(row.get(name) for name in columns)]
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *table])
    job.write("results.csv", text.getvalue())
    written = ["results.csv"]
    if find_spec("pyarrow") is not None:
        job.write("results.parquet", _parquet(header, table))
        written.append("results.parquet")
    job.show(f"{len(rows)} jobs, {sum(row['exit_code'] == 0 for row in rows)} done")
    if len(written) == 1:
        job.show("results.parquet is not written: pyarrow is not installed (pip install pyarrow)")
    job.show_files(*written)
    times = [row["result.step_time_s"] for row in rows if row.get("result.step_time_s")]
    return min(times, default=float("inf"))


def _newest(root: Path) -> Path:
    sweeps = [path.parent for path in root.glob("**/multirun.yaml")] if root.is_dir() else []
    if not sweeps:
        raise InputError(f"collect.folders: [] and no sweep below {root}/ here; name the folders of a sweep")
    return max(sweeps, key=lambda path: (path.stat().st_mtime, str(path)))


def _jobs(folder: Path) -> Iterator[dict[str, Any]]:
    found = folder.glob(f"**/{STATUS_FILE}")
    paths = sorted(found, key=lambda path: [(len(part), part) for part in path.parts])
    if not paths:
        raise InputError(f"collect.folders: {str(folder)!r} holds no {STATUS_FILE}; name a sweep's folder")
    for path in paths:
        status = read_mapping(path)
        row: dict[str, Any] = {"folder": str(path.parent)}
        given = (str(override).lstrip("+").partition("=") for override in status.get("overrides", []))
        row["overrides"] = {key: value for key, _, value in given}
        row |= {"exit_code": status.get("exit_code"), "message": status.get("message", "")}
        plan = path.parent / "plan.json"
        if plan.is_file():
            row |= _plan_row(read_mapping(plan, max_bytes=MAX_PLAN_BYTES))
        elif status.get("step_time_s") is not None:
            row["result.step_time_s"] = status["step_time_s"]
        yield row


def _plan_row(plan: dict[str, Any]) -> dict[str, Any]:
    solver, prediction = plan.get("solver", {}), plan.get("prediction", {})
    pipelines = plan.get("pipelines", [])
    said = {**solver, **prediction, "solver": solver.get("name")}
    return {f"result.{name}": said.get(name) for name in _RESULTS} | {
        "num_pipelines": len(pipelines),
        "num_stages": sum(len(pipeline.get("stages", [])) for pipeline in pipelines),
    }


def _parquet(header: list[str], table: list[list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row[k] for row in table] for k, name in enumerate(header)}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))

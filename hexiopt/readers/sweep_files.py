"""Reads the folders of sweep jobs into a table: those of `hexiopt.sweep` and those of Hydra multiruns."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.frame import Frame
from hexiopt.readers.plan_file import MAX_PLAN_BYTES
from hexiopt.reading import read_mapping

STATUS_FILE = "status.json"
PLAN_FILE = "plan.json"
_RESULT = (
    *("solver", "seed", "status", "step_time_s", "tokens_per_s", "mfu"),
    *("lower_bound_s", "gap", "runtime_s", "steps"),
)
_COLUMNS = ("exit_code", "message", *(f"result.{name}" for name in _RESULT), "num_pipelines", "num_stages")


def status_to_dict(exit_code: int, message: str, overrides: Sequence[str], step_time_s: float) -> dict[str, Any]:
    """The content of a job's `status.json`: `overrides` are its KEY=VALUE pairs; the step time may be infinite."""
    return {
        "exit_code": exit_code,
        "message": message,
        "overrides": list(overrides),
        "step_time_s": float(step_time_s) if math.isfinite(step_time_s) else None,
    }


def job_folders(folder: Path) -> list[Path]:
    """The folders of all jobs in `folder`, numbered ones in numeric order. Raises InputError where there is none."""
    found = (path.parent for path in folder.glob(f"**/{STATUS_FILE}"))
    paths = sorted(found, key=lambda path: [(len(part), part) for part in path.parts])
    if not paths:
        raise InputError(f"{str(folder)!r} holds no {STATUS_FILE}; name the folder of a sweep")
    return paths


def jobs_frame(folders: Iterable[Path]) -> Frame:
    """One row per job: its folder, each overridden key, exit code, message, and the prediction of its plan."""
    rows = [_job(folder) for folder in folders]
    keys = sorted({key for row in rows for key in row} - {"folder", *_COLUMNS})
    columns = ("folder", *keys, *_COLUMNS)
    return Frame(columns, tuple(tuple(row.get(column) for column in columns) for row in rows))


def _job(folder: Path) -> dict[str, Any]:
    status, plan_path = read_mapping(folder / STATUS_FILE), folder / PLAN_FILE
    given = (str(override).lstrip("+").partition("=") for override in status.get("overrides", []))
    row: dict[str, Any] = {"folder": str(folder), **{key: _plain(value) for key, _, value in given}}
    row |= {"exit_code": status.get("exit_code"), "message": status.get("message", "")}
    if not plan_path.is_file():
        return row | {"result.step_time_s": status.get("step_time_s")}
    plan = read_mapping(plan_path, max_bytes=MAX_PLAN_BYTES)
    solver, pipelines = plan.get("solver", {}), plan.get("pipelines", [])
    said = {**solver, **plan.get("prediction", {}), "solver": solver.get("name")}
    row |= {f"result.{name}": said.get(name) for name in _RESULT}
    return row | {"num_pipelines": len(pipelines), "num_stages": sum(len(p.get("stages", [])) for p in pipelines)}


def _plain(text: str) -> Any:
    """`text` as a number if it is one."""
    if re.fullmatch(r"[-+]?[0-9]{1,15}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?", text) else text

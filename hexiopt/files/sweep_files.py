"""Reads the folders of sweep jobs into a table: those of `hexiopt.sweep` and those of Hydra multiruns."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.plan_file import MAX_PLAN_BYTES, write_text
from hexiopt.frame import Frame
from hexiopt.reading import Section, read_mapping, read_text, word
from hexiopt.solving.registry import default_of

STATUS_FILE = "status.json"
PLAN_FILE = "plan.json"
COMPARISON_FILE = "comparison.csv"
REQUEST_FILE = "sweep.json"
FINAL = (0, 2, 3)
"""Exit codes of jobs that are not run again: success, bad input, no plan."""
_RESULT = (
    *("solver", "seed", "status", "step_time_s", "tokens_per_s", "mfu"),
    *("lower_bound_s", "gap", "runtime_s", "steps"),
)
_COLUMNS = (
    *("exit_code", "message", *(f"result.{name}" for name in _RESULT), "result.cpu_s"),
    *("num_pipelines", "num_stages"),
)
_PLANNED = "planned"  # key of a row: the values in its plan file of keys that the job does not override


def status_to_dict(
    exit_code: int,
    message: str,
    overrides: Sequence[str],
    step_time_s: float,
    runtime_s: float | None,
    key: str,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of a job's `status.json`.

    `overrides` are the job's KEY=VALUE pairs, `key` is a hash of everything that determines its result. The step time
    may be infinite. The job took `runtime_s` seconds (None: unknown). `measured` has what else is known of the search,
    such as its CPU seconds and what a judge says of its plan (`hexiopt/study/jobs.py`).
    """
    more = {"measured": dict(measured)} if measured else {}
    return more | {
        "key": key,
        "exit_code": exit_code,
        "message": message,
        "overrides": list(overrides),
        "step_time_s": float(step_time_s) if math.isfinite(step_time_s) else None,
        "runtime_s": runtime_s,
    }


def read_status(folder: Path) -> dict[str, Any]:
    """The content of a job's `status.json`; empty where the job has not ended."""
    try:
        return read_mapping(folder / STATUS_FILE) if (folder / STATUS_FILE).is_file() else {}
    except InputError:
        return {}


@dataclass(frozen=True)
class SweepRequest:
    """The jobs that a sweep was asked to run: their overrides or, if a sweeper draws them, the number of `trials`."""

    jobs: tuple[tuple[str, ...], ...] = ()
    trials: int = 0

    @classmethod
    def of(cls, folder: Path) -> "SweepRequest":
        """The request in the folder of a sweep; empty where there is none."""
        path = folder / REQUEST_FILE
        if not path.is_file():
            return cls()
        section = Section(read_mapping(path), str(path))
        jobs = section.items("jobs", optional=True)
        return cls(tuple(tuple(map(str, job)) for job in jobs), section.integer("trials", at_least=0, at_most=10**9))

    @property
    def number(self) -> int:
        """The number of jobs."""
        return len(self.jobs) + self.trials

    def plus(self, jobs: Iterable[Sequence[str]], trials: int) -> "SweepRequest":
        """Add `jobs`, each job once; `trials` are those of the last sweep."""
        return SweepRequest(tuple(dict.fromkeys([*self.jobs, *map(tuple, jobs)])), trials or self.trials)

    def write(self, folder: Path) -> None:
        """Write the request into the folder of a sweep."""
        write_text(folder / REQUEST_FILE, json.dumps({"jobs": self.jobs, "trials": self.trials}, indent=1) + "\n")


def newest_sweep(root: Path) -> Path | None:
    """The folder of the newest multirun below `root`; None if there is none."""
    folders = [path.parent for name in (REQUEST_FILE, "multirun.yaml") for path in root.glob(f"**/{name}")]
    return max(folders, key=lambda path: (path.stat().st_mtime, str(path)), default=None)


def job_folders(folder: Path) -> list[Path]:
    """The folders of all jobs in `folder`, numbered ones in numeric order. Raises InputError where there is none."""
    folders = (path.parent for path in folder.glob(f"**/{STATUS_FILE}"))
    paths = sorted(folders, key=lambda path: [(len(part), part) for part in path.parts])
    if not paths:
        raise InputError(f"{str(folder)!r} holds no {STATUS_FILE}; name the folder of a sweep")
    return paths


def sweep_frame(folders: Iterable[Path]) -> Frame:
    """The jobs of sweeps, given their folders.

    Jobs that have ended come first, in the order of their folders: one row each, or one row for each solver that they
    compare. Requested jobs that have not ended follow, without an exit code. A key that a job does not override has the
    value in its plan file, a solver's parameter its default. Raises InputError for a folder without jobs.
    """
    rows: list[dict[str, Any]] = []
    for folder in folders:
        requested = SweepRequest.of(folder)
        ended = job_folders(folder) if any(folder.glob(f"**/{STATUS_FILE}")) or not requested.jobs else []
        overrides = [frozenset(map(str, read_status(path).get("overrides", []))) for path in ended]
        rows += (row for path in ended for row in _job(path))
        pending = [job for job in requested.jobs if frozenset(job) not in overrides]
        rows += ({"folder": str(folder), **_override_values(job), "message": "not run"} for job in pending)
        unknown = max(0, requested.trials - len(overrides)) if not requested.jobs else 0
        rows += [{"folder": str(folder), "message": "not run"}] * unknown
    return _frame(rows)


def jobs_frame(folders: Iterable[Path]) -> Frame:
    """One row per job: its folder, each overridden key, exit code, message, and the prediction of its plan."""
    return _frame([row for folder in folders for row in _job(folder)])


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of jobs by outcome, in words: `64 jobs: 60 done, 3 without a plan, 1 not run`."""
    codes = [row.get("exit_code") for row in rows]
    ended = {row["folder"]: code for row, code in zip(rows, codes, strict=True) if code is not None}  # of several rows
    codes = [*ended.values(), *(code for code in codes if code is None)]
    words = {0: "done", 130: "interrupted", 3: "without a plan", 2: "refused", 1: "failed", None: "not run"}
    counts = ", ".join(f"{codes.count(code):,} {word}" for code, word in words.items() if code in codes)
    return f"{len(codes):,} job{'s' if len(codes) != 1 else ''}: {counts}"


def _frame(rows: Sequence[Mapping[str, Any]]) -> Frame:
    keys = sorted({key for row in rows for key in row} - {"folder", _PLANNED, *_COLUMNS})
    columns = ("folder", *keys, *_COLUMNS)

    def cell(row: Mapping[str, Any], column: str) -> Any:
        if column in row or column not in keys:
            return row.get(column)
        defaults = row.get(_PLANNED, {})
        group, _, name = column.partition(".")
        value = default_of(str(row.get("result.solver")), name) if group == "solver" and name else defaults.get(column)
        return None if value is None else _plain(value)

    cells = tuple(tuple(cell(row, column) for column in columns) for row in rows)
    return Frame(columns, cells, title=_counts(rows))


def _job(folder: Path) -> list[dict[str, Any]]:
    """The rows of a job that has ended."""
    status, plan_path, comparison = read_mapping(folder / STATUS_FILE), folder / PLAN_FILE, folder / COMPARISON_FILE
    row: dict[str, Any] = {"folder": str(folder), **_override_values(status.get("overrides", []))}
    row |= {"exit_code": status.get("exit_code"), "message": status.get("message", "")}
    planned: dict[str, Any] = {}
    if plan_path.is_file():
        plan = read_mapping(plan_path, max_bytes=MAX_PLAN_BYTES)
        solver, pipelines = plan.get("solver", {}), plan.get("pipelines", [])
        record = {**solver, **plan.get("prediction", {}), "solver": solver.get("name")}
        record["runtime_s"] = status.get("runtime_s", record.get("runtime_s"))
        row[_PLANNED] = _plan_values(plan)
        planned = {f"result.{name}": record.get(name) for name in _RESULT}
        planned |= {"num_pipelines": len(pipelines), "num_stages": sum(len(p.get("stages", [])) for p in pipelines)}
    if comparison.is_file():
        return [row | comparison_row for comparison_row in _comparison_rows(comparison, planned)]
    measured = status.get("measured", {})
    row |= {f"judge.{name}": value for name, value in measured.get("judged", {}).items()}
    if not planned:  # a bound alone has no plan
        planned = {"result.step_time_s": status.get("step_time_s"), "result.lower_bound_s": measured.get("bound_s")}
    return [row | planned | {"result.cpu_s": measured.get("cpu_s")}]


def _comparison_rows(path: Path, planned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a comparison; `planned` has the cells of its best plan."""
    rows = []
    for read in csv.DictReader(io.StringIO(read_text(path))):
        result = {f"result.{name}": _plain(read[name]) if read.get(name) else None for name in _RESULT}
        best = result["result.step_time_s"] is not None and read.get("solver") == planned.get("result.solver")
        reason = {"message": read["reason"]} if read.get("reason") else {}
        rows.append({**(planned if best else {}), **result, **reason})
    return rows


def _plan_values(plan: Mapping[str, Any]) -> dict[str, str]:
    """The values in a plan file by the keys of the command line, as written on the command line."""
    problem, solver = plan.get("problem", {}), plan.get("solver", {})
    space = problem.get("space", {}).items()
    used = {f"workload.{key}": value for key, value in problem.get("workload", {}).items()}
    used |= {f"{group}.{key}": value for group in ("space", "constraints") for key, value in space}
    used |= {group: problem.get(group, {}).get("name") for group in ("cluster", "model")}
    used |= {"solver": solver.get("name"), "seed": solver.get("seed"), "pricer": solver.get("pricer")}
    return {key: word(value) for key, value in used.items()}


def _override_values(overrides: Iterable[object]) -> dict[str, Any]:
    """The values of KEY=VALUE pairs by key."""
    pairs = (str(override).lstrip("+").partition("=") for override in overrides)
    return {key: _plain(value) for key, _, value in pairs}


def _plain(text: str) -> Any:
    """`text` as a number if it is one; true, false and null as the command line writes them."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    if re.fullmatch(r"[-+]?[0-9]{1,15}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?", text) else text

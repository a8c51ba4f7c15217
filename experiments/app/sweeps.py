"""Sweeps of the command line: the jobs that were asked for, how each ended, and which need not run again.

A job is known by a hash of everything that determines its result (`key_of`), which its `status.json` states. With
`sweep.resume=true` a job whose key has a final status in the folder of the sweep is not run again; any other gets a
folder named by its key, so that no result is overwritten.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from experiments.app.common import FailedError, Job, RunOutcome, worst
from experiments.app.config import Config
from hexiopt.errors import InputError
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.files.sweep_files import FINAL, STATUS_FILE, SweepRequest, newest_sweep, read_status
from hexiopt.reading import read_text, sha256_of

_MTIME_S = 2.0  # resolution of a file system's times, at worst
_SHOWN = 20  # messages of jobs that ended badly
_FOLDER_KEY, _RESUME = "hydra.sweep.dir", "sweep.resume"
_NOT_OF_JOBS = ("hydra.", "hydra/", "sweep.")  # keys that change no result
_FILES = ("plan", "data")  # keys of paths of files that a job reads


def in_newest_folder(overrides: Sequence[str]) -> list[str]:
    """`overrides` of a sweep; where it resumes and names no folder, in the folder of the newest sweep."""
    named = any(override.lstrip("+").startswith(f"{_FOLDER_KEY}=") for override in overrides)
    newest = newest_sweep(Path("multirun")) if f"{_RESUME}=true" in overrides and not named else None
    return [*overrides, *([] if newest is None else [f"{_FOLDER_KEY}={newest}"])]


def key_of(verb: str, config: Config, choices: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """16 hexadecimal digits of a hash of everything that determines the result of a job: the whole problem as read
    from its files or, as overridden, from its plan, the rest of the configuration, and the content of the plan or data
    that it names."""
    rest: Any = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    for name in ("sweep", "print", "cluster", "model", "workload", "space", "constraints"):
        rest.pop(name)
    problem: Any
    job = Job(verb, config, Path(), choices, overrides, True)
    try:
        problem = problem_to_dict(job.changed_plan_file()[1] if config.plan else job.problem)
    except InputError:
        problem = sorted(overrides)
    files = {name: _content(getattr(config, name)) for name in _FILES if getattr(config, name)}
    return sha256_of({"verb": verb, "problem": problem, "config": rest, "files": files})[:16]


def _content(path: str) -> str:
    try:
        return read_text(Path(path))
    except InputError as error:
        return str(error)


def settled(folder: Path, key: str) -> RunOutcome | None:
    """The outcome of the job `key` in `folder`, if it ended there and need not run again."""
    status = read_status(folder)
    if status.get("key") != key or status.get("exit_code") not in FINAL:
        return None
    os.utime(folder / STATUS_FILE)  # so that it counts among the jobs of this sweep
    step_time_s = status.get("step_time_s")
    metric = float("inf") if step_time_s is None else float(step_time_s)
    return RunOutcome(metric, int(status["exit_code"]), str(status.get("message", "")))


class Folders:
    """The folders of the jobs of a sweep by their keys, as they were at its beginning; picklable."""

    def __init__(self) -> None:
        self._names: dict[str, str] | None = None

    def name(self, sweep: Path, key: str) -> str:
        """The name of the folder of a job: of the one that an earlier sweep gave it, else its key."""
        if self._names is None:
            found = ((read_status(path.parent).get("key"), path.parent) for path in sweep.glob(f"*/{STATUS_FILE}"))
            self._names = {str(known): folder.name for known, folder in found if known}
        return self._names.get(key, key)


def asked_for(cfg: DictConfig, loader: Any) -> None:
    """Add the jobs of a sweep to the list in its folder, for `collect`; the number of trials where a sweeper draws
    the jobs itself."""
    folder = Path(str(cfg.hydra.sweep.dir))
    given: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    jobs: list[list[str]] = []
    if str(cfg.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper"):
        params: Any = OmegaConf.to_container(cfg.hydra.sweeper.get("params") or OmegaConf.create({}))
        words = [*(f"{key}={value}" for key, value in params.items()), *given]
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
        jobs = [one for batch in BasicSweeper.split_arguments(overrides, None) for one in batch]
    trials = cfg.hydra.sweeper.get("n_trials")
    folder.mkdir(parents=True, exist_ok=True)
    SweepRequest.of(folder).plus([plain(job) for job in jobs], int(trials) if trials else 0).write(folder)


def plain(overrides: Sequence[str]) -> list[str]:
    """Overrides as a job's status has them: without those of Hydra and of the sweep, and without leave to add keys."""
    return [word.removeprefix("++") for word in overrides if not word.lstrip("+").startswith(_NOT_OF_JOBS)]


def summary(folder: Path, began_s: float) -> int:
    """Print how the jobs of a sweep ended; returns its exit code. Raises FailedError where there was none.

    Sweepers differ in what they return (Optuna's returns nothing), but every job has left its status.
    """
    found = [path.parent for path in folder.rglob(STATUS_FILE) if path.stat().st_mtime > began_s - _MTIME_S]
    jobs = [(path, read_status(path)) for path in sorted(found, key=_by_number)]
    if not jobs:
        raise FailedError("the sweep ran no job")
    bad = [(path, status) for path, status in jobs if status["exit_code"]]
    for path, status in bad[:_SHOWN]:
        print(f"hexiopt: job {path.relative_to(folder)}: {status['message']}", file=sys.stderr)
    if len(bad) > _SHOWN:
        print(f"hexiopt: and {len(bad) - _SHOWN:,} jobs more without a result", file=sys.stderr)
    codes = [status["exit_code"] for _, status in jobs]
    quoted = os.path.relpath(folder)
    print(f"{codes.count(0)} of {len(codes)} jobs done: {quoted}")
    print(f"as a table: hexiopt collect collect.folders=[{quoted}]")
    return worst(codes)


def how_to_resume(folder: Path) -> str:
    """What is done of an interrupted sweep, and how it goes on."""
    done = sum(read_status(path.parent).get("exit_code") in FINAL for path in folder.glob(f"*/{STATUS_FILE}"))
    total = SweepRequest.of(folder).number
    of = f" of {total:,}" if total else ""
    where = os.path.relpath(folder)
    again = f"the same command with {_RESUME}=true {_FOLDER_KEY}={where} runs the others"
    return f"{done:,}{of} jobs are done in {where}; {again}"


def _by_number(path: Path) -> tuple[int, str]:
    """A sort key: the number of the job where its folder is named by it, then the path."""
    return (int(path.name) if path.name.isdecimal() else -1, str(path))

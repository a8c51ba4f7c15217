"""Sweeps of the command line: the jobs that were asked for, how each ended, and which need not run again.

A job is known by a hash of everything that determines its result (`key_of`), which its `status.json` states. With
`sweep.resume=true` a job whose key has a final status in the folder of the sweep is not run again; any other gets a
folder named by its key, so that no result is overwritten.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.app.common import INTERRUPTED, PROBLEM_KEYS, Job, RunOutcome, worst
from experiments.app.compile import compile_once
from experiments.app.config import READS, Config
from experiments.app.config_errors import CONFIG_ERRORS, REFUSED, config_of, one_line, outcome_of
from experiments.app.terminal import mute
from hexiopt.errors import InputError
from hexiopt.files.plan_file import write_text
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.files.sweep_files import FINAL, STATUS_FILE, SweepRequest, newest_sweep, read_status, status_to_dict
from hexiopt.reading import read_text, sha256_of

_MTIME_S = 2.0  # resolution of a file system's times, at worst
_SHOWN = 20  # messages of jobs that ended badly
_FOLDER_KEY, _RESUME = "hydra.sweep.dir", "sweep.resume"
_NOT_OF_JOBS = ("hydra.", "hydra/", "sweep.", "sweep=")  # keys that change no result
_FILES = ("plan", "data")  # keys of paths of files that a job reads
_NOT_HASHED = ("sweep", "print", *PROBLEM_KEYS)  # or as the problem has them
_KEY = "job_key"  # in Hydra's part of the configuration of a job: `key_of`


class Outcomes(Callback):
    """The callback that says how a run ended and exits with its code; a sweep's jobs write `status.json`, and the sweep
    prints a summary. Hydra makes a warning of what a callback raises: hence `_reporting_errors`."""

    def __init__(self) -> None:
        self._new_folders: tuple[Path, ...] = ()
        self._began_s = 0.0

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Remember which folders are not there yet."""
        with suppress(OmegaConfBaseException):  # the job reports it
            folder = Path(str(config.hydra.run.dir)).absolute()
            self._new_folders = tuple(path for path in (folder, *folder.parents) if not path.exists())

    def on_run_end(self, config: DictConfig, **ended: Any) -> None:
        """Remove what Hydra created, unless it holds results; end."""
        with suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()
        sys.exit(ended["job_return"].return_value.report())

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Say in the folder of the sweep which jobs are asked for, and let a wrong one fail alone."""
        self._began_s = time.time()
        with _reporting_errors(verb := verb_of(config)):
            if "solver" in READS[verb]:
                compile_once()  # here, not in each of a launcher's processes
            HydraConfig.instance().set_config(deepcopy(config))  # for `how_to_resume`
            running: Any = GlobalHydra.instance().hydra
            _ask(config, running.config_loader)
            running.config_loader = JobLoader(running.config_loader, Path(str(config.hydra.sweep.dir)))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how the jobs ended; end."""
        code = 0
        with _reporting_errors(verb_of(config)):
            code = _summary(Path(str(config.hydra.sweep.dir)), self._began_s)
        sys.exit(code)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Note the time, which is the job's own where a launcher's process runs it."""
        self._job_began_s = time.perf_counter()

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        """Write the status of a job of a sweep, and print it. Raises KeyboardInterrupt where Ctrl-C ended the job."""
        if not in_sweep(config.hydra):
            return
        outcome: RunOutcome = job_return.return_value
        with _reporting_errors(verb_of(config)):
            if not outcome.known:
                overrides = plain(overrides_of(config.hydra))
                took_s = time.perf_counter() - self._job_began_s
                key = str(config.hydra[_KEY])
                status = status_to_dict(outcome.exit_code, outcome.message, overrides, outcome, took_s, key)
                path = Path(config.hydra.runtime.output_dir, STATUS_FILE)
                write_text(path, json.dumps(status, indent=1, allow_nan=False) + "\n")
            ended = f"{outcome:.6g} s" if not outcome.exit_code else f"exit code {outcome.exit_code}"
            print(f"#{config.hydra.job.num}: {ended}{', known already' * outcome.known}", flush=True)
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt


@contextmanager
def _reporting_errors(verb: str) -> Iterator[None]:
    """A context that ends the program with one line where an exception leaves it, and mutely where nobody reads."""
    try:
        yield
    except BrokenPipeError:
        mute()
    except Exception as error:
        sys.exit(outcome_of(error, verb).report())


class JobLoader:
    """Composes the jobs of a sweep in place of Hydra's `loader`, which does all else: a job whose configuration is
    wrong gets one that says so, and fails alone when it runs. Picklable.

    Where the sweep resumes, the folder of a job is the one that an earlier sweep gave it, else named by its key.
    """

    def __init__(self, loader: ConfigLoader, folder: Path) -> None:
        self._loader = loader
        ended = ((read_status(path.parent).get("key"), path.parent.name) for path in folder.glob(f"*/{STATUS_FILE}"))
        self._folders = {str(key): name for key, name in ended if key}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not there yet where this is unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration of a job."""
        verb = verb_of(master_config)
        try:
            cfg = self._loader.load_sweep_config(master_config, sweep_overrides)
        except CONFIG_ERRORS as error:
            cfg = deepcopy(master_config)
            with open_dict(cfg):
                cfg[REFUSED] = one_line(error, verb)
                cfg.hydra.overrides.task = [word for word in sweep_overrides if not word.startswith("hydra.")]
        key = _key_in(cfg, verb)
        with open_dict(cfg.hydra):
            cfg.hydra[_KEY] = key
            if OmegaConf.select(master_config, _RESUME):
                cfg.hydra.sweep.subdir = self._folders.get(key, key)
        return cfg


def _ask(cfg: DictConfig, loader: ConfigLoader) -> None:
    """Add the jobs of a sweep to the list in its folder, for `collect`; the number of trials where a sweeper draws
    the jobs itself."""
    folder, sweeper = Path(str(cfg.hydra.sweep.dir)), cfg.hydra.sweeper
    jobs: list[tuple[str, ...]] = []
    if str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        values: dict[str, list[str]] = {}
        parser = OverridesParser.create(config_loader=loader)
        for override in parser.parse_overrides([*params, *overrides_of(cfg.hydra)]):
            swept, value = override.is_sweep_override(), override.get_value_element_as_str
            key = override.get_key_element()
            values[key] = [f"{key}={text}" for text in (override.sweep_string_iterator() if swept else [value()])]
        jobs = list(product(*values.values()))
    trials = sweeper.get("n_trials")
    folder.mkdir(parents=True, exist_ok=True)
    SweepRequest.of(folder).plus([plain(job) for job in jobs], int(trials) if trials else 0).write(folder)


def in_sweep(hydra_config: Any) -> bool:
    """Whether a job with this configuration of Hydra is one of a sweep: these have numbers."""
    return not OmegaConf.is_missing(hydra_config.job, "num")


def verb_of(cfg: DictConfig) -> str:
    """The verb whose configuration this is; nothing where it is of none."""
    return str(getattr(OmegaConf.get_type(cfg), "verb", ""))


def in_newest_folder(overrides: Sequence[str]) -> list[str]:
    """`overrides` of a sweep; where it resumes and names no folder, in the folder of the newest sweep."""
    named = any(override.lstrip("+").startswith(f"{_FOLDER_KEY}=") for override in overrides)
    newest = newest_sweep(Path("multirun")) if f"{_RESUME}=true" in overrides and not named else None
    return [*overrides, *([] if newest is None else [f"{_FOLDER_KEY}={newest}"])]


def _key_in(cfg: DictConfig, verb: str) -> str:
    """The key of a job; of one whose configuration is wrong, by its overrides."""
    overrides = plain(overrides_of(cfg.hydra))
    try:
        bare = deepcopy(cfg)
        with flag_override(bare, ["struct", "readonly"], [False, False]):
            del bare["hydra"]
        return key_of(config_of(bare, verb), choices_of(cfg.hydra), overrides)
    except (OmegaConfBaseException, InputError):
        return sha256_of({"verb": verb, "refused": sorted(overrides)})[:16]


def key_of(config: Config, choices: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """16 hexadecimal digits of a hash of everything that determines the result of a job: the whole problem as read
    from its files or, as overridden, from its plan, the rest of the configuration, and the content of the plan or data
    that it names."""
    rest: Any = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    rest = {key: value for key, value in rest.items() if key not in _NOT_HASHED}
    job = Job(config, Path(), choices, overrides, True)
    problem: Any = sorted(overrides)
    if hasattr(config, "cluster"):
        with suppress(InputError):
            problem = problem_to_dict(job.changed_plan_file()[1] if rest.get("plan") else job.problem)
    files = {name: _content(rest[name]) for name in _FILES if rest.get(name)}
    return sha256_of({"verb": job.verb, "problem": problem, "config": rest, "files": files})[:16]


def _content(path: str) -> str:
    try:
        return read_text(Path(path))
    except InputError as error:
        return str(error)


def known_outcome(cfg: DictConfig, hydra_config: Any) -> RunOutcome | None:
    """The outcome of a job of a sweep that resumes, if it ended in its folder and need not run again."""
    folder = Path(hydra_config.runtime.output_dir)
    status = read_status(folder) if OmegaConf.select(cfg, _RESUME) else {}
    if status.get("key") != hydra_config.get(_KEY) or status.get("exit_code") not in FINAL:
        return None
    os.utime(folder / STATUS_FILE)  # so that it counts among the jobs of this sweep
    step_time_s = status.get("step_time_s")
    metric = float("inf") if step_time_s is None else float(step_time_s)
    return RunOutcome(metric, int(status["exit_code"]), str(status.get("message", "")), known=True)


def overrides_of(hydra_config: Any) -> list[str]:
    """The overrides of a job or a sweep, as they were typed."""
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    return [str(word) for word in overrides]


def choices_of(hydra_config: Any) -> dict[str, Any]:
    """The configuration chosen in each group, where one is."""
    return {group: name for group, name in hydra_config.runtime.choices.items() if name not in (None, "null")}


def plain(overrides: Sequence[str]) -> list[str]:
    """Overrides as a job's status has them: without those of Hydra and of the sweep, and without leave to add keys."""
    return [word.removeprefix("++") for word in overrides if not word.lstrip("+").startswith(_NOT_OF_JOBS)]


def _summary(folder: Path, began_s: float) -> int:
    """Print how the jobs of a sweep ended; returns its exit code.

    Sweepers differ in what they return (Optuna's returns nothing), but every job has left its status.
    """
    folders = [path.parent for path in folder.rglob(STATUS_FILE) if path.stat().st_mtime > began_s - _MTIME_S]
    jobs = [(path, read_status(path)) for path in sorted(folders, key=_by_number)]
    if not jobs:
        print("hexiopt: the sweep ran no job", file=sys.stderr)
        return 1
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


def how_to_resume() -> Iterator[str]:
    """Of a sweep that runs in this process, if one does: what is done of it, and how it goes on."""
    if not HydraConfig.initialized():
        return
    folder = Path(str(HydraConfig.get().sweep.dir))
    done = sum(read_status(path.parent).get("exit_code") in FINAL for path in folder.glob(f"*/{STATUS_FILE}"))
    total = SweepRequest.of(folder).number
    of = f" of {total:,}" if total else ""
    where = os.path.relpath(folder)
    again = f"the same command with {_RESUME}=true {_FOLDER_KEY}={where} runs the others"
    yield f"{done:,}{of} jobs are done in {where}; {again}"


def _by_number(path: Path) -> tuple[int, str]:
    """A sort key: the number of the job where its folder is named by it, then the path."""
    return (int(path.name) if path.name.isdecimal() else -1, str(path))

"""The jobs of a sweep and the processes that run them.

A job is one problem, one solver, one budget and one seed, identified by its hash. A worker process reads jobs from
stdin as JSON lines and answers with exit codes; one that dies fails only its current job. `python -m
hexiopt.study.jobs FOLDER` starts a worker.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_from_section, plan_to_dict, solver_to_dict, write_plan, write_text
from hexiopt.files.problem_file import problem_from_section, problem_to_dict
from hexiopt.files.sweep_files import FINAL, PLAN_FILE, STATUS_FILE, read_status, status_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, sha256_of
from hexiopt.solving import Budget, OnProgress, Progress, foreign_name
from hexiopt.solving.referee import InvalidPlanError
from hexiopt.solving.registry import make_solver
from hexiopt.study.running import Interrupt

INTERRUPTED = 130


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    `overrides` are the KEY=VALUE pairs that distinguish it from the other jobs. The search begins from the plan `start`
    if there is one, and prices by the declared cost model `pricer` (None: ours). If the overrides do not form a
    problem, `problem` is None and `refused` says why, in one line.
    """

    overrides: tuple[str, ...]
    problem: Problem | None
    solver: str
    seed: int
    budget: Budget
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    start: Plan | None = None
    pricer: str | None = None

    @cached_property
    def key(self) -> str:
        """The name of the job's folder: 16 hexadecimal digits of a hash of everything that determines its result."""
        data = self.to_dict()
        return sha256_of(data if self.problem is None else data | {"overrides": []})[:16]

    def to_dict(self) -> dict[str, Any]:
        """The job as plain data that `job_from_dict` reads."""
        more: dict[str, Any] = {} if self.pricer is None else {"pricer": self.pricer}
        if self.problem is not None and self.start is not None:
            more["start"] = plan_to_dict(self.start, self.problem.cluster)
        return more | {
            "overrides": list(self.overrides),
            "problem": None if self.problem is None else problem_to_dict(self.problem),
            "solver": self.solver,
            "seed": self.seed,
            "budget": asdict(self.budget),
            "options": dict(self.options),
            "refused": self.refused,
        }

    def cores(self, usable: int) -> int:
        """The number of `usable` cores that the solver keeps busy; 1 for an unknown solver."""
        try:
            return make_solver(self.solver, self.options).capabilities.busy(usable)
        except InputError:
            return 1

    def is_done(self, folder: Path) -> bool:
        """Whether an earlier run finished the job in `folder`."""
        return read_status(folder / self.key).get("exit_code") in FINAL

    def finish(
        self, folder: Path, exit_code: int, message: str, step_time_s: float = math.inf, runtime_s: float | None = None
    ) -> int:
        """Write the job's `status.json`; returns the exit code."""
        line = " ".join(message.split())
        status = status_to_dict(exit_code, line, self.overrides, step_time_s, runtime_s, self.key)
        (folder / self.key).mkdir(parents=True, exist_ok=True)
        write_text(folder / self.key / STATUS_FILE, json.dumps(status, indent=1, allow_nan=False) + "\n")
        return exit_code

    def run(self, folder: Path, listen: OnProgress) -> int:
        """Search, and write `plan.json` and `status.json` into the job's folder; returns the command line's exit code.

        Every exception but an interrupt becomes an exit code. 130 says that `listen` stopped the search; the plan is
        then the best so far.
        """
        stopped, began_s = False, time.perf_counter()

        def report(progress: Progress) -> bool:
            nonlocal stopped
            stopped = not listen(progress)
            return not stopped

        def end(exit_code: int, message: str, step_time_s: float = math.inf) -> int:
            return self.finish(folder, exit_code, message, step_time_s, time.perf_counter() - began_s)

        try:
            if self.problem is None:
                raise InputError(self.refused)
            solver = make_solver(self.solver, self.options, self.pricer)
            judge = solver.judge(self.problem)
            result = solver.solve(
                self.problem, self.budget, seed=self.seed, on_progress=report, start=self.start, judge=judge
            )
            directory = folder / self.key
            directory.mkdir(parents=True, exist_ok=True)
            if result.plan is not None and result.cost is not None:
                record = solver_to_dict(result, foreign_name(judge, self.problem))
                write_plan(directory / PLAN_FILE, self.problem, result.plan, result.cost, record)
            if stopped:
                return end(INTERRUPTED, "interrupted; the best plan so far is kept", result.objective)
            code, reason = (3, f"{result.status}: {result.reason}") if result.plan is None else (0, "")
            return end(code, reason, result.objective)
        except InputError as error:
            return end(2, str(error))
        except InvalidPlanError as error:
            return end(1, str(error))
        except Exception as error:  # a failing solver must not end the sweep
            return end(1, f"unexpected {type(error).__name__}: {error}")


def job_from_dict(data: Mapping[str, Any]) -> SweepJob:
    """The inverse of `SweepJob.to_dict`."""
    problem_data, start = data["problem"], data.get("start")
    problem = None if problem_data is None else problem_from_section(Section(problem_data, "problem"))
    return SweepJob(
        tuple(data["overrides"]),
        problem,
        data["solver"],
        data["seed"],
        Budget(**data["budget"]),
        data["options"],
        data["refused"],
        plan_from_section(Section(start, "start"), problem.cluster) if start and problem else None,
        data.get("pricer"),
    )


# ------------------------------------------------------------------------------ processes


OnJob = Callable[[int], None]  # called with the exit code of each finished job


class JobProcesses:
    """Runs `jobs` in order on `count` processes, one job at a time on each."""

    def __init__(self, jobs: Sequence[SweepJob], folder: Path, count: int, on_job: OnJob) -> None:
        self._waiting: queue.SimpleQueue[SweepJob] = queue.SimpleQueue()
        for job in jobs:
            self._waiting.put(job)
        self._folder, self._on_job, self._stopped = folder, on_job, False
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = [threading.Event() for _ in range(min(count, len(jobs)))]

    def run(self) -> None:
        """Run all jobs. After Ctrl-C no further job starts and running ones keep their best plan; a second Ctrl-C kills
        them. Raises KeyboardInterrupt then."""
        for ended in self._ended:
            threading.Thread(target=self._feed, args=(ended,), daemon=True).start()
        try:
            self._join()
        except KeyboardInterrupt:
            self._stop(signal.SIGINT)
            try:
                self._join()
            except KeyboardInterrupt:
                self._stop(signal.SIGKILL)
                raise
            raise

    def _join(self) -> None:
        for ended in self._ended:  # events, because an interrupted Thread.join takes the thread for dead (gh-90882)
            while not ended.wait(0.1):
                pass

    def _stop(self, number: signal.Signals) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.send_signal(number)

    def _feed(self, ended: threading.Event) -> None:
        try:
            self._feed_one_process()
        finally:
            ended.set()

    def _feed_one_process(self) -> None:
        """Feed jobs to one process; if it dies, start another."""
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self._start()
            if process is None:
                break
            code = _ask(process, job)
            if code is None:
                code = process.wait()
                process = None
                if self._stopped:
                    break
                code = job.finish(self._folder, 1, f"its process ended with {code} before the job did")
            self._on_job(code)
            if self._stopped:
                break
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start a process with this one's module path, in a new session so that Ctrl-C does not reach it."""
        path = os.pathsep.join(filter(None, sys.path)) or os.curdir  # and by -P nothing before it
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hexiopt.study.jobs", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self._processes.append(process)
            return process


def _ask(process: "subprocess.Popen[str]", job: SweepJob) -> int | None:
    """The exit code of `job`, run by `process`; None if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job.to_dict()) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        return None
    return int(answer) if answer else None


def main(folder: Path) -> None:
    """Run the jobs from stdin; exit at once when it ends, because the sweep is gone then."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that what solvers print is not taken for an answer

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    # In case the parent ignores it, as background jobs of a shell do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupt().caught() as interrupt:
        threading.Thread(target=read, daemon=True).start()
        while not interrupt.pressed:
            job = job_from_dict(json.loads(lines.get()))
            code = job.run(folder, lambda _: not interrupt.pressed)
            print(code, file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

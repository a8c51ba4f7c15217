"""The processes that run the jobs of a sweep.

A worker process reads jobs from stdin as JSON lines and answers with exit codes; one that dies fails only its current
job. `python -m hexiopt.study.workers FOLDER` starts a worker; with `--isolated` it forks for every job, whose memory,
crash and end are then its own.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hexiopt.study.jobs import SweepJob, job_from_dict
from hexiopt.study.running import Interrupt

_ISOLATED = "--isolated"
_POLL_S = 0.02
_children: set[int] = set()  # process groups of the jobs that a worker has forked


OnJob = Callable[[int], None]  # called with the exit code of each finished job


class JobProcesses:
    """Runs `jobs` in order on `count` processes, one job at a time on each; `isolated` jobs fork from these."""

    def __init__(
        self, jobs: Sequence[SweepJob], folder: Path, count: int, on_job: OnJob, *, isolated: bool = False
    ) -> None:
        self._flags = [_ISOLATED] if isolated else []
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
                [sys.executable, "-P", "-m", "hexiopt.study.workers", str(self._folder), *self._flags],
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


def main(folder: Path, isolated: bool) -> None:
    """Run the jobs from stdin; exit at once when it ends, because the sweep is gone then."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that what solvers print is not taken for an answer

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        _end_children()
        os._exit(0)

    # In case the parent ignores it, as background jobs of a shell do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupt().caught() as interrupt:
        threading.Thread(target=read, daemon=True).start()
        while not interrupt.pressed:
            job = job_from_dict(json.loads(lines.get()))
            run = run_in_fork if isolated else _run
            print(run(job, folder, interrupt), file=answers, flush=True)


def _run(job: SweepJob, folder: Path, interrupt: Interrupt) -> int:
    return job.run(folder, lambda _: not interrupt.pressed)


def run_in_fork(job: SweepJob, folder: Path, interrupt: Interrupt) -> int:
    """Run a job in a fork, which gets this process's interrupts, and is ended where it is much too late."""
    began_s, passed_on = time.monotonic(), False
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            code = _run(job, folder, interrupt)
        finally:
            os._exit(code)
    with suppress(OSError):  # whichever of the two comes first
        os.setpgid(child, child)
    _children.add(child)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        late_s = time.monotonic() - began_s
        if late_s > job.longest_s:
            _end_children()
            os.waitpid(child, 0)
            _children.clear()
            message = f"ended after {late_s:.0f} s of {job.budget.time_limit_s:g} s"
            return job.finish(folder, 3, message, runtime_s=late_s, status="overran")
        if interrupt.pressed and not passed_on:
            os.kill(child, signal.SIGINT)
            passed_on = True
        time.sleep(_POLL_S)
    _children.clear()
    code = os.waitstatus_to_exitcode(ended[1])
    if code < 0:
        job.finish(folder, 1, f"its process ended with {code} before the job did", status="failed")
    return code if code >= 0 else 1


def _end_children() -> None:
    for child in tuple(_children):
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), _ISOLATED in sys.argv[2:])

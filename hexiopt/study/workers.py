"""Worker processes for the jobs of a sweep. A worker reads jobs from stdin as JSON lines and answers with exit codes.

A worker that dies fails only its current job. `python -m hexiopt.study.workers FOLDER` starts one.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hexiopt.study.jobs import SweepJob, job_from_dict
from hexiopt.study.running import Interrupt

OnJob = Callable[[int], None]  # called with the exit code of each finished job


class JobProcesses:
    """Runs `jobs` in order on `count` processes, one job at a time on each."""

    def __init__(self, jobs: Sequence[SweepJob], folder: Path, count: int, heard: OnJob) -> None:
        self._waiting: queue.SimpleQueue[SweepJob] = queue.SimpleQueue()
        for job in jobs:
            self._waiting.put(job)
        self._folder, self._heard, self._stopped = folder, heard, False
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
                process = self._started()
            if process is None:
                break
            code = _ask(process, job)
            if code is None:
                code = process.wait()
                process = None
                if self._stopped:
                    break
                code = job.ended(self._folder, 1, f"its process ended with {code} before the job did")
            self._heard(code)
            if self._stopped:
                break
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _started(self) -> "subprocess.Popen[str] | None":
        """A new process with this one's module path, in a session of its own so that Ctrl-C does not reach it."""
        path = os.pathsep.join(filter(None, sys.path)) or os.curdir  # and by -P nothing before it
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hexiopt.study.workers", str(self._folder)],
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
        said = process.stdout.readline()
    except OSError:
        return None
    return int(said) if said else None


def main(folder: Path) -> None:
    """Run the jobs from stdin; exit at once at its end, because the sweep is gone then."""
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

"""Searches, each in a process of its own, as many at a time as there are cores for them."""

import multiprocessing
import multiprocessing.context
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from experiments.tables.host import num_cores
from experiments.tables.store import Store
from experiments.tables.task import Found, Outcome, Task, perform
from hexiopt.report.style import count, seconds

_GRACE = 2.0  # times its limit after which a search is ended,
_GRACE_S = 60.0  # and seconds more, for loading and for pricing what is large


def longest_s(tasks: Iterable[Task]) -> float:
    """About how long the searches take at most: their limits, shared by the cores."""
    cores = num_cores()
    return sum(task.time_limit_s * min(task.cores, cores) for task in tasks) / cores


@dataclass
class _Running:
    task: Task
    process: BaseProcess
    answer: Connection
    started: float

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > _GRACE * self.task.time_limit_s + _GRACE_S


def run_all(name: str, tasks: Iterable[Task], store: Store, console: Console) -> Found:
    """The outcomes of all tasks, measured now where `store` has none; shows progress on `console`."""
    unique = {task.sha256: task for task in tasks}
    outcomes = {key: known for key, task in unique.items() if (known := store.load(task)) is not None}
    waiting = [task for key, task in unique.items() if key not in outcomes]
    already = f", {len(outcomes)} known already" if outcomes else ""
    console.print(
        f"{name}: {count(len(waiting), 'search').replace('searchs', 'searches')} to run{already}; "
        f"at most about {longest_s(waiting) / 60:.1f} min",
        highlight=False,
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.tables.frame", "solvers.portfolio"])
    running: list[_Running] = []
    with _progress(console) as shown:
        bar = shown.add_task(name, total=len(waiting), now="")
        try:
            while waiting or running:
                while (task := _next(waiting, running)) is not None:
                    waiting.remove(task)
                    running.append(_start(context, task, store))
                shown.update(bar, now=", ".join(str(one.task) for one in running))
                wait([one.answer for one in running], timeout=1.0)
                for one in [one for one in running if one.answer.poll() or one.late]:
                    running.remove(one)
                    outcome = outcomes[one.task.sha256] = _end(one)
                    if outcome.status != "failed":
                        store.save(one.task, outcome)
                    shown.advance(bar)
                    if not console.is_terminal or outcome.status == "failed":
                        console.print(f"  {_line(one.task, outcome)}", highlight=False, markup=False, soft_wrap=True)
        finally:
            for one in running:
                one.process.terminate()
                one.process.join()
    return Found(outcomes)


def _next(waiting: list[Task], running: list[_Running]) -> Task | None:
    """The first task for which there are cores; the first of all where none is running."""
    free = num_cores() - sum(one.task.cores for one in running)
    if not running:
        return waiting[0] if waiting else None
    return next((task for task in waiting if task.cores <= free), None)


def _start(context: multiprocessing.context.ForkServerContext, task: Task, store: Store) -> _Running:
    answer, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, store.plan_path(task), there))
    process.start()
    there.close()
    return _Running(task, process, answer, time.monotonic())


def _work(task: Task, plan_path: Path, answer: Connection) -> None:
    """In the other process."""
    start = time.perf_counter()
    try:
        outcome = perform(task, plan_path)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome("failed", time.perf_counter() - start, reason=f"{type(error).__name__}: {error}")
    answer.send(outcome)
    answer.close()


def _end(one: _Running) -> Outcome:
    """What a search says; one that says nothing has failed, or is ended because it is late."""
    took_s = time.monotonic() - one.started
    if not one.answer.poll():
        one.process.terminate()
        outcome = Outcome("overran", took_s, reason=f"ended after {took_s:.0f} s of {one.task.time_limit_s:g} s")
    else:
        try:
            outcome = one.answer.recv()
        except EOFError:
            one.process.join()
            outcome = Outcome("failed", took_s, reason=f"its process ended with code {one.process.exitcode}")
    one.process.join()
    one.answer.close()
    return outcome


def _line(task: Task, outcome: Outcome) -> str:
    found = seconds(outcome.step_time_s) if outcome.step_time_s is not None else outcome.reason
    return f"{task}: {outcome.status} after {seconds(outcome.runtime_s)}" + (f", {found}" if found else "")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

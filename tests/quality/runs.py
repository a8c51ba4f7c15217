"""Searches of any checkout in processes of their own; their plans are checked and priced here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import plan_from_section
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from tests.conftest import ROOT
from tests.quality.problems import PROBLEMS

_WORKER = Path(__file__).with_name("worker.py")
Data = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """A solver of a checkout."""

    root: Path = ROOT
    solver: str = "portfolio"


@dataclass(frozen=True)
class Run:
    """A search: of a problem of the panel, from a seed, within steps or seconds of CPU time."""

    side: Side
    problem: str
    seed: int
    max_steps: int | None = None
    cpu_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a search came to: the step time, infinite without a plan, its steps and CPU seconds, and its plan as plain
    data."""

    step_time_s: float
    steps: int
    cpu_s: float
    plan: Data | None = field(repr=False)


@cache
def panel_problem(name: str) -> Problem:
    """A problem of the panel."""
    return PROBLEMS[name]()


@cache
def _problem_data(name: str) -> Data:
    return problem_to_dict(panel_problem(name))


def price_s(problem: Problem, plan: Data) -> float:
    """The step time of a plan by the cost model of this checkout. Raises AssertionError where it breaks a rule."""
    pricer = PlanPricer(problem)
    read = plan_from_section(Section(plan, "plan"), problem.cluster)
    cost = pricer.price(read)
    broken = violations(problem, read, cost)
    assert not broken, f"{problem.cluster.name}: {broken[0]}"
    return cost.step_time_s


class Worker:
    """A process that searches, one run after another, with the packages of one checkout; on one core if `core` is
    given, so that each search has one process and one thread."""

    def __init__(self, root: Path, core: int | None = None) -> None:
        self._root = root
        before = os.sched_getaffinity(0) if core is not None else None
        if core is not None:
            os.sched_setaffinity(0, {core})  # of this thread, and of what it starts
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                cwd=root,
                env=os.environ | {"PYTHONPATH": str(root)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)

    def search(self, run: Run) -> Outcome:
        """Raises AssertionError where the process ended, ran another checkout, or gave a plan that breaks a rule."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"problem": _problem_data(run.problem), "solver": run.side.solver, "seed": run.seed}
        limits = {"max_steps": run.max_steps, "cpu_s": run.cpu_s}
        self._process.stdin.write(json.dumps(asked | limits) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the search of {run.problem} ended with code {self._process.wait()}"
        told: Data = json.loads(line)
        assert Path(told["root"]) == self._root.resolve(), f"it ran {told['root']}, not {self._root}"
        plan = told["plan"]
        step_s = float("inf") if plan is None else price_s(panel_problem(run.problem), plan)
        return Outcome(step_s, told["steps"], told["cpu_s"], plan)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def _worker(root: Path, core: int | None = None) -> Iterator[Worker]:
    worker = Worker(root, core)
    try:
        yield worker
    finally:
        worker.close()


def by_steps(runs: Sequence[Run], processes: int) -> Iterator[tuple[Run, Outcome]]:
    """Runs whose budgets are steps, of one checkout, in `processes` at once, in their order."""
    free: SimpleQueue[Worker] = SimpleQueue()
    workers = [Worker(runs[0].side.root) for _ in range(min(processes, len(runs)))]
    for worker in workers:
        free.put(worker)

    def search(run: Run) -> tuple[Run, Outcome]:
        worker = free.get()
        try:
            return run, worker.search(run)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            yield from pool.map(search, runs)
    finally:
        for worker in workers:
            worker.close()


def by_cpu_time(runs: Sequence[Run]) -> Iterator[tuple[Run, Outcome]]:
    """Runs whose budgets are seconds of CPU time, one after another on one core, each in a new process."""
    core = min(os.sched_getaffinity(0))
    for run in runs:
        with _worker(run.side.root, core) as worker:
            yield run, worker.search(run)


def compile_kernels(root: Path) -> None:
    """Compile what a checkout has for numba, as `make install` does, so that no search spends its CPU time on it."""
    subprocess.run(
        [sys.executable, "-P", "-c", "from experiments.app.compile import compile_once; compile_once()"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
    )

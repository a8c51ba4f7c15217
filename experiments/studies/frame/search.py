"""One search of a study: its identity, and its measurement in a process of its own."""

import hashlib
import multiprocessing
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hexiopt
from experiments.studies.frame.cpu_clock import cpu_seconds
from hexiopt.bounds import lower_bound_s
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import read_plan, solver_to_dict, write_plan
from hexiopt.files.problem_file import problem_sha256
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import sha256_of
from hexiopt.solving import Budget, Pricer
from hexiopt.solving.result import Result
from hexiopt.study.replan.replan import Replanning, weigh
from hexiopt.study.solution import PlacedPlan
from solvers.core.search import Search
from solvers.registry import make_solver, solver_class

BOUND = "lower_bound"
"""Stands for a solver: the lower bound of all plans, computed within the time limit."""

CPU_LIMITS = "Time limits are CPU seconds, of each process of the search and of each core of the bound."
"""What a page says of searches with `cpu_time`."""

_KIB = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
_CODE = ("hexiopt", "solvers")
_ROOT = Path(hexiopt.__file__).parent.parent
# A search is killed after this multiple of its limit plus these seconds, which allow for loading and slow pricing.
# CPU time may pass slowly on a busy machine.
GRACE, BUSY_GRACE, GRACE_S = 2.0, 40.0, 60.0

Measured = dict[str, Any]


@dataclass(frozen=True)
class SearchSpec:
    """A problem, a solver with its options, and its budget; `labels` are the columns that identify its row. With
    `max_steps` the steps bind, so that the plan is the same on any machine, and the time limit is generous.

    `pricer` makes the cost model that the search minimises instead of ours; `judge` adds columns about the plan. Both
    are functions of a module, so that another process can import them and their names identify the search. With
    `cpu_time` the time limit is one of CPU time, for each process of the search, and on every core for the bound. With
    `replaces`, another search, the problem is that one's after a change, and its plan is replaced as `hexiopt replan`
    does, by the fastest one.
    """

    problem: Problem
    solver: str
    time_limit_s: float
    labels: Mapping[str, Any]
    seed: int = 0
    options: Mapping[str, str | bool | float] = field(default_factory=dict)
    pricer: Callable[[Problem], Pricer] | None = None
    judge: Callable[[Problem, Plan], Mapping[str, float]] | None = None
    max_steps: int | None = None
    cpu_time: bool = False
    replaces: "SearchSpec | None" = None

    @cached_property
    def sha256(self) -> str:
        """Identifies everything that goes into the search."""
        inputs = {
            "problem": problem_sha256(self.problem),
            "solver": self.solver,
            "options": dict(self.options),
            "time_limit_s": self.time_limit_s,
            "seed": self.seed,
            "functions": [f"{f.__module__}.{f.__qualname__}" for f in (self.pricer, self.judge) if f is not None],
            **({"cpu_time": True} if self.cpu_time else {}),
            **({"replaces": self.replaces.sha256} if self.replaces else {}),
        }
        return sha256_of(inputs if self.max_steps is None else {**inputs, "max_steps": self.max_steps})

    def cores(self, usable: int) -> int:
        """How many of `usable` cores the search keeps busy; the bound takes all."""
        return usable if self.solver == BOUND else solver_class(self.solver).capabilities.busy(usable)

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"{self.solver}{options} on {self.problem.cluster.name}, {self.problem.model.name}, seed {self.seed}"


def provenance() -> dict[str, str]:
    """Columns on the machine, the date and the code of a measurement."""
    machine = f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}"
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "code": code_sha256()}


@cache
def code_sha256() -> str:
    """SHA-256 of the source and data files of `hexiopt` and `solvers`: a cached measurement is valid for
    one version of the code."""
    digest = hashlib.sha256()
    paths = [path for folder in _CODE for suffix in ("py", "yaml") for path in (_ROOT / folder).rglob(f"*.{suffix}")]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(_ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def measure(spec: SearchSpec, plan_path: Path) -> Measured:
    """Run a search in this process and write its plan to `plan_path`.

    Returns the columns of its row. `status` is that of a result, `bound`, or `refused` where the solver refuses the
    problem; `trajectory` is a list of (seconds since the start, best step time then).
    """
    if spec.cpu_time:
        Search.clock = cpu_seconds
    if spec.replaces is not None and not (old := path_of(spec.replaces, plan_path.parent)).exists():
        measure(spec.replaces, old)
    began, used_s = time.perf_counter(), _cpu_s()
    found: Measured = {"status": "bound", "bound_s": 0.0, "reason": "", "trajectory": []}
    try:
        if spec.solver == BOUND:
            found["bound_s"] = lower_bound_s(PlanPricer(spec.problem), spec.time_limit_s, _bound_clock(spec.cpu_time))
        else:
            found |= _searched(spec, plan_path)
    except InputError as error:
        found |= {"status": "refused", "reason": str(error)}
    used = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "runtime_s": time.perf_counter() - began,
        **found,
        "cpu_s": _cpu_s() - used_s,
        "peak_gib": used * _KIB / 2**30,
    }


def _bound_clock(cpu_time: bool) -> Callable[[], float]:
    """Of the bound, whose threads keep all cores busy."""
    cores = usable_cores()
    return (lambda: cpu_seconds() / cores) if cpu_time else time.perf_counter


def path_of(spec: SearchSpec, folder: Path) -> Path:
    """The file of the plan that a search has found."""
    return folder / f"{spec.sha256[:16]}.plan.json"


def _replaced(spec: SearchSpec, old: Path) -> Result:
    """The fastest plan of those that replace the one in `old`, within the budget for all of them."""
    read, solver, began = read_plan(old), make_solver(spec.solver, **spec.options), time.perf_counter()
    steps: list[Result] = []

    def search(start: Plan | None, pricer: Pricer | None, budget: Budget) -> Result:
        steps.append(solver.solve(spec.problem, budget, seed=spec.seed, pricer=pricer, start=start))
        return steps[-1]

    before = PlacedPlan.of(read.problem, read.plan, read.solver)
    budget = Budget(spec.time_limit_s, spec.max_steps)
    wanted = Replanning(before, (), horizon_steps=1000.0, restart_s=0.0, checkpoint_gb_per_s=None)
    best = weigh(wanted, spec.problem, search, budget).replacements[-1]
    cost = PlanPricer(spec.problem).price(best.plan)
    took_s = time.perf_counter() - began
    return replace(steps[0], plan=best.plan, cost=cost, runtime_s=took_s, steps=sum(one.steps for one in steps))


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(own.ru_utime + own.ru_stime for own in usages)


def _searched(spec: SearchSpec, plan_path: Path) -> Measured:
    solver = make_solver(spec.solver, **spec.options)
    pricer = None if spec.pricer is None else spec.pricer(spec.problem)
    if spec.replaces is not None:
        result = _replaced(spec, path_of(spec.replaces, plan_path.parent))
    else:
        result = solver.solve(spec.problem, Budget(spec.time_limit_s, spec.max_steps), seed=spec.seed, pricer=pricer)
    found: Measured = {"status": str(result.status), "bound_s": result.bound_s, "runtime_s": result.runtime_s}
    if result.plan is None or result.cost is None:
        return found | {"reason": result.reason}
    if pricer is None:
        write_plan(plan_path, spec.problem, result.plan, result.cost, solver_to_dict(result))
    judged = {} if spec.judge is None else spec.judge(spec.problem, result.plan)
    cost = result.cost
    return found | {
        "step_time_s": cost.step_time_s,
        "tokens_per_s": cost.tokens_per_s,
        "mfu": cost.mfu,
        "steps": result.steps,
        "first_plan_s": result.trajectory[0].runtime_s if result.trajectory else None,
        "trajectory": [(point.runtime_s, point.step_time_s) for point in result.trajectory],
        **judged,
    }


class Isolated:
    """Runs each search in a process of its own, which isolates its memory use and its crashes."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["experiments.studies.frame.search"])
        self._running: set[BaseProcess] = set()

    def measure(self, spec: SearchSpec, plan_path: Path) -> Measured:
        """The row of a search; its status is `overran` where it was killed, `failed` where it raised or crashed."""
        answer, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(spec, plan_path, there))
        began = time.monotonic()
        process.start()
        there.close()
        self._running.add(process)
        try:
            grace = BUSY_GRACE if spec.cpu_time else GRACE
            if not answer.poll(grace * spec.time_limit_s + GRACE_S):
                process.terminate()
                took_s = time.monotonic() - began
                return _ended("overran", took_s, f"ended after {took_s:.0f} s of {spec.time_limit_s:g} s")
            found: Measured = answer.recv()
            return found
        except EOFError:
            process.join()
            return _ended("failed", time.monotonic() - began, f"its process ended with code {process.exitcode}")
        finally:
            process.join()
            answer.close()
            self._running.discard(process)

    def stop(self) -> None:
        """End every search that is still running."""
        for process in tuple(self._running):
            process.terminate()


def _work(spec: SearchSpec, plan_path: Path, answer: Connection) -> None:
    """In the other process."""
    began = time.perf_counter()
    try:
        found = measure(spec, plan_path)
    except Exception as error:
        traceback.print_exc()
        found = _ended("failed", time.perf_counter() - began, f"{type(error).__name__}: {error}")
    answer.send(found)
    answer.close()


def _ended(status: str, runtime_s: float, reason: str) -> Measured:
    return {"status": status, "runtime_s": runtime_s, "bound_s": 0.0, "reason": reason, "trajectory": []}

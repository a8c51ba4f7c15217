"""Compiles all numba kernels once per machine, so that no search spends its time limit on it; `make install` runs it.

python -m experiments.app.compile
"""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hexiopt
import solvers
from experiments.app.configurations import named_cluster, named_model
from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.compiled.layers import policies_of, split
from solvers.compiled.state import copy_rows, copy_state, forget_touched, new_state, new_work, touch, touch_all
from solvers.compiled.step import evaluate, refresh
from solvers.compiled.tables import tables_of
from solvers.core.search import Search
from solvers.loop.edits import count_devices, is_group, lowest, pick
from solvers.loop.search import walk_candidates
from solvers.loop.settings import LoopSettings
from solvers.registry import make_solver

SOURCES = (
    "hexiopt/schedules/kernel.py",
    "hexiopt/bounds/box_stages.py",
    "hexiopt/bounds/kernel.py",
    "solvers/compiled/batches.py",
    "solvers/compiled/layers.py",
    "solvers/compiled/messages.py",
    "solvers/compiled/pipelines.py",
    "solvers/compiled/rings.py",
    "solvers/compiled/state.py",
    "solvers/compiled/step.py",
    "solvers/loop/dice.py",
    "solvers/loop/edits.py",
    "solvers/loop/grids.py",
    "solvers/loop/pipeline_moves.py",
    "solvers/loop/rebuild.py",
    "solvers/loop/stage_moves.py",
    "solvers/loop/starts.py",
    "solvers/loop/templates.py",
    "solvers/loop/walk.py",
    "solvers/proof/joint.py",
    "solvers/proof/kernels.py",
    "solvers/proof/pipeline_search.py",
    "solvers/proof/sums.py",
)
_ROOTS = {package.__name__: Path(package.__path__[0]).parent for package in (hexiopt, solvers)}
_KERNEL = re.compile(r"^@(?:numba\.(?:njit|vectorize)\(.*cache=True.*|kernel|entry)\ndef (\w+)", re.MULTILINE)
_WIDE = Path.home() / ".cache" / "numba"  # where numba keeps what it cannot keep beside the sources


def compile_once() -> None:
    """Run `main`, and say so, where numba's cache lacks a kernel or has one of older sources."""
    if next(missing(), None) is not None:
        when = "before the search and its time limit begin (make install does it too)"
        print(f"hexiopt: compiling once, for one to three minutes, {when}", file=sys.stderr, flush=True)
        main()


def missing() -> Iterator[str]:
    """The kernels that numba would compile. Importing one compiles it, so this reads names and times of files."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return
    own = os.environ.get("NUMBA_CACHE_DIR")
    elsewhere = list((Path(own) if own else _WIDE).rglob("*.nbi"))
    for source in SOURCES:
        path = _ROOTS[source.partition("/")[0]] / source
        text, changed_s = path.read_text(encoding="utf-8"), path.stat().st_mtime
        files = [*elsewhere, *([] if own else (path.parent / "__pycache__").glob("*.nbi"))]
        there = {file.name.partition(".py3")[0] for file in files if file.stat().st_mtime >= changed_s}
        for kernel in _KERNEL.finditer(text):
            if f"{path.stem}.{kernel[1]}-{text.count(chr(10), 0, kernel.start()) + 1}" not in there:
                yield f"{path.stem}.{kernel[1]}"


def main() -> list[str]:
    """Compile the search beside bounds and proof, in two processes; the parts that failed. What they leave out, numba
    compiles when it is first called."""
    command = [sys.executable, "-P", "-m", "experiments.app.compile"]
    processes = {part: subprocess.Popen([*command, part]) for part in _PARTS}
    return [part for part, process in processes.items() if process.wait()]


def check_all() -> None:
    """Run `main`. Exits with a line where a part failed, or calls none of the functions that need a kernel."""
    if failed := main():
        sys.exit(f"compiling: failed: {', '.join(failed)}; the error stands above")
    if left := list(missing()):
        sys.exit(f"compiling: no part of {Path(__file__).name} calls {', '.join(left)}; add the calls there")


def compile_bounds() -> None:
    """Bound small problems, and prove the best plan of a small one."""
    for schedule in (ONE_F_ONE_B.name, INTERLEAVED.name):
        lower_bound_s(PlanPricer(_problem(schedule)), 2.0)
    problem = _problem(ONE_F_ONE_B.name)
    workload = replace(problem.workload, optimizer_sharding="1")
    provable = replace(problem, cluster=named_cluster("hexiscale_case_study"), workload=workload)
    make_solver("exact").solve(provable, Budget(600.0, max_steps=2_000))  # to the end, so that all of it has run


def _problem(schedule: str) -> Problem:
    cluster = replace(named_cluster("small_mixed"), groups=(), links=())
    workload = Workload(global_batch=8, seq_len=512, schedule=schedule)
    model = replace(named_model("gpt2_345m"), num_layers=4)
    return Problem(cluster, model, workload, Space(replicas=False, max_micro_batch_size=1))


def compile_search() -> None:
    """Call every compiled function of `solvers/compiled` and `solvers/loop` that Python calls."""
    problem = _problem(AUTO)
    tables = tables_of(PlanPricer(problem))
    work, state, other = new_work(tables), new_state(tables), new_state(tables)
    state.plan[0]["num_pipelines"] = state.pipelines[0]["num_stages"] = 1
    state.stages[0, 0]["mask"] = 1
    refresh(tables, work, state)
    touch_all(work, state)
    touch(work, 0)
    evaluate(tables, work, state, math.inf)
    copy_state(state, other)
    copy_rows(work, state, other)
    forget_touched(work)
    split(tables, work, state, 0)
    policies_of(tables, state, 0, 0)
    run = Search("compile", problem, Budget(120.0, max_steps=20), 0)
    walk_candidates(run, LoopSettings(), run.until())
    is_group(tables, 0, lowest(1, pick(1, count_devices(1))))


_PARTS = {"bounds": compile_bounds, "search": compile_search}

if __name__ == "__main__":
    _PARTS[sys.argv[1]]() if sys.argv[1:] else check_all()

"""Runs searches for another process, by the packages of the checkout that `PYTHONPATH` names: a line of JSON for each.

`tests/quality/runs.py` starts it, as a file of its own checkout that imports the packages of another. A line in has
`problem`, `solver`, `seed`, and either `max_steps` or `cpu_s`, seconds of CPU time of each process of the search.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import hexiopt
from hexiopt.files.plan_file import plan_to_dict
from hexiopt.files.problem_file import problem_from_section
from hexiopt.reading import Section
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.registry import make_solver

try:
    from hexiopt.solving.clock import cpu_seconds
except ImportError:  # an older checkout
    from experiments.studies.frame.cpu_clock import cpu_seconds  # type: ignore[import-not-found,import-untyped,no-redef]

NEVER_S = 3600.0  # a time limit that steps end before


def used_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The plan (None where there is none), the steps and CPU seconds of a search, and the checkout that ran it."""
    problem = problem_from_section(Section(asked["problem"], "problem"))
    budget, solver = Budget(asked.get("cpu_s") or NEVER_S, asked.get("max_steps")), make_solver(asked["solver"])
    began_s = used_s()
    result = solver.solve(problem, budget, seed=asked["seed"])
    plan = None if result.plan is None else plan_to_dict(result.plan, problem.cluster)
    root = str(Path(hexiopt.__file__).resolve().parent.parent)
    return {"plan": plan, "steps": result.steps, "cpu_s": used_s() - began_s, "root": root}


if __name__ == "__main__":
    Search.clock = cpu_seconds
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)

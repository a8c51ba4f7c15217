"""Plans LLM training on mixed-GPU clusters: read clusters and models, state a problem, solve, price, check, bound,
compare, sweep, draw.

All seconds are of one training step. Bad input raises `InputError`, a `ValueError` with a one-line message. All objects
are immutable and display themselves in Jupyter. A name is imported when it is first used.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexiopt import plot as plot
    from hexiopt.errors import InputError as InputError
    from hexiopt.exports.exporting import Exported as Exported
    from hexiopt.frame import Frame as Frame
    from hexiopt.plan.plan import Plan as Plan
    from hexiopt.problem.cluster import Cluster as Cluster
    from hexiopt.problem.lora import Lora as Lora
    from hexiopt.problem.model import ModelSpec as ModelSpec
    from hexiopt.problem.problem import Problem as Problem
    from hexiopt.problem.space import Space as Space
    from hexiopt.problem.workload import Workload as Workload
    from hexiopt.solving.registry import SolverCatalogue as SolverCatalogue
    from hexiopt.solving.registry import SolverInfo as SolverInfo
    from hexiopt.solving.registry import solver as solver
    from hexiopt.solving.registry import solvers as solvers
    from hexiopt.study.compare import Comparison as Comparison
    from hexiopt.study.compare import compare as compare
    from hexiopt.study.export import export as export
    from hexiopt.study.export import import_plan as import_plan
    from hexiopt.study.fit import Fit as Fit
    from hexiopt.study.fit import fit as fit
    from hexiopt.study.fitting.verdict import Verdict as Verdict
    from hexiopt.study.fitting.verdict import verdict as verdict
    from hexiopt.study.inputs import cluster as cluster
    from hexiopt.study.inputs import load_problem as load_problem
    from hexiopt.study.inputs import model as model
    from hexiopt.study.price import check as check
    from hexiopt.study.price import load_plan as load_plan
    from hexiopt.study.price import lower_bound as lower_bound
    from hexiopt.study.price import price as price
    from hexiopt.study.replan.replan import Replacement as Replacement
    from hexiopt.study.replan.replan import Replanning as Replanning
    from hexiopt.study.replan.replan import replan as replan
    from hexiopt.study.solution import PlacedPlan as PlacedPlan
    from hexiopt.study.solution import PlanCost as PlanCost
    from hexiopt.study.solution import Solution as Solution
    from hexiopt.study.solve import solve as solve
    from hexiopt.study.sweep import Sweep as Sweep
    from hexiopt.study.sweep import read_sweep as read_sweep
    from hexiopt.study.sweep import sweep as sweep
    from hexiopt.study.training import TrainedRun as TrainedRun
    from hexiopt.study.training import read_training as read_training
    from hexiopt.study.what_if import WhatIf as WhatIf
    from hexiopt.study.what_if import what_if as what_if

# Type checkers read the imports above; for the program, they are the table of where each name is.
_IMPORTS = re.findall(r"^    from ([\w.]+) import (\w+) as", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
_HOMES = {name: module for module, name in _IMPORTS}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that it is asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

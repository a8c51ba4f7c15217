"""Solvers by name, imported only when asked for."""

from importlib import import_module

from hexiopt.errors import InputError, closest
from solvers.base import Solver

_SOLVERS = {
    "random": "solvers.random_partition:RandomPartition",
    "metis": "solvers.metis:Metis",
    "shapes": "solvers.shapes:Shapes",
    "local_search": "solvers.local_search:LocalSearch",
    "portfolio": "solvers.portfolio:Portfolio",
}

NAMES = tuple(_SOLVERS)


def make_solver(name: str) -> Solver:
    """The solver called `name`. Raises InputError for unknown names and for a missing optional package."""
    if name not in _SOLVERS:
        raise InputError(f"solver: {name!r} is not known; {closest(name, _SOLVERS)}")
    module, _, attribute = _SOLVERS[name].partition(":")
    solver: Solver = getattr(import_module(module), attribute)()
    return solver

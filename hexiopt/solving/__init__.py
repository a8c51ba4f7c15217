"""What a solver is, what it returns, who checks it, and where solvers come from.

The names here are what a package with a solver of its own imports (docs/add_a_solver.md).
"""

from hexiopt.solving.result import Point, Result, Status
from hexiopt.solving.solver import (
    MAX_SEED,
    MAX_STEPS,
    MAX_TIME_LIMIT_S,
    Budget,
    Capabilities,
    OnProgress,
    Pricer,
    PricerFeatures,
    PricerMaker,
    Progress,
    Solver,
    foreign_name,
    pricer_name,
    refuse,
    valid_seed,
)

__all__ = [
    "MAX_SEED",
    "MAX_STEPS",
    "MAX_TIME_LIMIT_S",
    "Budget",
    "Capabilities",
    "OnProgress",
    "Point",
    "Pricer",
    "PricerFeatures",
    "PricerMaker",
    "Progress",
    "Result",
    "Solver",
    "Status",
    "foreign_name",
    "pricer_name",
    "refuse",
    "valid_seed",
]

"""What a solver is, what it returns, who checks it, and where solvers come from.

The names here are what a package with a solver of its own imports (docs/add_a_solver.md).
"""

from hexiopt.solving.result import Point as Point
from hexiopt.solving.result import Result as Result
from hexiopt.solving.result import Status as Status
from hexiopt.solving.solver import MAX_SEED as MAX_SEED
from hexiopt.solving.solver import MAX_STEPS as MAX_STEPS
from hexiopt.solving.solver import MAX_TIME_LIMIT_S as MAX_TIME_LIMIT_S
from hexiopt.solving.solver import Budget as Budget
from hexiopt.solving.solver import Capabilities as Capabilities
from hexiopt.solving.solver import OnProgress as OnProgress
from hexiopt.solving.solver import Pricer as Pricer
from hexiopt.solving.solver import PricerFeatures as PricerFeatures
from hexiopt.solving.solver import PricerMaker as PricerMaker
from hexiopt.solving.solver import Progress as Progress
from hexiopt.solving.solver import Solver as Solver
from hexiopt.solving.solver import foreign_name as foreign_name
from hexiopt.solving.solver import pricer_name as pricer_name
from hexiopt.solving.solver import refuse as refuse
from hexiopt.solving.solver import valid_seed as valid_seed

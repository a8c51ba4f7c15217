"""Solvers and cost models that installed packages declare, by entry points: `name = "module:Class"`.

The groups are `hexiopt.solvers` and `hexiopt.pricers`. Our own solvers are in one table, which the group
`hexiopt.solver_table` points to. All are found by their metadata and imported only when asked for, so that `hexiopt`
imports no package of solvers.
"""

import warnings
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import partial
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, RenamedWarning, did_you_mean
from hexiopt.own_packages import refuse_hidden
from hexiopt.problem.problem import Problem
from hexiopt.solving.referee import Refereed
from hexiopt.solving.solver import Capabilities, Pricer, PricerMaker, Solver, pricer_name

GROUP = "hexiopt.solvers"
TABLE_GROUP = "hexiopt.solver_table"
PRICERS = "hexiopt.pricers"
OWN_DISTRIBUTION = "hexiopt"
# Old names of solvers, and solvers that are gone, kept for one release.
ALIASES: Mapping[str, str] = {"metis": "hexiscale", "shapes": "portfolio", "columns": "portfolio"}


class SolverClass(Protocol):
    """What makes solvers, from their parameters."""

    name: str
    capabilities: Capabilities

    def __call__(self, **parameters: Any) -> Solver:
        """A solver."""


def current_name(name: str, level: int = 3) -> str:
    """`name`, or the name that replaces it; the use of an old name gives a RenamedWarning `level` calls up, by default
    at the caller's caller."""
    if name in ALIASES:
        warnings.warn(f"solver: {name} now means {ALIASES[name]}; the old name goes soon", RenamedWarning, level)
    return ALIASES.get(name, name)


def solver_targets() -> dict[str, str]:
    """`module:Class` of every declared solver by name, sorted; where another package declares a name of ours, ours.

    Raises InputError where a folder named `solvers` hides ours.
    """
    refuse_hidden("solvers")
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    for point in entry_points(group=TABLE_GROUP):
        if point.dist is not None and point.dist.name == OWN_DISTRIBUTION:
            found |= point.load()
    return dict(sorted(found.items()))


def declared_pricer(name: str) -> PricerMaker:
    """What makes the cost model `name` for a problem. Raises InputError for unknown and broken ones; what it returns
    does for a cost model that lacks what searches ask."""
    known = {point.name: point.value for point in entry_points(group=PRICERS)}
    if name not in known:
        others = did_you_mean(name, known) if known else f"no installed package declares one in {PRICERS}"
        raise InputError(f"pricer: {name!r} is not known; {others}")
    return pricer_maker(_resolved("pricer", name, known[name]))


def pricer_maker(stated: str | Pricer | PricerMaker) -> PricerMaker:
    """What makes a cost model for a problem, from its declared name, or from a class or function; an object stands for
    itself. Raises InputError as `declared_pricer`."""
    if isinstance(stated, str):
        return declared_pricer(stated)
    return partial(_complete, stated)


def make_pricer(stated: str | Pricer | PricerMaker | None, problem: Problem) -> Pricer:
    """The cost model for `problem` that `pricer_maker` makes of `stated`; ours where it is None."""
    return PlanPricer(problem) if stated is None else pricer_maker(stated)(problem)


def _complete(stated: Pricer | PricerMaker, problem: Problem) -> Pricer:
    made: Any = stated
    if isinstance(stated, type) or not hasattr(stated, "price"):
        made = stated(problem)
    asked = ("problem", *(name for name in vars(Pricer) if not name.startswith("_")))
    missing = [name for name in asked if not hasattr(made, name)]
    if missing:
        lacks = f"{pricer_name(made)} has no {' and no '.join(missing)}"
        raise InputError(f"pricer: {lacks}; a cost model is as in hexiopt/solving/solver.py")
    return cast(Pricer, made)


def import_class(name: str, target: str) -> SolverClass:
    """The class `target`, a `module:Class`, which a package declares as the solver `name`.

    Raises InputError where it cannot be imported or is no solver.
    """
    found = _resolved("solver", name, target)
    missing = [own for own in ("name", "capabilities", "solve") if not hasattr(found, own)]
    if missing:
        raise InputError(
            f"solver: {name}: {target} has no {' and no '.join(missing)}; a solver is as in hexiopt/solving/solver.py"
        )
    return cast(SolverClass, found)


def _resolved(kind: str, name: str, target: str) -> Any:
    try:
        return resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{kind}: {name}: {target} cannot be imported ({error}); correct or remove the package that declares it"
        ) from None


def parameters(made: SolverClass) -> tuple[Field[Any], ...]:
    """The parameters of a solver: the fields of its dataclass."""
    return tuple(field for field in fields(made) if field.init) if is_dataclass(made) else ()


def make_refereed(made: SolverClass, pricer_of: PricerMaker | None = None, /, **options: object) -> Refereed:
    """A solver of the class `made` with its own `options`, its plans checked by the referee, and priced by a cost model
    of `pricer_of`, or ours.

    Raises InputError for unknown options, and for values out of range.
    """
    taken = [field.name for field in parameters(made)]
    for option in options:
        if option not in taken:
            own = f"its options: {', '.join(taken)}" if taken else "it has no options"
            raise InputError(f"solver.{option}: {made.name} does not take it; {own}")
    return Refereed(made(**options), pricer_of)

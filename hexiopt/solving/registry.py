"""Solvers and cost models that installed packages declare, by entry points: `name = "module:Class"`.

The groups are `hexiopt.solvers` and `hexiopt.pricers`. Our own solvers are in one table, which the group
`hexiopt.solver_table` points to. All are found by their metadata and imported only when asked for, so that `hexiopt`
imports no package of solvers.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from importlib.metadata import entry_points
from inspect import getdoc
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol, cast

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, RenamedWarning, did_you_mean
from hexiopt.frame import Frame
from hexiopt.own_packages import refuse_hidden
from hexiopt.problem.problem import Problem
from hexiopt.reading import word
from hexiopt.solving.referee import Refereed
from hexiopt.solving.solver import Capabilities, Pricer, PricerMaker, Solver, pricer_name

GROUP = "hexiopt.solvers"
TABLE_GROUP = "hexiopt.solver_table"
PRICERS = "hexiopt.pricers"
OWN_DISTRIBUTION = "hexiopt"
_OF_SOLVERS = ("name", "capabilities", "solve")  # what every solver has
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
    if lacks := _lacks(made, asked):
        raise InputError(f"pricer: {pricer_name(made)} {lacks}; a cost model is as in hexiopt/solving/solver.py")
    return cast(Pricer, made)


def _lacks(value: Any, names: Iterable[str]) -> str:
    """`has no price and no problem`: which of the attributes `names` are missing from `value`; empty where none is."""
    missing = [name for name in names if not hasattr(value, name)]
    return f"has no {' and no '.join(missing)}" if missing else ""


def import_class(name: str, target: str) -> SolverClass:
    """The class `target`, a `module:Class`, which a package declares as the solver `name`.

    Raises InputError where it cannot be imported or is no solver.
    """
    made = _resolved("solver", name, target)
    if lacks := _lacks(made, _OF_SOLVERS):
        raise InputError(f"solver: {name}: {target} {lacks}; a solver is as in hexiopt/solving/solver.py")
    return cast(SolverClass, made)


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


@dataclass(frozen=True)
class SolverInfo:
    """An installed solver: its capabilities, its parameters with their defaults, and its description."""

    name: str
    capabilities: Capabilities
    parameters: Mapping[str, Any]
    description: str


class SolverCatalogue(Mapping[str, SolverInfo]):
    """A mapping of all declared solvers by name, imported on access; it prints as a table with one row per solver."""

    def __init__(self) -> None:
        self._targets = solver_targets()

    def __getitem__(self, name: str) -> SolverInfo:
        """Raises InputError for an unknown name, and for a solver that cannot be imported."""
        made = solver_class(name, self._targets)
        own = {one.name: _default(one) for one in parameters(made)}
        return SolverInfo(
            made.name, made.capabilities, MappingProxyType(own), (getdoc(made) or "").partition("\n\n")[0]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    @cached_property
    def frame(self) -> Frame:
        """Names, capabilities and parameters as a table; for a solver that cannot be imported, the reason."""
        return Frame.of([self._row(name) for name in self])

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`. Raises InputError where pandas is not installed."""
        return self.frame.to_pandas()

    def __repr__(self) -> str:
        return repr(self.frame)

    def _repr_html_(self) -> str:
        return self.frame._repr_html_()

    def _row(self, name: str) -> dict[str, Any]:
        try:
            info = self[name]
        except InputError as error:
            return {"name": name, "description": str(error)}
        able = {one.name: getattr(info.capabilities, one.name) for one in fields(info.capabilities)}
        able["requires"] = ", ".join(info.capabilities.requires) or None
        able.pop("cores")
        own = ", ".join(f"{key}={value!r}" for key, value in info.parameters.items())
        return {"name": name, **able, "parameters": own or None, "description": " ".join(info.description.split())}


def solver_class(name: str, targets: Mapping[str, str]) -> SolverClass:
    """The class of the solver `name` in `targets`. Raises InputError for unknown names and broken packages."""
    name = ALIASES.get(name, name)
    if not targets:
        raise InputError('solver: no installed package declares one; install this project, as by "pip install -e ."')
    if name not in targets:
        raise InputError(f"solver: {name!r} is not known; {did_you_mean(str(name), targets)}")
    return import_class(name, targets[name])


def solvers() -> SolverCatalogue:
    """The solvers that installed packages declare, as a mapping from name to `SolverInfo` that prints as a table.

    It lists the capabilities of each solver, and its parameters with their defaults.
    """
    return SolverCatalogue()


def solver(name: str, **options: object) -> Refereed:
    """The solver `name`, one of `solvers()`, with parameters, for `solve` and `compare`. Raises InputError."""
    return make_solver(name, options)


def make_solver(
    solver: object, options: Mapping[str, object], pricer: str | Pricer | PricerMaker | None = None
) -> Refereed:
    """A solver whose plans the referee checks, from a name or class and its `options`, or from a solver object; it
    searches by the cost model that `pricer` is, names or makes, or by ours.

    Raises InputError for unknown names and options, for values out of range, and for objects that are not solvers.
    """
    pricer_of = None if pricer is None else pricer_maker(pricer)
    if isinstance(solver, str):
        return make_refereed(solver_class(current_name(solver, 4), solver_targets()), pricer_of, **options)
    if lacks := _lacks(solver, _OF_SOLVERS):
        raise InputError(f"solver: {solver!r} is not a name and {lacks}; a solver is as in hexiopt/solving/solver.py")
    if isinstance(solver, type):
        return make_refereed(solver, pricer_of, **options)  # type: ignore[arg-type]
    if options:
        raise InputError(f"solver.{min(options)}: {solver!r} is already constructed; pass options to its class")
    if isinstance(solver, Refereed):
        return solver if pricer_of is None else replace(solver, pricer_of=pricer_of)
    return Refereed(solver, pricer_of)  # type: ignore[arg-type]


def default_of(solver: str, parameter: str) -> str | None:
    """The default of a solver's parameter as the command line writes it; None where there is no such solver or
    parameter."""
    try:
        own = {one.name: _default(one) for one in parameters(solver_class(solver, solver_targets()))}
    except InputError:
        return None
    return word(own[parameter]) if parameter in own else None


def _default(parameter: Any) -> Any:
    if parameter.default is not MISSING:
        return parameter.default
    return parameter.default_factory() if parameter.default_factory is not MISSING else None

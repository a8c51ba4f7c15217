"""Solvers and cost models that installed packages declare, by entry points: `name = "module:Class"`.

The groups are `hexiopt.solvers` and `hexiopt.pricers`. Our own solvers are in one table, which the group
`hexiopt.solver_table` points to. All are found by their metadata and imported only when asked for, so that `hexiopt`
imports no package of solvers.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from inspect import getdoc
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol, cast

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, RenamedWarning, did_you_mean
from hexiopt.frame import Frame
from hexiopt.own_packages import own_package
from hexiopt.problem.problem import Problem
from hexiopt.reading import word
from hexiopt.solving.referee import Refereed
from hexiopt.solving.solver import Capabilities, Pricer, PricerMaker, Solver, pricer_name

GROUP = "hexiopt.solvers"
TABLE_GROUP = "hexiopt.solver_table"
PRICERS = "hexiopt.pricers"
OWN_DISTRIBUTION = "hexiopt"
_SOLVER_ATTRIBUTES = ("name", "capabilities", "solve")  # what every solver has
# Old names of solvers, and solvers that are gone, kept for one release.
ALIASES: Mapping[str, str] = {"metis": "hexiscale", "shapes": "portfolio", "columns": "portfolio"}


class SolverClass(Protocol):
    """The class of a solver, which makes one from its parameters."""

    name: str
    capabilities: Capabilities

    def __call__(self, **parameters: Any) -> Solver:
        """A solver."""


def current_name(name: str, level: int = 3) -> str:
    """`name`, or the name that replaces it.

    An old name gives a RenamedWarning `level` calls up, by default at the caller's caller.
    """
    if name in ALIASES:
        warnings.warn(f"solver: {name} now means {ALIASES[name]}; the old name goes soon", RenamedWarning, level)
    return ALIASES.get(name, name)


@lru_cache(maxsize=16)
def _points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of `group` in what is installed on `path`; to read them takes every package's metadata."""
    return tuple(entry_points(group=group))


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return _points(group, tuple(sys.path))


def solver_targets() -> dict[str, str]:
    """`module:Class` of every declared solver by name, sorted; where another package declares a name of ours, ours.

    Raises InputError where a folder named `solvers` hides ours.
    """
    own_package("solvers")
    targets = {point.name: point.value for point in _entry_points(GROUP)}
    for point in _entry_points(TABLE_GROUP):
        if point.dist is not None and point.dist.name == OWN_DISTRIBUTION:
            targets |= point.load()
    return dict(sorted(targets.items()))


def find_pricer(name: str) -> PricerMaker:
    """The maker of the declared cost model `name`.

    Raises InputError for an unknown or broken one; the maker raises it for a cost model that lacks what searches ask.
    """
    targets = {point.name: point.value for point in _entry_points(PRICERS)}
    if name not in targets:
        others = did_you_mean(name, targets) if targets else f"no installed package declares one in {PRICERS}"
        raise InputError(f"pricer: {name!r} is not known; {others}")
    return pricer_maker(_resolve("pricer", name, targets[name]))


def pricer_maker(pricer: str | Pricer | PricerMaker) -> PricerMaker:
    """The maker of a cost model, from its declared name, a class, a function or an object, which stands for itself.

    Raises InputError as `find_pricer` does.
    """
    if isinstance(pricer, str):
        return find_pricer(pricer)
    return partial(_complete, pricer)


def make_pricer(pricer: str | Pricer | PricerMaker | None, problem: Problem) -> Pricer:
    """The cost model for `problem` that `pricer_maker` makes of `pricer`; ours for None."""
    return PlanPricer(problem) if pricer is None else pricer_maker(pricer)(problem)


def _complete(source: Pricer | PricerMaker, problem: Problem) -> Pricer:
    pricer: Any = source
    if isinstance(source, type) or not hasattr(source, "price"):
        pricer = source(problem)
    attributes = ("problem", *(name for name in vars(Pricer) if not name.startswith("_")))
    if lacks := _lacks(pricer, attributes):
        raise InputError(f"pricer: {pricer_name(pricer)} {lacks}; a cost model is as in hexiopt/solving/solver.py")
    return cast(Pricer, pricer)


def _lacks(value: Any, names: Iterable[str]) -> str:
    """`has no price and no problem`: which of the attributes `names` are missing from `value`; empty where none is."""
    missing = [name for name in names if not hasattr(value, name)]
    return f"has no {' and no '.join(missing)}" if missing else ""


def import_class(name: str, target: str) -> SolverClass:
    """The class `target`, a `module:Class`, which a package declares as the solver `name`.

    Raises InputError where it cannot be imported or is no solver.
    """
    loaded = _resolve("solver", name, target)
    if lacks := _lacks(loaded, _SOLVER_ATTRIBUTES):
        raise InputError(f"solver: {name}: {target} {lacks}; a solver is as in hexiopt/solving/solver.py")
    return cast(SolverClass, loaded)


def _resolve(kind: str, name: str, target: str) -> Any:
    try:
        return resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{kind}: {name}: {target} cannot be imported ({error}); correct or remove the package that declares it"
        ) from None


def parameters(solver: SolverClass) -> tuple[Field[Any], ...]:
    """The parameters of a solver: the fields of its dataclass."""
    return tuple(field for field in fields(solver) if field.init) if is_dataclass(solver) else ()


def make_refereed(solver: SolverClass, pricer_of: PricerMaker | None = None, /, **options: object) -> Refereed:
    """An object of the class `solver` with `options`, its plans checked by the referee and priced by `pricer_of`'s cost
    model, or ours.

    Raises InputError for unknown options, and for values out of range.
    """
    names = [field.name for field in parameters(solver)]
    for option in options:
        if option not in names:
            options_in_words = f"its options: {', '.join(names)}" if names else "it has no options"
            raise InputError(f"solver.{option}: {solver.name} does not take it; {options_in_words}")
    return Refereed(solver(**options), pricer_of)


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
        solver = solver_class(name, self._targets)
        defaults = {parameter.name: _default(parameter) for parameter in parameters(solver)}
        return SolverInfo(
            solver.name, solver.capabilities, MappingProxyType(defaults), (getdoc(solver) or "").partition("\n\n")[0]
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
        able = {field.name: getattr(info.capabilities, field.name) for field in fields(info.capabilities)}
        able["requires"] = ", ".join(info.capabilities.requires) or None
        able.pop("cores")
        options = ", ".join(f"{key}={value!r}" for key, value in info.parameters.items())
        return {"name": name, **able, "parameters": options or None, "description": " ".join(info.description.split())}


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
    """A solver whose plans the referee checks, from a name or class and its `options`, or from a solver object.

    It searches by the cost model that `pricer` is, names or makes (None: ours). Raises InputError for unknown names and
    options, for values out of range, and for objects that are not solvers.
    """
    pricer_of = None if pricer is None else pricer_maker(pricer)
    if isinstance(solver, str):
        return make_refereed(solver_class(current_name(solver, 4), solver_targets()), pricer_of, **options)
    if lacks := _lacks(solver, _SOLVER_ATTRIBUTES):
        raise InputError(f"solver: {solver!r} is not a name and {lacks}; a solver is as in hexiopt/solving/solver.py")
    if isinstance(solver, type):
        return make_refereed(solver, pricer_of, **options)  # type: ignore[arg-type]
    if options:
        raise InputError(f"solver.{min(options)}: {solver!r} is already constructed; pass options to its class")
    if isinstance(solver, Refereed):
        return solver if pricer_of is None else replace(solver, pricer_of=pricer_of)
    return Refereed(solver, pricer_of)  # type: ignore[arg-type]


def default_of(solver: str, parameter: str) -> str | None:
    """The default of a solver's parameter as the command line writes it; None for an unknown solver or parameter."""
    try:
        defaults = {field.name: _default(field) for field in parameters(solver_class(solver, solver_targets()))}
    except InputError:
        return None
    return word(defaults[parameter]) if parameter in defaults else None


def _default(parameter: Any) -> Any:
    if parameter.default is not MISSING:
        return parameter.default
    return parameter.default_factory() if parameter.default_factory is not MISSING else None

"""The catalogue of installed solvers: their capabilities and parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from inspect import getdoc
from types import MappingProxyType
from typing import Any

from hexiopt.errors import InputError, did_you_mean
from hexiopt.frame import Frame
from hexiopt.reading import word
from hexiopt.solving.plugins import (
    ALIASES,
    SolverClass,
    current_name,
    import_class,
    make_refereed,
    parameters,
    pricer_maker,
    solver_targets,
)
from hexiopt.solving.referee import Refereed
from hexiopt.solving.solver import Capabilities, Pricer, PricerMaker


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
    missing = [name for name in ("name", "capabilities", "solve") if not hasattr(solver, name)]
    if missing:
        what = f"solver: {solver!r} is not a name and has no {' and no '.join(missing)}"
        raise InputError(f"{what}; a solver is as in hexiopt/solving/solver.py")
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

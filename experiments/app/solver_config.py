"""The configuration schema of each solver: its name, its budget, and its parameters as its dataclass types them.

`solver=NAME` composes it. It is made of the solver's class, whether that is ours or another package's: no file states
it again.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, field, make_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.app.config import SolverConfig
from hexiopt.errors import InputError
from hexiopt.solving.registry import ALIASES, parameters
from solvers.registry import known, solver_class

ORACLE_TIME_LIMIT_S = 60.0  # proofs take longer than searches


def schema(name: str) -> type[SolverConfig]:
    """The configuration schema of a solver as a dataclass. Raises InputError where the solver cannot be imported."""
    solver_type = solver_class(ALIASES.get(name, name))
    hints = get_type_hints(solver_type)
    common: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    if solver_type.capabilities.kind == "oracle":
        common.append(("time_limit_s", float, field(default=ORACLE_TIME_LIMIT_S)))
    options = [
        (parameter.name, _checked_type(parameter.name, hints[parameter.name]), _default(parameter))
        for parameter in parameters(solver_type)
    ]
    bases = make_dataclass("Named", common, bases=(SolverConfig,))
    return make_dataclass(f"{name.title()}Config", options, bases=(bases,))


def register(names: Iterable[str] | None = None) -> None:
    """Store the schemas of the named solvers, by default of all, in Hydra's ConfigStore."""
    store, solvers = ConfigStore.instance(), {*known(), *ALIASES}
    for name in solvers if names is None else solvers.intersection(names):
        node = make_dataclass("Named", [("name", str, field(default=name))], bases=(SolverConfig,))
        with suppress(InputError):  # choosing the solver reports the error
            node = schema(name)
        store.store(group="solver", name=name, node=node)


def _default(parameter: Field[Any]) -> Any:
    factory = parameter.default_factory
    return field(default=parameter.default) if factory is MISSING else field(default_factory=factory)


def _checked_type(name: str, hint: Any) -> Any:
    """The type that OmegaConf checks; types that it does not support are left to the solver."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    try:
        OmegaConf.structured(make_dataclass("Probe", [(name, hint)]))
    except OmegaConfBaseException:
        return Any
    return hint

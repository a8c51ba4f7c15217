"""The configuration schema of each solver: its name, its budget, and its parameters as its dataclass types them.

`solver=NAME` composes it. Our solvers have a file in `conf/solver/` that states what differs from the schema stored
here; a solver of another package needs no file.
"""

from collections.abc import Iterable
from dataclasses import MISSING, Field, field, make_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.app.config import SolverConfig
from hexiopt.errors import InputError
from hexiopt.plugins import ALIASES, parameters
from solvers.registry import BUILT_IN, known, solver_class

SCHEMA = "_schema"  # suffix of the names of our own solvers' schemas


def schema(name: str) -> type[SolverConfig]:
    """The configuration schema of a solver as a dataclass. Raises InputError where the solver cannot be imported."""
    made = solver_class(name)
    hints = get_type_hints(made)
    own = [(one.name, _typed(one.name, hints[one.name]), _default(one)) for one in parameters(made)]
    bases = make_dataclass("Named", [("name", str, field(default=name))], bases=(SolverConfig,))
    return make_dataclass(f"{name.title()}Config", own, bases=(bases,))


def register(names: Iterable[str] | None = None) -> None:
    """Store the schemas of the named solvers, by default of all, in Hydra's ConfigStore."""
    store = ConfigStore.instance()
    for name in known() if names is None else names:
        name = ALIASES.get(name, name)
        if name in BUILT_IN:
            store.store(group="solver", name=name + SCHEMA, node=schema(name))
        elif name in known():
            try:
                node = schema(name)
            except InputError:  # choosing the solver reports the error
                node = make_dataclass("Broken", [("name", str, field(default=name))], bases=(SolverConfig,))
            store.store(group="solver", name=name, node=node)


def _default(parameter: Field[Any]) -> Any:
    factory = parameter.default_factory
    return field(default=parameter.default) if factory is MISSING else field(default_factory=factory)


def _typed(name: str, hint: Any) -> Any:
    """The type that OmegaConf checks; types that it does not support are left to the solver."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    try:
        OmegaConf.structured(make_dataclass("Probe", [(name, hint)]))
    except OmegaConfBaseException:
        return Any
    return hint

"""Solvers by name, imported only when asked for.

Ours are rows of the table here. A package adds its own by an entry point (`hexiopt/solving/registry.py`).
"""

from collections.abc import Callable, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import cast

from hexiopt.errors import InputError, did_you_mean
from hexiopt.solving import Capabilities, PricerMaker
from hexiopt.solving.referee import Refereed
from hexiopt.solving.registry import ALIASES, SolverClass, current_name, import_class, make_refereed, solver_targets

_TABLE = {
    "random": "heuristics.random_partition:RandomPartition",
    "rules": "heuristics.rules:Rules",
    "hexiscale": "heuristics.hexiscale:HexiScale",
    "local_search": "heuristics.local_search:LocalSearch",
    "portfolio": "portfolio:Portfolio",
    "cp_sat": "exact.cp_sat:CpSat",
    "exact": "exact.exact:Exact",
    "amp": "baselines.amp:Amp",
    "espresso": "baselines.espresso.espresso:Espresso",
    "flashflex": "baselines.flashflex.flashflex:FlashFlex",
    "fsdp": "baselines.fsdp:Fsdp",
    "galvatron": "baselines.galvatron.galvatron:Galvatron",
    "megatron": "baselines.megatron:Megatron",
    "metis_atc24": "baselines.metis_atc24.metis_atc24:MetisAtc24",
    "sailor": "baselines.sailor:Sailor",
    "hexiseq": "sequence.hexiseq:HexiSeq",
    "ring": "baselines.symmetric_layouts:RingLayouts",
    "sequence_random": "sequence.random_layouts:SequenceRandom",
    "ulysses": "baselines.symmetric_layouts:UlyssesLayouts",
    "usp": "baselines.symmetric_layouts:UspLayouts",
    "sequence_exact": "sequence.exact.sequence_exact:SequenceExact",
}
BUILT_IN: Mapping[str, str] = {name: f"{__package__}.{target}" for name, target in _TABLE.items()}


def known() -> dict[str, str]:
    """`module:Class` of every solver by name: ours, and those of packages that are installed."""
    ours = {*BUILT_IN, *ALIASES}
    return {**BUILT_IN, **{name: target for name, target in solver_targets().items() if name not in ours}}


def solver_class(name: str) -> SolverClass:
    """The class of the solver called `name`. Raises InputError for unknown names and what cannot be imported."""
    name = current_name(name, 4)
    if name in BUILT_IN:  # what cannot be imported of ours is a bug, not bad input
        return cast(SolverClass, resolve_name(BUILT_IN[name]))
    solvers = known()
    if name not in solvers:
        raise InputError(f"solver: {name!r} is not known; {did_you_mean(name, solvers)}")
    return import_class(name, solvers[name])


def make_solver(name: str, pricer_of: PricerMaker | None = None, /, **options: object) -> Refereed:
    """The solver called `name` with its own `options`, its plans checked by the referee, and priced by a cost model of
    `pricer_of`, or ours.

    Raises InputError for unknown names and options, and for values out of range.
    """
    return make_refereed(solver_class(name), pricer_of, **options)


@cache
def names(where: Callable[[Capabilities], bool] = lambda able: True) -> tuple[str, ...]:
    """Those of our solvers whose capabilities are so, in the order of their declaration."""
    return tuple(name for name in BUILT_IN if where(solver_class(name).capabilities))


def for_any_problem(able: Capabilities) -> bool:
    """Of solvers that search the whole plan space, without sequence layouts, of clusters of any size."""
    return able.kind != "baseline" and able.sequence != "only" and able.max_layers is None


def baseline(able: Capabilities) -> bool:
    """Of published systems without sequence layouts."""
    return able.kind == "baseline" and able.sequence == "no"


def of_sequences(able: Capabilities) -> bool:
    """Of solvers that plan sequence layouts only, but for their oracle."""
    return able.sequence == "only" and able.kind != "oracle"


def small_oracle(able: Capabilities) -> bool:
    """Of oracles that refuse problems of more than a few devices."""
    return able.kind == "oracle" and able.max_devices is not None

"""Solvers by name, imported only when asked for; rivals are solvers with their own, published plan space."""

from dataclasses import fields, is_dataclass
from importlib import import_module

from hexiopt.errors import InputError, closest
from solvers.core.search import Solver

_SOLVERS = {
    "random": "solvers.heuristics.random_partition:RandomPartition",
    "metis": "solvers.heuristics.hexiscale:Metis",
    "shapes": "solvers.heuristics.shape_program:Shapes",
    "local_search": "solvers.heuristics.local_search:LocalSearch",
    "portfolio": "solvers.portfolio:Portfolio",
    "cp_sat": "solvers.exact.cp_sat:CpSat",
}

# The oracle: it refuses problems of more than a few devices, so it is not run wherever the others are.
_ORACLES = {"exhaustive": "solvers.exact.exhaustive:Exhaustive"}

_RIVALS = {
    "amp": "solvers.baselines.amp:Amp",
    "espresso": "solvers.baselines.espresso.espresso:Espresso",
    "flashflex": "solvers.baselines.flashflex.flashflex:FlashFlex",
    "fsdp": "solvers.baselines.fsdp:Fsdp",
    "galvatron": "solvers.baselines.galvatron.galvatron:Galvatron",
    "megatron": "solvers.baselines.megatron:Megatron",
    "metis_atc24": "solvers.baselines.metis_atc24.metis_atc24:MetisAtc24",
    "sailor": "solvers.baselines.sailor:Sailor",
}

# They plan stages with sequence layouts, which the plan space has with space.sequence=true.
_SEQUENCE = {
    "hexiseq": "solvers.sequence.hexiseq:HexiSeq",
    "ring": "solvers.baselines.symmetric_layouts:Ring",
    "sequence_random": "solvers.sequence.random_layouts:SequenceRandom",
    "ulysses": "solvers.baselines.symmetric_layouts:Ulysses",
    "usp": "solvers.baselines.symmetric_layouts:Usp",
}

# Their oracle, for a few devices.
_SEQUENCE_ORACLES = {"sequence_exact": "solvers.sequence.exact.solver:SequenceExact"}

NAMES = tuple(_SOLVERS)
RIVALS = tuple(_RIVALS)
ORACLES = tuple(_ORACLES)
SEQUENCE = tuple(_SEQUENCE)
SEQUENCE_ORACLES = tuple(_SEQUENCE_ORACLES)


def make_solver(name: str, **options: object) -> Solver:
    """The solver called `name` with its own `options`.

    Raises InputError for unknown names and options, values out of range, and a missing optional package.
    """
    known = _SOLVERS | _ORACLES | _RIVALS | _SEQUENCE | _SEQUENCE_ORACLES
    if name not in known:
        raise InputError(f"solver: {name!r} is not known; {closest(name, known)}")
    module, _, attribute = known[name].partition(":")
    made = getattr(import_module(module), attribute)
    taken = [field.name for field in fields(made)] if is_dataclass(made) else []
    for option in options:
        if option not in taken:
            own = f"its options: {', '.join(taken)}" if taken else "it has no options"
            raise InputError(f"solver.{option}: {name} does not take it; {own}")
    solver: Solver = made(**options)
    return solver

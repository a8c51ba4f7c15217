"""Presets: the switches under which a trainer's format expresses the best plan (`space.preset=NAME`)."""

from dataclasses import fields, replace
from typing import Any

from hexiopt.errors import InputError
from hexiopt.exports.formats import Trainer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import BOUNDS, Space
from hexiopt.problem.workload import AUTO


def restrict(problem: Problem, trainer: Trainer) -> Problem:
    """Restrict `problem` to the preset of `trainer`, and to TP degrees up to which all suit the model.

    Values that the user leaves open are set; values that the user states must be among those of the preset. Raises
    InputError where they are not, and where the format can express no plan of the problem.
    """
    if (kinds := trainer.unsuitable_kinds(problem)) is not None:
        raise InputError(f"space.preset: {trainer.name} {kinds}")
    if (wrong := trainer.unsuitable(problem)) is not None:
        raise InputError(f"space.preset: {trainer.name}: {wrong}")
    space: dict[str, Any] = {}
    workload: dict[str, Any] = {}
    defaults = {field.name: field.default for field in fields(Space)}
    for key, allowed in trainer.preset(problem).items():
        group, _, name = key.partition(".")
        if group == "workload":
            value = getattr(problem.workload, name)
            workload[name] = _choose(key, value, AUTO, allowed, trainer.name)
        else:
            assert (name in BOUNDS) == (group == "constraints")
            space[name] = _choose(key, getattr(problem.space, name), defaults[name], allowed, trainer.name)
    largest = problem.space.max_tp or max(machine.num_gpus for machine in problem.cluster.machines)
    degrees = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    suited = next((k for k, tp in enumerate(degrees) if not trainer.runs_tp(problem, tp)), len(degrees))
    if suited < len(degrees):
        space["max_tp"] = degrees[max(0, suited - 1)]
    return replace(problem, space=replace(problem.space, **space), workload=replace(problem.workload, **workload))


def _choose(key: str, choice: Any, default: Any, allowed: tuple[Any, ...], name: str) -> Any:
    if choice in allowed:
        return choice
    if choice == default:
        return allowed[0]
    choices = " or ".join(_word(value) for value in allowed)
    raise InputError(f"{key}: {_word(choice)} does not go with space.preset={name}; take {choices}, or leave it out")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

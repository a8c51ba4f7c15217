"""What `hexiopt VERB --help` says: groups and their configurations, the keys that the verb reads, their meanings and
choices; and which verbs read a key that this one does not."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from experiments.app.config import READS, Config, reads
from experiments.app.verb_config import CHOICES
from experiments.app.verbs import VERBS
from hexiopt.errors import InputError
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.numbers.gpus import PRECISIONS
from hexiopt.numbers.messages import MESSAGE_PRECISIONS
from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.problem.lora import STORAGES
from hexiopt.problem.space import Space
from hexiopt.problem.workload import AUTO, KINDS_OF_TRAINING, RECOMPUTE_POLICIES, SHARDING_STAGES, Workload
from hexiopt.schedules.registry import schedule_names

_WIDTH = 80
_MOST_NAMED = 3  # verbs in an error line
_MEANINGS = {
    "cluster": "The cluster: a shipped name, or your own file; single values as cluster.KEY=VALUE.",
    "model": "The model: a shipped name, or your own config.json or its folder.",
    "workload": inspect.getdoc(Workload),
    "space": inspect.getdoc(Space),
    "constraints": "Constraints on a plan; null means none. `exclude` names machines or devices (machine:index).",
    "constraints.memory_headroom": "The share of a GPU's memory that the plan must leave free, 0 to 0.5.",
    "solver": "The solver, its budget (`time_limit_s` seconds and, if stated, `max_steps` of its own steps), and its "
    "parameters (docs/solvers.md).",
    "seed": "The seed of a search; with solver.max_steps the same seed gives the same plan.",
    "pricer": "The name of a cost model that an installed package declares, to price plans instead of ours "
    "(docs/add_a_solver.md); null: ours.",
    "plan": "The path of a plan file.",
    "data": "The path of a file of measured runs (docs/clusters.md).",
    "report": "Whether to draw pictures; null: except in a sweep.",
    "print": "`summary` prints what fits a screen, `full` every stage.",
    "alone": "Whether to plan each GPU type alone too, and say what the mixed cluster gives over the best.",
    "lost": "Machines and devices (machine:index) to do without.",
    "slow": "Shares of full speed, {machine:index: 0.7}, or the folder of a run that measured them.",
    "added": "More machines: a list as in the cluster file, or a file of it.",
    "run": "A folder of `train`, or another trainer's log, or a list of them.",
    "file": "The file with the layout of another trainer.",
    "format": "The trainer that the file is of.",
    "ranks": "A table with the GPU of each rank; null: the cluster's GPUs in order.",
}
_CHOICES = {
    **CHOICES,
    "workload.precision": PRECISIONS,
    "workload.message_precision": MESSAGE_PRECISIONS,
    "workload.gradient_precision": MESSAGE_PRECISIONS,
    "workload.recompute": (AUTO, *RECOMPUTE_POLICIES),
    "workload.schedule": (AUTO, *schedule_names()),
    "workload.optimizer_sharding": (AUTO, *map(str, SHARDING_STAGES)),
    "workload.gradient_bytes": ("2", "4"),
    "workload.training": KINDS_OF_TRAINING,
    "workload.lora.storage": tuple(STORAGES),
    "workload.optimizer": tuple(OPTIMIZERS),
    "space.tp_degrees": ("powers_of_two", "all"),
    "space.preset": tuple(TRAINERS),
}


def refuse_unread(verb: str, overrides: Sequence[str]) -> None:
    """Raise InputError where overrides of the command line have keys that other verbs read, and `verb` does not.

    Its schema does not have them either; but Hydra would tell the first one only, and not who reads it.
    """
    keys = (override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides)
    if faults := [fault for key in keys if (fault := refusal(verb, key))]:
        raise InputError("; also ".join(faults))


def refusal(verb: str, key: str) -> str | None:
    """A line on a key that other verbs read, and `verb` does not; None for every other key."""
    readers = [other for other in VERBS if reads(other, key)]
    if not readers or verb in readers:
        return None
    first = readers[:_MOST_NAMED]
    if len(readers) > _MOST_NAMED:
        named = f"{', '.join(first)} and others do"
    else:
        named = f"{readers[0]} does" if len(readers) == 1 else f"{', '.join(first[:-1])} and {first[-1]} do"
    return f"{key}: {verb} does not read it; hexiopt {named}"


def help_text(verb: str, config: Any, options: Mapping[str, Sequence[str]]) -> str:
    """What a verb does, the `options` of its groups, and its keys and what they mean, with their values in `config`,
    for a terminal of 80 columns."""
    groups = "".join(f"{group}: {', '.join(names)}\n" for group, names in options.items())
    keys = "\n".join(line for key in READS[verb] for line in _section(key, OmegaConf.select(config, key)))
    body = Template(config.hydra.help.template).safe_substitute(APP_CONFIG_GROUPS=groups, CONFIG=keys)
    return f"hexiopt {verb} [key=value ...]: {VERBS[verb]}\n\n{body}"


def _section(key: str, value: Any) -> Iterator[str]:
    hints = get_type_hints(Config)
    meaning = _MEANINGS.get(key) or inspect.getdoc(hints[key]) or ""
    for paragraph in meaning.replace("Raises InputError where a value breaks its rule.", "").split("\n\n"):
        yield from textwrap.wrap(" ".join(paragraph.split()), _WIDTH, break_on_hyphens=False)
    values: Any = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if isinstance(values, dict) and key not in ("cluster", "model"):
        for name, entry in values.items():
            nested = entry.items() if key == "workload" and isinstance(entry, dict) else ()
            yield from [_line(f"{key}.{name}.{part}", inner) for part, inner in nested] or [
                _line(f"{key}.{name}", entry)
            ]
    else:
        yield _line(key, None if isinstance(values, dict) else values)
    yield ""


def _line(key: str, value: Any) -> str:
    choices = _CHOICES.get(key)
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    line = f"  {key}={shown.replace(chr(39), '').replace(', ', ',')}"
    if not choices:
        return line
    choice_lines = textwrap.wrap(f"one of {', '.join(choices)}", _WIDTH - 6, break_on_hyphens=False)
    return "\n".join([line, *(f"      {part}" for part in choice_lines)])

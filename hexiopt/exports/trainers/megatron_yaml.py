"""Arguments of Megatron-LM in YAML: lists of flags under MODEL_ARGS, and Primus' configurations.

MODEL_ARGS is the form of Megatron-LM's own tests and of Megatron-MoE-ModelZoo, where `yq` makes words of it
(`sbatch_benchmarking.sh`, yanring/Megatron-MoE-ModelZoo e8650517). Primus' keys are Megatron-LM's with underscores, on
top of its own defaults (`primus/configs/modules/megatron` and `models/megatron/language_model.yaml`, AMD-AGI/Primus
fd1eeab).
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from hexiopt.exports.formats import ImportContext
from hexiopt.exports.shell.scripts import Script, Words
from hexiopt.exports.shell.values import Unknown
from hexiopt.reading import as_mapping, parse

_FLAGS = "MODEL_ARGS"
_PRIMUS_DEFAULTS: Mapping[str, Any] = {
    "bf16": True,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seq_length": 1024,
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-?([^{}]*))?\}|\$\w+")


def read_yaml(text: str, context: ImportContext) -> Script | None:
    """The arguments in a YAML file; None for other texts. Raises InputError for a file without arguments."""
    if not re.search(rf"^({_FLAGS}|modules):", text, re.MULTILINE):
        return None
    try:
        yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    data = as_mapping(parse(text, context.where, as_json=False), context.where)
    if _FLAGS in data:
        flags = as_mapping(data[_FLAGS], f"{context.where}: {_FLAGS}")
        return Script(
            {str(name).removeprefix("--"): _words(value, True) for name, value in flags.items() if _on(value)}
        )
    modules = as_mapping(data["modules"], f"{context.where}: modules")
    trainer = modules.get("pre_trainer")
    if not isinstance(trainer, Mapping) or not isinstance(trainer.get("overrides"), Mapping):
        context.fail(
            "has no modules.pre_trainer.overrides; give a configuration of Primus that trains with Megatron-LM"
        )
    context.require_model("Primus")
    overrides = trainer["overrides"]
    absent = {key: value for key, value in _PRIMUS_DEFAULTS.items() if key not in overrides}
    values = {**absent, **overrides}
    notes = [f"not read: what {trainer.get('model', 'the file of the model')} states beside the shape"]
    if absent:
        notes.append(f"not stated, so by Primus' default: {', '.join(f'{key} {v}' for key, v in absent.items())}")
    arguments = {str(key).replace("_", "-"): _words(value, False) for key, value in values.items() if _on(value)}
    return Script(arguments, notes=tuple(notes))


def _on(value: Any) -> bool:
    return value is not False and value is not None and str(value).lower() not in ("false", "null")


def _words(value: Any, split: bool) -> Words:
    """A value as the words of an argument; a text is `split` at blanks where a shell reads it."""
    if value is True or str(value).lower() == "true":
        return []
    items = value if isinstance(value, list) else str(value).split() if split else [value]
    return [_word(str(item)) for item in items]


def _word(text: str) -> str | Unknown:
    """A word, with the defaults of its variables; unknown where one has none."""
    if any(match[2] is None for match in _VARIABLE.finditer(text)):
        return Unknown(text, "is set where the job is started")
    return _VARIABLE.sub(lambda match: match[2], text)

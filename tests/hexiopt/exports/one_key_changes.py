"""Changes of one key of a layout's file, and what becomes of its reading.

A key is dropped, renamed, added or given another value, in whatever way the format writes keys down.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.settings import flat
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.stated_layouts import StatedLayout

Keys = dict[str, Any]  # by dotted names or, of a script, names of arguments with their words; in the order of the file


@dataclass(frozen=True)
class Change:
    """`layout` is the file after something was done to `key`, such as `drop`."""

    what: str
    key: str
    layout: StatedLayout

    def __str__(self) -> str:
        return f"{self.layout.trainer}, {self.layout.name}: {self.what} {self.key}"


# ----------------------------------------------------------------------------- keys of each kind of file


def keys_of(layout: StatedLayout) -> Keys:
    """The keys that a file states."""
    match layout.kind:
        case "toml":
            return dict(flat(tomllib.loads(layout.text)))
        case "json":
            return dict(flat(json.loads(layout.text)))
        case "yaml":
            return dict(flat(yaml.safe_load(layout.text)))
        case "lines":
            lines = [line for line in layout.text.splitlines() if line and not line.startswith("#")]
            return {key: value for key, _, value in (line.partition("=") for line in lines)}
        case "shell":
            return _arguments(layout.text)
        case _:
            return {name: ast.unparse(value) for name, value in _assignments(layout.text)}


def with_keys(layout: StatedLayout, keys: Mapping[str, Any]) -> StatedLayout:
    """The file with these keys instead of its own."""
    match layout.kind:
        case "toml":
            text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items() if value != {})
        case "json":
            text = json.dumps(_nest(keys))
        case "yaml":
            comments = [line for line in layout.text.splitlines() if line.lstrip().startswith("#")]
            text = "\n".join([*comments, yaml.safe_dump(_nest(keys), sort_keys=False)])
        case "lines":
            text = "".join(f"{key}={value}\n" for key, value in keys.items())
        case "shell":
            words = [word for name, values in keys.items() for word in (f"--{name}", *values)]
            text = f"torchrun pretrain_gpt.py {shlex.join(words)}\n"
        case _:
            text = _with_assignments(layout.text, keys)
    return replace(layout, text=text)


def _nest(keys: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = made
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return made


def _arguments(text: str) -> Keys:
    arguments: Keys = {}
    name = None
    lines = (line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    for word in re.sub(r'\w+="', " ", " ".join(lines)).replace('"', " ").split():
        if word.startswith("--"):
            name = word[2:]
            arguments[name] = []
        elif name is not None:
            arguments[name].append(word)
    return arguments


def _assignments(text: str) -> Iterator[tuple[str, ast.expr]]:
    """What the one function of a module gives its configuration: by assignments, or by arguments of constructors."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield ast.unparse(node.targets[0]).partition(".")[2], node.value
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                inner = keyword.value.keywords if isinstance(keyword.value, ast.Call) else []
                yield from ((f"{keyword.arg}.{argument.arg}", argument.value) for argument in inner)
                if not inner:
                    yield str(keyword.arg), keyword.value


def _with_assignments(text: str, keys: Mapping[str, str]) -> str:
    """A module whose function makes the same configuration by assignments, from a function that it imports or not."""
    base = re.search(r"config = (\w+)\(\)", text)
    lines = [f"    config.{key} = {value}" for key, value in keys.items()]
    first = f"    config = {base[1]}()" if base else "    config = Trainer.Config()"
    return "\n".join(["def ours():", first, *lines, "    return config", ""])


# ----------------------------------------------------------------------------- changes


def drop_keys(layout: StatedLayout) -> Iterator[Change]:
    """Each key taken out."""
    keys = keys_of(layout)
    for key in keys:
        yield Change("drop", key, with_keys(layout, {name: value for name, value in keys.items() if name != key}))


def rename_keys(layout: StatedLayout) -> Iterator[Change]:
    """Each key misspelt."""
    keys = keys_of(layout)
    for key in keys:
        other = {(f"{name}x" if name == key else name): value for name, value in keys.items()}
        yield Change("rename", key, with_keys(layout, other))


def change_values(layout: StatedLayout) -> Iterator[Change]:
    """Each key with other values of its kind."""
    keys = keys_of(layout)
    for key, value in keys.items():
        for other in _others(value, layout.kind):
            yield Change(f"set to {other!r}", key, with_keys(layout, keys | {key: other}))


def add_keys(layout: StatedLayout, vocabulary: Mapping[str, Any]) -> Iterator[Change]:
    """Each key of `vocabulary` that the file lacks, with its value there, and one that is nobody's."""
    keys = keys_of(layout)
    for key, value in {**vocabulary, "nobodys_key": _unknown(layout.kind)}.items():
        if key not in keys and not any(name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in keys):
            yield Change("add", key, with_keys(layout, keys | {key: value}))


def _unknown(kind: str) -> Any:
    return {"shell": ["7"], "lines": "7", "python": "7"}.get(kind, 7)


def _others(value: Any, kind: str) -> list[Any]:
    if kind == "shell":
        return [[other] for other in _others_of_text(value[0])] if len(value) == 1 else []
    if kind in ("lines", "python"):
        return _others_of_text(value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 if value else 2]
    if isinstance(value, str):
        return [f"{value}x", *(_others_of_text(value) if value[:1].isdigit() else [])]
    return [value[:-1]] if isinstance(value, list) and value else []


def _others_of_text(value: str) -> list[Any]:
    flips = {"true": "false", "false": "true", "True": "False", "False": "True"}
    if value in flips:
        return [flips[value]]
    if value.isdecimal():
        return [str(int(value) + 1), str(2 * int(value) or 2)]
    return [f"{value[:-1]}x{value[-1:]}" if value[-1:] in "'\")]" else f"{value}x"]


# ----------------------------------------------------------------------------- readings


def reading(layout: StatedLayout) -> ImportedPlan | InputError:
    """What the importer makes of a file on a cluster of its size, or its refusal."""
    cluster = layout.cluster or Cluster.of({"b200": layout.num_gpus}, inter_gb_per_s=50)
    read = TRAINERS[layout.trainer].read
    assert read is not None
    devices = layout.devices or tuple(range(layout.num_gpus))
    context = ImportContext("file", cluster, devices, layout.model, Workload(), Space())
    try:
        return read(layout.text, context)
    except InputError as error:
        return error


def outcome(before: ImportedPlan, change: Change) -> str:
    """`refused`, `changed`, `noted`, or `silent` where the same plan comes without another word."""
    after = reading(change.layout)
    if isinstance(after, InputError):
        return "refused"
    if (after.problem, after.plan) != (before.problem, before.plan):
        return "changed"
    return "noted" if sorted(after.notes) != sorted(before.notes) else "silent"

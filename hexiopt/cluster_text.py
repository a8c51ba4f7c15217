"""Writing a cluster file as people do, a machine a line, with comments; and what is unknown in it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hexiopt.errors import InputError
from hexiopt.reading import MAX_FILE_BYTES, parse

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def cluster_text(cluster: Mapping[str, Any], head: Sequence[str], notes: Mapping[str, Sequence[str]]) -> str:
    """A cluster of plain data in the file format as YAML: comments `head` first, those of a machine above it.

    Raises InputError where the file would be larger than what is read.
    """
    lines = [f"# {_one_line(line)}" for line in head]
    for key, value in cluster.items():
        if isinstance(value, Mapping) and key == "gpus":
            lines.append(f"{key}:")
            lines += [f"  {_flow(name)}: {_flow(gpu)}" for name, gpu in value.items()]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            lines.append(f"{key}:")
            for item in value:
                lines += [f"  # {_one_line(note)}" for note in notes.get(item.get("name", ""), ())]
                lines.append(f"  - {_flow(item)}")
        else:
            lines.append(f"{key}: {_flow(value)}")
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > MAX_FILE_BYTES:
        limit = f"larger than {MAX_FILE_BYTES / 2**20:g} MiB, the most that is read"
        raise InputError(f"machines: {len(cluster['machines']):,} of them make a file {limit}; name fewer")
    return text


def unknowns(cluster: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Whose values are null, and their keys: of each machine, of the network between machines, of stated links."""
    for key in _nulls(cluster.get("inter_machine", {})):
        yield "between machines", f"inter_machine.{key}"
    for machine in cluster["machines"]:
        for key in _nulls(machine):
            yield machine["name"], key
    for link in cluster.get("links", ()):
        for key in _nulls(link):
            yield " and ".join(link.get("between") or (link["from"], link["to"])), key


def _nulls(value: Any, where: str = "") -> Iterator[str]:
    if value is None:
        yield where
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _nulls(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _nulls(inner, f"{where}[{i}]")


def _flow(value: Any) -> str:
    """Plain data on one line, text quoted where it would read back as something else."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and parse(value, "", as_json=False) == value:
            return value
        plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{"".join(plain)}"'
    return json.dumps(value, allow_nan=False)


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

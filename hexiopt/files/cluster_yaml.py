"""Writes a cluster file as a person would, with one machine per line and comments, and lists its unknown values."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.reading import MAX_FILE_BYTES, Section, nulls, parse, read_mapping

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def cluster_text(cluster: Mapping[str, Any], head: Sequence[str], notes: Mapping[str, Sequence[str]]) -> str:
    """The YAML text of a cluster, given as plain data in the file format.

    The lines of `head` come first, as comments; the `notes` on each machine, by its name, stand above it. Raises
    InputError where the file would be larger than the reader accepts.
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


def read_open_cluster(path: str) -> dict[str, Any]:
    """The mapping of a cluster file that may contain nulls. Raises InputError for any other error in it."""
    data = read_mapping(path)
    if "synthetic" in data:
        raise InputError(f"{path}: synthetic: has no machines of its own; give a file that states them")
    open_parts = ("inter_machine", "machines", "links", "groups")
    cluster_from_section(Section(data | {key: _fill_nulls(data[key]) for key in open_parts if key in data}, path))
    return data


def _fill_nulls(value: Any, key: str = "") -> Any:
    """`value` with some valid value in place of each null, so that the rest can be checked."""
    if isinstance(value, Mapping):
        return {name: _fill_nulls(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fill_nulls(inner) for inner in value]
    return {"gpu": "cpu", "name": None}.get(key, 1) if value is None else value


def unknowns(cluster: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The owner and the key of each null in the network between machines, the machines and the stated links."""
    for key in nulls(cluster.get("inter_machine", {})):
        yield "between machines", f"inter_machine{key}"
    for machine in cluster["machines"]:
        for key in nulls(machine):
            yield machine["name"], key.removeprefix(".")
    for link in cluster.get("links", ()):
        for key in nulls(link):
            yield " and ".join(link.get("between") or (link["from"], link["to"])), key.removeprefix(".")


def _flow(value: Any) -> str:
    """Plain data on one line; text is quoted where YAML would read another value."""
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

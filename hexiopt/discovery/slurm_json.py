"""Nodes and their GPUs from Slurm's JSON: `scontrol show nodes --json` and `sinfo --json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from hexiopt.discovery.gres import SlurmNodes
from hexiopt.discovery.inventory import Inventory
from hexiopt.discovery.lines import Line, Text
from hexiopt.errors import InputError
from hexiopt.reading import parse

COMMAND = "scontrol show nodes --json"


def is_slurm_json(text: Text) -> bool:
    """Whether the text is JSON with Slurm's lists of nodes."""
    return text.first.lstrip().startswith("{") and text.has(r'"(sinfo|nodes)"\s*:\s*\[')


def read_slurm_json(text: Text) -> Inventory:
    """The nodes in the order of the text. Raises InputError naming the node."""
    data = parse(text.content, text.path, as_json=True)
    if data.get("errors"):
        raise InputError(f"{text.path}: reports errors of Slurm and may lack nodes; write it again with {COMMAND}")
    nodes = SlurmNodes(text, COMMAND)
    for place, entry in _entries(data):
        with nodes.faults.collect():
            names, gres, features, state = _node(entry) if place == "nodes" else _row(entry)
            line = Line(text.path, 0, names, f"node {names or '?'}")
            if gres is None:
                line.refuse(f"has no GRES, so its GPUs are not stated; write it with {COMMAND}")
            node = nodes.node(line, gres, features, state)
            nodes.add(line, line.names(names), node)
    return nodes.inventory()


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place in ("nodes", "sinfo"):
        for entry in data.get(place) or ():
            yield place, entry if isinstance(entry, Mapping) else {}


def _node(entry: Mapping[str, Any]) -> tuple[str, str | None, str, str]:
    """Name, GRES, features and state of a node; versions differ in whether lists are lists or texts."""
    state = _join(entry.get("state"), "+")
    flags = _join(entry.get("state_flags"), "+")
    features = _join(entry.get("features") or entry.get("available_features"), ",")
    return _join(entry.get("name"), ","), _gres(entry, "gres"), features, "+".join(filter(None, (state, flags)))


def _row(entry: Mapping[str, Any]) -> tuple[str, str | None, str, str]:
    """Node list, GRES, features and state of a row of sinfo, which stands for several nodes."""
    nodes, gres = _inner(entry, "nodes"), _inner(entry, "gres")
    state = _join(_inner(entry, "node").get("state") or entry.get("state"), "+")
    features = _join(_inner(entry, "features").get("total"), ",")
    return _join(nodes.get("nodes") or nodes.get("hostnames"), ","), _gres(gres, "total"), features, state


def _gres(entry: Mapping[str, Any], key: str) -> str | None:
    """The GRES under a key, '' if the node has none; None if the key is missing."""
    return _join(entry[key], ",") if key in entry else None


def _inner(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, Mapping) else {}


def _join(value: Any, separator: str) -> str:
    return separator.join(map(str, value)) if isinstance(value, list) else str(value or "")

"""Nodes and their GPUs from Slurm's JSON: `scontrol show nodes --json` and `sinfo --json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from hexiopt.discovery.gres import not_read, outage, read_gres
from hexiopt.discovery.inventory import Inventory, Node
from hexiopt.discovery.lines import Faults, Line, Text
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
    nodes: dict[str, Node] = {}
    others: set[str] = set()
    faults = Faults(text.path)
    for place, entry in _entries(data):
        with faults.collect():
            names, gres, features, state = _node(entry) if place == "nodes" else _row(entry)
            line = Line(text.path, 0, names, f"node {names or '?'}")
            if gres is None:
                line.refuse(f"has no GRES, so its GPUs are not stated; write it with {COMMAND}")
            gpus, more = read_gres(line, gres)
            others |= more
            node = Node(gpus, features or None, outage(state))
            for name in line.names(names):
                if nodes.setdefault(name, node) != node:
                    line.refuse("appears above with another GRES, state or features; keep one", name)
    faults.refuse()
    if not nodes:
        raise InputError(f"{text.path}: names no node; write it with {COMMAND}")
    return Inventory(nodes, not_read(others))


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place in ("nodes", "sinfo"):
        for entry in data.get(place) or ():
            yield place, entry if isinstance(entry, Mapping) else {}


def _node(entry: Mapping[str, Any]) -> tuple[str, str | None, str, str]:
    """Name, GRES, features and state of a node; versions differ in whether lists are lists or texts."""
    state = _joined(entry.get("state"), "+")
    flags = _joined(entry.get("state_flags"), "+")
    features = _joined(entry.get("features") or entry.get("available_features"), ",")
    return _joined(entry.get("name"), ","), _gres(entry, "gres"), features, "+".join(filter(None, (state, flags)))


def _row(entry: Mapping[str, Any]) -> tuple[str, str | None, str, str]:
    """The same of a row of sinfo, which is of several nodes."""
    nodes, gres = _inner(entry, "nodes"), _inner(entry, "gres")
    state = _joined(_inner(entry, "node").get("state") or entry.get("state"), "+")
    features = _joined(_inner(entry, "features").get("total"), ",")
    return _joined(nodes.get("nodes") or nodes.get("hostnames"), ","), _gres(gres, "total"), features, state


def _gres(entry: Mapping[str, Any], key: str) -> str | None:
    """The GRES under a key, '' where there is none; None where the key is lacking."""
    return _joined(entry[key], ",") if key in entry else None


def _inner(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, Mapping) else {}


def _joined(value: Any, separator: str) -> str:
    return separator.join(map(str, value)) if isinstance(value, list) else str(value or "")

"""Nodes and their GPUs from Kubernetes: `kubectl get nodes -o yaml` or json, and `kubectl describe nodes`.

Labels are those of NVIDIA's GPU feature discovery (`nvidia.com/gpu.product`, `.count`, `.memory` in MiB, `.replicas`),
of AMD's node labeller (`amd.com/gpu.product-name`), and of Google's and Amazon's nodes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hexiopt.discovery.inventory import GpuGroup, Inventory, Node
from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.errors import InputError
from hexiopt.reading import parse

COMMAND = "kubectl get nodes -o yaml"
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
)
_MIG = re.compile(r"nvidia\.com/mig-(.+)")
_MIB = 2**20
_MOST_GPUS = 1024


@dataclass
class _Record:
    """The facts about a node that a text states."""

    labels: Mapping[str, Any] = field(default_factory=dict)
    capacity: Mapping[str, Any] = field(default_factory=dict)
    allocatable: Mapping[str, Any] = field(default_factory=dict)
    ready: str = "True"
    unschedulable: bool = False


def is_kubernetes(text: Text) -> bool:
    """Whether the text is a node, or a list, as kubectl writes it in YAML or JSON."""
    first = text.first.lstrip()
    return first.startswith(("{", "apiVersion:", "items:", "kind:", "---")) and text.has(r'"?apiVersion"?:\s*"?v1')


def is_description(text: Text) -> bool:
    """Whether the text is the output of kubectl describe."""
    return re.match(r"Name:\s+\S", text.first) is not None and text.has(r"^(Labels|Roles|Capacity|Conditions):")


def read_kubernetes(text: Text) -> Inventory:
    """The nodes of a list in YAML or JSON. Raises InputError naming the node."""
    data = parse(text.content, text.path, as_json=text.first.lstrip().startswith("{"))
    items = data.get("items", [data]) if isinstance(data, Mapping) else []
    nodes = [item for item in items or () if isinstance(item, Mapping) and item.get("kind", "Node") == "Node"]
    if not nodes:
        raise InputError(f"{text.path}: has no object of kind Node; write it with {COMMAND}")
    return _inventory(text, ((str(_path(node, "metadata").get("name", "")), _of_object(node)) for node in nodes))


def read_description(text: Text) -> Inventory:
    """The nodes of `kubectl describe nodes`. Raises InputError naming the node."""
    return _inventory(text, _description_records(text))


def _of_object(node: Mapping[str, Any]) -> _Record:
    status = _path(node, "status")
    conditions = [condition for condition in status.get("conditions") or () if isinstance(condition, Mapping)]
    return _Record(
        labels=_path(node, "metadata", "labels"),
        capacity=_path(status, "capacity"),
        allocatable=_path(status, "allocatable"),
        ready=next(
            (str(condition.get("status")) for condition in conditions if condition.get("type") == "Ready"), "True"
        ),
        unschedulable=bool(_path(node, "spec").get("unschedulable")),
    )


def _description_records(text: Text) -> Iterator[tuple[str, _Record]]:
    """The records of all nodes; a section is a key at the start of a line and the lines indented below it."""
    name, node, section = "", _Record(), ""
    for line in text.lines:
        head = re.match(r"([A-Za-z][\w .-]*):\s*(.*)", line.text)
        if head is not None and head[1] == "Name":
            if name:
                yield name, node
            name, node = head[2], _Record({}, {}, {})
        if head is not None:
            section, body = head[1], head[2]
        else:
            body = line.text.strip()
        if section == "Labels" and "=" in body:
            key, _, value = body.partition("=")
            node.labels |= {key: value}  # type: ignore[operator]
        elif section in ("Capacity", "Allocatable") and (pair := re.fullmatch(r"(\S+):\s+(\S+)", body)):
            values = node.capacity if section == "Capacity" else node.allocatable
            values |= {pair[1]: pair[2]}  # type: ignore[operator]
        elif section == "Conditions" and body.split()[:1] == ["Ready"]:
            node.ready = body.split()[1]
        elif section == "Unschedulable":
            node.unschedulable = body.lower() == "true"
    if name:
        yield name, node


def _inventory(text: Text, records: Iterator[tuple[str, _Record]]) -> Inventory:
    nodes: dict[str, Node] = {}
    faults = Faults(text.path)
    for name, record in records:
        line = Line(text.path, 0, name, f"node {name or '?'}")
        with faults.collect():
            if name in nodes:
                line.refuse("appears twice; keep one", name)
            nodes[line.name(name)] = _node(line, record)
    faults.refuse()
    return Inventory(nodes)


def _node(line: Line, record: _Record) -> Node:
    out = "NotReady" if record.ready != "True" else "SchedulingDisabled" if record.unschedulable else None
    labels = record.labels
    product = next((str(labels[key]) for key in _PRODUCTS if key in labels), None)
    shares = _whole(line, labels, "nvidia.com/gpu.replicas") or 1
    count, total, notes = _counts(line, record, shares)
    slices = tuple(
        GpuGroup(f"{(product or 'MIG').removesuffix('-MIG-INVALID')} {kind[1]}", number)
        for key in record.capacity
        if (kind := _MIG.fullmatch(key)) and (number := _whole(line, record.capacity, key))
    )
    memory_mib = _whole(line, labels, "nvidia.com/gpu.memory")
    memory = None if memory_mib is None else memory_mib * _MIB
    if product is not None:
        product = product.removesuffix("-SHARED")
    gpus = (GpuGroup(product, count, memory), *slices) if count else slices
    if total != count:
        notes = (*notes, f"{count} of {total} GPUs are allocatable")
    return Node(gpus, None, out, notes)


def _counts(line: Line, record: _Record, shares: int) -> tuple[int, int, tuple[str, ...]]:
    """The numbers of GPUs that pods can have and of all GPUs, and notes.

    Raises InputError where label and capacity differ.
    """
    resource = "nvidia.com/gpu" if "nvidia.com/gpu" in {**record.capacity, **record.allocatable} else "amd.com/gpu"
    if f"{resource}.shared" in record.capacity:  # as the device plugin may rename GPUs in time slices
        resource = f"{resource}.shared"
    whole = _whole(line, record.capacity, resource)
    usable = _whole(line, record.allocatable, resource)
    labelled = _whole(line, record.labels, "nvidia.com/gpu.count")
    slices = any(map(_MIG.fullmatch, record.capacity))
    if whole is None:
        whole = usable
    if whole is None:
        return labelled or 0, labelled or 0, ()
    if labelled is not None and not slices and whole not in (labelled, labelled * shares):
        rule = f"has the label nvidia.com/gpu.count={labelled} and a capacity of {whole}; write it again with {COMMAND}"
        line.refuse(rule)
    shared = shares if labelled is None or whole == labelled * shares else 1
    notes = (f"each GPU is shared by {shared} pods",) if shared > 1 else ()
    return (whole if usable is None else usable) // shared, whole // shared, notes


def _whole(line: Line, values: Mapping[str, Any], key: str) -> int | None:
    """The whole number under a key; None where it is absent. Raises InputError."""
    if key not in values:
        return None
    text = str(values[key])
    most = 2**22 if key.endswith("memory") else _MOST_GPUS
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > most:
        line.refuse(f"is {key}, which is no whole number up to {most}; write it again with {COMMAND}", text)
    return int(text)


def _path(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The mapping below keys; an empty one where there is none."""
    for key in keys:
        inner = value.get(key)
        value = inner if isinstance(inner, Mapping) else {}
    return value

"""Machines from the hostfile of a launcher: DeepSpeed and Megatron (`host slots=8`), FlagScale (`host slots=8
type=A800`), OpenMPI (`host slots=8 max_slots=8`), MPICH (`host:8`), or plain hosts."""

import re

from hexiopt.discovery.inventory import GpuGroup, Inventory, Node
from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.errors import InputError

_MOST_SLOTS = 1024
_HARMLESS = ("max_slots", "max-slots", "port", "user", "username")
_SLOTS = ("slots", "count")


def is_hostfile(text: Text) -> bool:
    """Whether each line has a host and words such as slots=8."""
    hosts = [words for line in text.lines if (words := _words(line))]
    return bool(hosts) and all(
        re.fullmatch(r"[\w.:-]+", host) and all(re.fullmatch(r"[\w-]+=\S*", word) for word in words)
        for host, *words in hosts
    )


def read_hostfile(text: Text) -> Inventory:
    """The hosts, whose slots are GPUs, of the type that `type=` names. Raises InputError with file and line."""
    nodes: dict[str, Node] = {}
    faults = Faults(text.path)
    for line in text.lines:
        with faults.collect():
            if words := _words(line):
                host, node = _host(line, words)
                if host in nodes:
                    line.refuse("is a host that appears twice; write it once, as host slots=8", host)
                nodes[line.name(host)] = node
    faults.refuse()
    if not nodes:
        raise InputError(f"{text.path}: names no host; write one host per line, such as host slots=8")
    return Inventory(nodes)


def _words(line: Line) -> list[str]:
    return re.sub(r"\s*=\s*", "=", line.text.partition("#")[0]).split()


def _host(line: Line, words: list[str]) -> tuple[str, Node]:
    host, colon, count = words[0].rpartition(":")
    if not colon:
        host = words[0]
    slots = [count] if colon else []
    product = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in (*_SLOTS, *_HARMLESS, "type"):
            line.refuse("is not valid after a host; write host slots=8", word)
        if key in _SLOTS:
            slots.append(value)
        elif key == "type":
            product = value
    if len(slots) > 1:
        line.refuse("states slots twice; keep one")
    if slots and not (re.fullmatch(r"[0-9]{1,4}", slots[0]) and 1 <= int(slots[0]) <= _MOST_SLOTS):
        line.refuse(f"is not a number of slots from 1 to {_MOST_SLOTS}; write host slots=8", slots[0])
    return host, Node((GpuGroup(product, int(slots[0]) if slots else None),))

"""Slurm's GRES texts, such as `gpu:a100:8(S:0-1),nvme:1`, and the states of its nodes."""

import re
from collections.abc import Iterable

from hexiopt.discovery.inventory import GpuGroup, Inventory, Node
from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.errors import InputError
from hexiopt.ledger import words

NONE = ("(null)", "N/A", "none", "")
MOST_GPUS = 1024
# Shares of the same GPUs (shard, mps) and resources that are none.
_HARMLESS = {"shard", "mps", "nvme", "tmpdisk", "tmp", "ssd", "disk", "localtmp", "lscratch", "scratch", "bandwidth"}
_HARMLESS |= {"craynetwork", "network", "nic", "ib", "hca", "cpu", "mem", "memory", "license", "gpumem", "vram"}
_SOCKETS = re.compile(r"\((?:S|IDX|CNT):[^()]*\)")
_ENTRY = re.compile(r"[^:,()\s]+(:[^:,()\s]+)*")

# Of `man sinfo`, NODE STATE CODES: words and their short forms for which no job can run.
_OUT = words("""
    down drain drained draining drng fail failing failg error maint maintenance inval invalid_reg
    not_responding no_respond unknown unk perfctrs npc future futr
""")
_IN = words("""
    idle mix mixed alloc allocated comp completing resv reserved plnd planned cloud blocked dynamic_norm dynamic_future
    power_up powering_up pow_up power_down powering_down pow_dn powered_down pow_down
    reboot boot reboot_issued reboot_requested resume undrain external
""")
_FLAGS = "*~#!%$@^-+"  # after a state: * does not respond, $ is in a maintenance reservation


def is_state(word: str) -> bool:
    """Whether a word is a node state as sinfo and scontrol print it."""
    parts = [part.rstrip(_FLAGS).lower() for part in word.split("+")]
    return all(part in _OUT | _IN for part in parts if part) and any(parts)


def outage(state: str, *, configured: bool = False) -> str | None:
    """`state` if it keeps jobs off the node, such as `IDLE+DRAIN` or `idle*`; else None.

    In slurm.conf (`configured`) UNKNOWN stands for a node whose state the controller has yet to find out.
    """
    for part in state.split("+"):
        word = part.rstrip(_FLAGS).lower()
        flags = part[len(word) :]
        if ("*" in flags or "$" in flags or word in _OUT) and not (configured and word == "unknown"):
            return state
    return None


def read_gres(line: Line, text: str) -> tuple[tuple[GpuGroup, ...], frozenset[str]]:
    """The GPUs of a GRES text, name[:type][:no_consume][:count], and the names of other resources that may matter.

    Raises InputError.
    """
    gpus: dict[str | None, int] = {}
    others: set[str] = set()
    plain = "" if text in NONE else _SOCKETS.sub("", text)
    for entry in plain.split(",") if plain else []:
        if not _ENTRY.fullmatch(entry):
            line.refuse("is not a GRES; write, for example, gpu:a100:8(S:0-1)", entry or text)
        name, *words = entry.split(":")
        if name.removeprefix("gres/") != "gpu":
            others |= {name} - _HARMLESS
            continue
        words = [word for word in words if word != "no_consume"]
        count = words.pop() if words and re.fullmatch(r"[0-9]+", words[-1]) else "1"
        if len(words) > 1 or len(count) > 4 or int(count) > MOST_GPUS:
            line.refuse(f"is not a GRES of up to {MOST_GPUS} GPUs; write, for example, gpu:a100:8", entry)
        product = words[0] if words else None
        if int(count):
            gpus[product] = gpus.get(product, 0) + int(count)
    return tuple(GpuGroup(product, count) for product, count in gpus.items()), frozenset(others)


class SlurmNodes:
    """The nodes that a text of Slurm states, its faults, and the generic resources in it that were not read."""

    def __init__(self, text: Text, command: str) -> None:
        self.nodes: dict[str, Node] = {}
        self.faults = Faults(text.path)
        self._path, self._command = text.path, command
        self._others: set[str] = set()

    def node(self, line: Line, gres: str, features: str, state: str, *, configured: bool = False) -> Node:
        """The node that a line describes. Raises InputError."""
        gpus, others = read_gres(line, gres)
        self._others |= others
        return Node(gpus, None if features in NONE else features, outage(state, configured=configured))

    def add(self, line: Line, names: Iterable[str], node: Node) -> None:
        """Add the nodes called `names`, which may appear again if they are equal. Raises InputError."""
        for name in names:
            if self.nodes.setdefault(name, node) != node:  # a node appears once per partition
                line.refuse("appears above with another GRES, state or features; keep one", name)

    def inventory(self, notes: Iterable[str] = ()) -> Inventory:
        """All nodes. Raises InputError with all faults of the text, or if it names no node."""
        self.faults.refuse()
        if not self.nodes:
            raise InputError(f"{self._path}: names no node; write it with {self._command}")
        unread = [f"not read: GRES {', '.join(sorted(self._others))}"] if self._others else []
        return Inventory(self.nodes, (*notes, *unread))

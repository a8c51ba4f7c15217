"""The GPUs of nodes from Slurm's gres.conf: `NodeName=n[1-4] Name=gpu Type=a100 File=/dev/nvidia[0-7]`."""

import re
from collections import defaultdict

from hexiopt.discovery.gres import MOST_GPUS
from hexiopt.discovery.inventory import GpuGroup, Inventory, Node
from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.discovery.slurm import COMMAND, logical_lines
from hexiopt.errors import InputError
from hexiopt.problem.nodelist import expand

_HARMLESS = {"cores", "cpus", "flags", "links"}
_READ = {"nodename", "name", "type", "file", "multiplefiles", "count", "autodetect"}


def read_gres_conf(text: Text) -> Inventory:
    """The GPUs of the nodes that the lines name. Raises InputError with file and lines.

    A line without NodeName= holds for every node that reads the file, and no line says which these are: it becomes a
    note or, if no line names a node, an error.
    """
    gpus: defaultdict[str, dict[str | None, int]] = defaultdict(dict)
    notes: dict[str, None] = {}
    faults = Faults(text.path)
    for line in logical_lines(text):
        with faults.collect():
            pairs = dict(_pair(line, word) for word in line.text.split())
            unread = [key for key in pairs if key not in _READ | _HARMLESS]
            if unread:
                notes |= {f"not read: {', '.join(unread)}": None}
            if pairs.get("autodetect", "off").lower() not in ("off", "none") and "name" not in pairs:
                notes |= {f"AutoDetect={pairs['autodetect']}: the nodes find GPUs themselves; {COMMAND} has all": None}
            if pairs.get("name", "").lower() != "gpu":
                continue
            kind, count = pairs.get("type"), _count(line, pairs)
            if "nodename" not in pairs:
                what = f"{count} × {kind or 'gpu'}"
                notes |= {f"not read: line {line.number} ({what}), which names no node; {COMMAND} has all": None}
                continue
            for name in line.names(pairs["nodename"]):
                gpus[name][kind] = gpus[name].get(kind, 0) + count
    faults.refuse()
    if not gpus:
        raise InputError(f"{text.path}: is gres.conf, and no line of it states GPUs of a NodeName; give {COMMAND}")
    nodes = {name: Node(tuple(GpuGroup(kind, n) for kind, n in kinds.items())) for name, kinds in gpus.items()}
    return Inventory(nodes, tuple(notes))


def _pair(line: Line, word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        line.refuse("is not KEY=VALUE; write, for example, Name=gpu Type=a100 File=/dev/nvidia[0-7]", word)
    return key.lower(), value


def _count(line: Line, pairs: dict[str, str]) -> int:
    """The number of GPUs of a line: its Count, or the number of its files; both must agree."""
    counts = []
    if "count" in pairs:
        if not re.fullmatch(r"[0-9]{1,4}", pairs["count"]):
            line.refuse(f"is not a number up to {MOST_GPUS}; write Count=8", pairs["count"])
        counts.append(int(pairs["count"]))
    if "file" in pairs:
        try:
            counts.append(len(expand(pairs["file"])))
        except ValueError as error:
            line.refuse(str(error), pairs["file"])
    if not counts:
        counts = [1]
    if len({*counts}) > 1:
        line.refuse(f"has Count={counts[0]} and {counts[1]} files; correct one")
    if counts[0] > MOST_GPUS:
        line.refuse(f"has {counts[0]:,} GPUs; a node has up to {MOST_GPUS:,}")
    return counts[0]

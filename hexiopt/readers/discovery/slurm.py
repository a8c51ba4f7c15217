"""Nodes and their GPUs from Slurm: `scontrol show node` (in blocks or with -o), lines of slurm.conf, and
`sinfo -N -o "%N %G"`."""

import re

from hexiopt.errors import InputError
from hexiopt.problem.nodelist import expand
from hexiopt.readers.discovery.lines import Line, read_lines

Gres = tuple[tuple[str | None, int], ...]  # Slurm's name of the GPU type (None: not stated), and the number of GPUs

_NODE = re.compile(r"(?:^|\s)NodeName=(\S+)")
_GRES = re.compile(r"(?:^|\s)Gres=(\S+)")
_FEATURES = re.compile(r"(?:^|\s)(?:AvailableFeatures|Features?)=(\S+)")
_SOCKETS = re.compile(r"\((?:S|IDX):[^()]*\)")
_NONE = ("(null)", "N/A", "none")
_MOST_GPUS = 1024
_COMMANDS = "scontrol show node, or sinfo -N -o '%N %G'"


def read_features(path: str) -> dict[str, str]:
    """The features of every node that states some, as scontrol and slurm.conf write them."""
    features: dict[str, str] = {}
    names: list[str] = []
    for line in read_lines(path):
        if node := _NODE.search(line.text):
            names = _names(line, node[1])
        if (stated := _FEATURES.search(line.text)) and stated[1] not in _NONE:
            features |= dict.fromkeys(names, stated[1])
    return features


def read_slurm(path: str) -> dict[str, Gres]:
    """The GPUs of every node in the order of the text, () where it has none. Raises InputError with file and line."""
    lines = list(read_lines(path))
    nodes = _from_scontrol(lines) if any(_NODE.search(line.text) for line in lines) else _from_sinfo(lines)
    if not nodes:
        raise InputError(f"{path}: names no node; write it with {_COMMANDS}")
    return nodes


def _from_scontrol(lines: list[Line]) -> dict[str, Gres]:
    nodes: dict[str, Gres] = {}
    names: list[str] = []
    for line in lines:
        node, gres = _NODE.search(line.text), _GRES.search(line.text)
        if node is not None:
            names = [name for name in _names(line, node[1]) if name != "DEFAULT"]
            for name in names:
                if name in nodes:
                    line.refuse("is a node that appears twice; keep one", name)
                nodes[name] = ()
        if gres is not None:
            if not nodes:
                line.refuse(f"belongs to no node; write it with {_COMMANDS}", gres[0].strip())
            nodes |= dict.fromkeys(names, gpus_of(line, gres[1]))
    return nodes


def _from_sinfo(lines: list[Line]) -> dict[str, Gres]:
    nodes: dict[str, Gres] = {}
    at = (0, 1)
    for k, line in enumerate(lines):
        words = line.text.split()
        if k == 0 and "GRES" in words:
            node = next((n for n, word in enumerate(words) if word in ("NODELIST", "HOSTNAMES", "NODES")), 0)
            at = node, words.index("GRES")
            continue
        if len(words) <= max(at):
            line.refuse(f"is not a node and its GRES; write it with {_COMMANDS}")
        found = gpus_of(line, words[at[1]])
        for name in _names(line, words[at[0]]):
            if nodes.setdefault(name, found) != found:  # a node appears once per partition
                line.refuse("appears above with another GRES; keep one", name)
    return nodes


def _names(line: Line, text: str) -> list[str]:
    try:
        return [line.name(name) for name in expand(text)]
    except InputError:
        raise
    except ValueError as error:
        line.refuse(str(error), text)


def gpus_of(line: Line, gres: str) -> Gres:
    """The GPUs of a GRES text such as `gpu:a100:8(S:0-1),nvme:1`: name[:type][:no_consume][:count]."""
    gpus: dict[str | None, int] = {}
    for entry in [] if gres in _NONE else _SOCKETS.sub("", gres).split(","):
        name, *words = entry.split(":")
        if not name or "" in words or re.search(r"[()\s]", entry):
            line.refuse("is not a GRES; write, for example, gpu:a100:8(S:0-1)", entry)
        if name != "gpu":
            continue
        words = [word for word in words if word != "no_consume"]
        count = words.pop() if words and re.fullmatch(r"[0-9]+", words[-1]) else "1"
        if len(words) > 1 or len(count) > 4 or int(count) > _MOST_GPUS:
            line.refuse(f"is not a GRES of up to {_MOST_GPUS} GPUs; write, for example, gpu:a100:8", entry)
        kind = words[0] if words else None
        if int(count):
            gpus[kind] = gpus.get(kind, 0) + int(count)
    return tuple(gpus.items())

"""Nodes and their GPUs from Slurm's records of nodes: `scontrol show node` (in blocks or with -o) and slurm.conf."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hexiopt.discovery.gres import SlurmNodes, outage
from hexiopt.discovery.inventory import Inventory, Node
from hexiopt.discovery.lines import Line, Text
from hexiopt.ledger import Ledger, Vocabulary, words

COMMAND = "scontrol show node"
_KEY = re.compile(r"(?:^|(?<=\s))([A-Za-z_]+)=")
_FREE = ("reason", "comment", "extra")  # whose values may have blanks and equals signs
_TRES = re.compile(r"(?:^|,)gres/gpu=([0-9]+)")
_READ = ("nodename", "gres", "availablefeatures", "features", "feature", "state", "cfgtres")
# Of `scontrol show node` and of NodeName= in `man slurm.conf`, in lower case: nothing about which GPUs a node has.
_VOCABULARY = Vocabulary(
    harmless=words("""
        activefeatures alloccpus allocmem alloctres arch avewatts bcastaddr boards boottime capwatts comment
        consumedjoules corespeccount corespersocket cpualloc cpubind cpuefctv cpuload cpus cpuspeclist cputot
        currentwatts extra extsensorsjoules extsensorstemp extsensorswatts freemem gresdrain gresused instanceid
        instancetype lastbusytime lowestjoules mcs_label memspeclimit nextstate nodeaddr nodehostname os owner
        parameters partitions port procs realmemory reason reservationname restrictedcorespergpu resumeaftertime
        slurmdstarttime sockets socketsperboard threadspercore tmpdisk topology version weight
    """)
)


@dataclass
class _Record:
    """The keys of a node's record, in lower case, and the line of each."""

    head: Line
    values: dict[str, str] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)


def is_scontrol(text: Text) -> bool:
    """Whether the text has the records that `scontrol show node` prints, by its keys or by records of several lines."""
    keys = text.has(r"(?i)\b(CPUAlloc|CPUTot|NodeHostName|CfgTRES|Arch|AllocTRES)=")
    return text.has(r"(?i)^\s*NodeName=") and (keys or (text.has(r"^[ \t]+\w+=") and not text.has(r"\\[ \t]*$")))


def read_scontrol(text: Text) -> Inventory:
    """The nodes of the records, each of one or several lines. Raises InputError with file and lines."""
    records: list[_Record] = []
    nodes = SlurmNodes(text, COMMAND)
    for line in text.lines:
        with nodes.faults.collect():
            if line.text.lstrip().startswith("#"):
                continue
            pairs = dict(_pairs(line.text))
            if "nodename" in pairs:
                records.append(_Record(line))
            elif "gres" in pairs and not records:
                line.refuse(f"belongs to no node; write it with {COMMAND}", f"Gres={pairs['gres']}")
            if records:
                records[-1].values |= pairs
                records[-1].lines |= dict.fromkeys(pairs, line)
    return _inventory(records, nodes, configured=False)


def read_slurm_conf(text: Text) -> Inventory:
    """The nodes of a configuration, with comments, continued lines and defaults (NodeName=DEFAULT) for lines below.

    Raises InputError with file and lines.
    """
    records: list[_Record] = []
    defaults: dict[str, str] = {}
    down: list[tuple[Line, str, str]] = []
    notes: list[str] = []
    nodes = SlurmNodes(text, COMMAND)
    for line in logical_lines(text):
        if re.match(r"(?i)\s*include\s", line.text):
            notes.append(f"not read: {line.text.strip()}")
        pairs = dict(_pairs(line.text))
        if pairs.get("nodename") == "DEFAULT":
            defaults |= pairs
        elif "nodename" in pairs:
            values = {**defaults, **pairs}
            records.append(_Record(line, values, dict.fromkeys(values, line)))
        elif "downnodes" in pairs:
            down.append((line, pairs["downnodes"], pairs.get("state", "DOWN")))
        elif "gres" in pairs:
            with nodes.faults.collect():
                line.refuse("states Gres of no node; write NodeName= on the same line")
    inventory = _inventory(records, nodes, configured=True)
    for line, names, state in down:
        with nodes.faults.collect():
            for name in line.names(names):
                if name in nodes.nodes:
                    nodes.nodes[name] = replace(nodes.nodes[name], outage=outage(state))
    nodes.faults.refuse()
    return replace(inventory, notes=(*notes, *inventory.notes))


def logical_lines(text: Text) -> Iterator[Line]:
    """The lines of a Slurm configuration, continued ones joined, without comments."""
    started: Line | None = None
    for line in text.lines:
        plain = re.sub(r"(?<!\\)#.*", "", line.text).rstrip()
        whole = plain if started is None else f"{started.text} {plain.lstrip()}"
        head = line if started is None else started
        if whole.endswith("\\"):
            started = replace(head, text=whole[:-1])
            continue
        started = None
        if whole.strip():
            yield replace(head, text=whole)
    if started is not None and started.text.strip():
        yield started


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The keys of a line in lower case, and their values; free text ends with its quotes or with the line."""
    start = 0
    while (key := _KEY.search(text, start)) is not None:
        name, rest = key[1].lower(), text[key.end() :]
        if rest.startswith('"') and '"' in rest[1:]:
            value = rest[1 : rest.index('"', 1)]
            start = key.end() + len(value) + 2
        elif name in _FREE:
            value, start = rest, len(text)
        else:
            following = _KEY.search(text, key.end())
            start = len(text) if following is None else following.start()
            value = text[key.end() : start].strip()
        yield name, value


def _inventory(records: list[_Record], nodes: SlurmNodes, *, configured: bool) -> Inventory:
    unread: dict[str, None] = {}
    for record in records:
        with nodes.faults.collect():
            names = record.head.names(record.values["nodename"])
            node, keys = _node(record, nodes, configured)
            unread |= dict.fromkeys(keys)
            if (twice := next((name for name in names if name in nodes.nodes), None)) is not None:
                record.head.refuse("is a node that appears twice; keep one", twice)
            nodes.add(record.head, names, node)
    return nodes.inventory([f"not read: {', '.join(unread)}"] if unread else [])


def _node(record: _Record, nodes: SlurmNodes, configured: bool) -> tuple[Node, list[str]]:
    """A record as a node, and the keys in it that were not read. Raises InputError."""
    ledger = Ledger(record.head.path, record.values, _VOCABULARY)
    gres, line = ledger.get("gres", "(null)"), record.lines.get("gres", record.head)
    features = next((ledger[key] for key in ("availablefeatures", "features", "feature") if key in ledger), "(null)")
    node = nodes.node(line, gres, features, ledger.get("state", ""), configured=configured)
    counted = _TRES.search(ledger.get("cfgtres", ""))
    if counted is not None and int(counted[1]) != node.num_gpus:
        rule = f"states gres/gpu={counted[1]}, and Gres={gres} has {node.num_gpus}; write it again with {COMMAND}"
        record.lines["cfgtres"].refuse(rule, record.values["nodename"])
    return node, [key for key in ledger.unread() if key not in _READ]

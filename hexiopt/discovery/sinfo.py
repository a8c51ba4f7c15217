"""Nodes and their GPUs from the tables of Slurm's sinfo, read by their header."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from hexiopt.discovery.gres import NONE, SlurmNodes, is_state
from hexiopt.discovery.inventory import Inventory
from hexiopt.discovery.lines import Line, Text
from hexiopt.errors import InputError
from hexiopt.ledger import words

COMMAND = "sinfo -N -o '%N %G %t'"
_NODES, _GRES, _STATE, _COUNT, _FEATURES = "NODELIST", "GRES", "STATE", "NODES", "FEATURES"
_READ = {
    "NODELIST": _NODES,
    "HOSTNAMES": _NODES,
    "GRES": _GRES,
    "STATE": _STATE,
    "NODES": _COUNT,
    "AVAIL_FEATURES": _FEATURES,
    "FEATURES": _FEATURES,
    "PARTITION": "PARTITION",
}
# Columns of `man sinfo` that say nothing about a node's GPUs, by their headers for -o and -O.
_HARMLESS = words("""
    AVAIL ACTIVE_FEATURES ALLOCMEM ALLOCNODES CLUSTER COMMENT CORES CPU_LOAD CPUS CPUS(A/I/O/T) EXTRA FREE_MEM GRES_USED
    GROUPS JOB_SIZE MAX_CPUS_PER_NODE MEMORY NODE_ADDR NODES(A/I) NODES(A/I/O/T) OVERSUBSCRIBE PORT PREEMPT_MODE
    PRIO_JOB_FACTOR PRIO_TIER PRIORITY REASON ROOT S:C:T SHARE SIZE SOCKETS THREADS TIMELIMIT TIMESTAMP TMP_DISK USER
    DEFAULTTIME NODEAI NODEAIOT VERSION WEIGHT
""")
_FREE = ("REASON", "COMMENT", "EXTRA", "TIMESTAMP", "USER")  # whose cells may have blanks


def is_sinfo(text: Text) -> bool:
    """Whether the text is a table of sinfo with its header."""
    return _is_header([text.first[slice(*span)] for span in _spans(text.first, "|" in text.first)])


def has_commas(text: Text) -> bool:
    """Whether the text is a table of sinfo whose columns are separated as nodes and GRES are themselves."""
    return _is_header(text.first.split(","))


def _is_header(words: Sequence[str]) -> bool:
    columns = {*words} & {*_READ, *_HARMLESS}
    return len(columns) > 1 and all(re.fullmatch(r"[A-Z][A-Z_:/()]*", word) for word in words)


def _spans(text: str, piped: bool) -> list[tuple[int, int]]:
    """The spans of the cells of a line, separated by blanks or by `|`."""
    return [match.span() for match in re.finditer(r"[^|\s](?:[^|]*[^|\s])?" if piped else r"\S+", text)]


def read_sinfo(text: Text) -> Inventory:
    """The nodes of a table with a header. Raises InputError with file and lines."""
    header, *rows = text.lines
    raw = text.content.splitlines()[header.number - 1]
    spans = tuple(_spans(raw, "|" in raw))
    columns = [raw[start:end] for start, end in spans]
    names = [_READ.get(column, column) for column in columns]
    missing = [name for name in (_NODES, _GRES) if name not in names]
    if missing:
        what = " and ".join(missing)
        raise InputError(f"{text.path}: is a table of sinfo without the column {what}; write it with {COMMAND}")
    twice = next((name for name in names if name in _READ.values() and names.count(name) > 1), None)
    if twice is not None:
        header.refuse(f"states the column {twice} twice; write it with {COMMAND}")
    inventory = _inventory(text, rows, partial(_cells, _Table(tuple(names), spans, len(raw), "|" in raw)))
    unread = [column for column in columns if column not in {*_READ, *_HARMLESS}]
    return replace(inventory, notes=(*([f"not read: {', '.join(unread)}"] if unread else []), *inventory.notes))


def is_headerless(text: Text) -> bool:
    """Whether each line consists of words, one of them a GRES, as `sinfo -h` prints them."""
    rows = [line.text.split() for line in text.lines]
    some = any(_is_certain_gres(word) for word in chain(*rows))
    return some and all(any(_is_gres(word) for word in row) for row in rows)


def read_headerless(text: Text) -> Inventory:
    """The nodes of a table without header, where only one reading is possible. Raises InputError."""
    rows = [line.text.split() for line in text.lines]
    why = None
    if len({len(row) for row in rows}) != 1:
        why = "its lines have different numbers of columns"
    else:
        columns = list(zip(*rows, strict=True))
        kinds = [_kind_of(column) for column in columns]
        if kinds.count(_GRES) != 1:
            why = "more than one column may be the GRES"
        elif kinds.count(_NODES) != 1 or kinds.count(_STATE) > 1 or _COUNT in kinds:
            why = "which column names the nodes is not certain"
    if why is not None:
        raise InputError(f"{text.path}: is a table of sinfo without header, and {why}; write it with {COMMAND}")
    return _inventory(text, text.lines, lambda line: dict(zip(kinds, line.text.split(), strict=True)))


def _kind_of(column: Sequence[str]) -> str:
    if all(map(_is_gres, column)) and any(map(_is_certain_gres, column)):
        return _GRES
    if all(map(is_state, column)):
        return _STATE
    return _COUNT if all(word.isdecimal() for word in column) else _NODES


def _is_gres(word: str) -> bool:
    return word in NONE or re.fullmatch(r"[a-z_]+(:[^\s]+)+", word) is not None


def _is_certain_gres(word: str) -> bool:
    """Whether a word is certainly a GRES, of GPUs or of none."""
    return word == "(null)" or re.match(r"(.*,)?gpu:", word) is not None


@dataclass(frozen=True)
class _Table:
    """The columns of a table, the spans of their names in the header, and the header's width with all blanks.

    `piped` tables have `|` between their cells.
    """

    columns: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    width: int
    piped: bool

    def fills(self, k: int, cell: tuple[int, int]) -> bool:
        """Whether a cell fills its column, so that it may be cut, if the header is padded to a fixed width."""
        if self.piped:
            return False
        start, end = self.spans[k]
        last = k + 1 == len(self.spans)
        after = self.width + 1 if last else self.spans[k + 1][0]
        before = self.spans[k - 1][1] if k else -1
        padded_right, padded_left = after - end > 1, start - before > 1
        from_left = padded_right and cell[0] == start and cell[1] >= after - 1
        return from_left or (padded_left and cell[1] == end and cell[0] <= before + 1)


def _cells(table: _Table, line: Line) -> dict[str, str] | None:
    """The cells of a row by column; None for a partition without nodes. Raises InputError."""
    spans = _spans(line.text, table.piped)
    columns, count = table.columns, len(table.columns)
    texts = [line.text[start:end] for start, end in spans]
    if len(spans) == count - 1 and columns[-1] == _NODES and dict(zip(columns, texts, strict=False)).get(_COUNT) == "0":
        return None
    free = next((k for k, column in enumerate(columns) if column in _FREE), None)
    if free is not None and len(spans) >= count:
        end = len(spans) - (count - free - 1)
        spans = [*spans[:free], (spans[free][0], spans[end - 1][1]), *spans[end:]]
    if len(spans) != count:
        line.refuse(f"has {len(spans)} columns, the header {count}; write it with {COMMAND}")
    cells = dict(zip(columns, (line.text[start:end] for start, end in spans), strict=True))
    for k, name in enumerate(columns):
        if name in (_NODES, _GRES, _FEATURES) and table.fills(k, spans[k]):
            line.refuse(f"fills its column and may be cut; write it with {COMMAND}", cells[name])
    return cells


def _inventory(text: Text, rows: Iterable[Line], cells_of: Callable[[Line], Mapping[str, str] | None]) -> Inventory:
    nodes = SlurmNodes(text, COMMAND)
    for line in rows:
        with nodes.faults.collect():
            cells = cells_of(line)
            if cells is None:
                continue
            names, count = line.names(cells[_NODES]), cells.get(_COUNT)
            if count is not None and count != str(len(names)):
                line.refuse(f"lists {len(names)} nodes, and its column NODES states {count}; write it with {COMMAND}")
            node = nodes.node(line, cells[_GRES], cells.get(_FEATURES, "(null)"), cells.get(_STATE, ""))
            nodes.add(line, names, node)
    return nodes.inventory()

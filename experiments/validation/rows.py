"""The rows of a file of measured training runs, one run per row, as stated; a blank is None."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from experiments.validation.metric_names import MFU, metric_named
from hexiopt.errors import InputError, did_you_mean
from hexiopt.reading import read_text

MAX_BYTES = 2**24
_MOST_WHOLE, _MOST = 2**27, 1e18
_WHOLE = (
    *("gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len"),
    *("global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp"),
)
_REAL = ("gpu_mem_gb", "inter_node_link_gbps")


@dataclass(frozen=True)
class Row:
    """One measured run. Fields are named for the file's columns; `line` is its line in the file, `others` are its cells
    of further columns. The metric is the one that the file's name stands for, the value in its unit."""

    line: int
    source: str
    source_path_or_url: str
    gpu: str
    gpu_mem_gb: float | None
    gpus: int | None
    gpus_per_node: int | None
    intra_node_link: str
    inter_node_link_gbps: float | None
    model_name: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn_hidden: int | None
    vocab: int | None
    seq_len: int | None
    global_batch: int | None
    micro_batch: int | None
    tp: int | None
    pp: int | None
    dp: int | None
    vpp: int | None
    cp: int | None
    zero_stage_or_fsdp: str
    recompute: str
    precision: str
    metric: str
    value: float
    notes: str
    others: Mapping[str, str] = field(default_factory=dict, hash=False)

    def note(self, key: str) -> str | None:
        """The text after `key=`, or after `key ` before a bracket, in the notes; None where the key is absent."""
        match = re.search(rf"(?:^|;)\s*{re.escape(key)}\s*(?:=\s*|(?=\[))([^;]*)", self.notes)
        return match[1].strip() if match else None

    def says(self, *words: str) -> bool:
        """Whether the notes contain one of `words`, ignoring case."""
        return any(word.lower() in self.notes.lower() for word in words)


_COLUMNS = tuple(field.name for field in fields(Row) if field.name not in ("line", "others"))
_MOST_FAULTS = 20  # that one message names


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, in order. Raises InputError naming all lines and columns that break a rule."""
    reader = csv.DictReader(io.StringIO(read_text(path, max_bytes=MAX_BYTES)), strict=True)
    faults: list[str] = []
    try:
        header = reader.fieldnames
        if not header:
            raise InputError(f"{path}: is empty; its first line must name the columns {', '.join(_COLUMNS[:3])}, ...")
        missing = [
            f"the column {name!r} is missing; {did_you_mean(name, header)}" for name in _COLUMNS if name not in header
        ]
        if missing:
            raise InputError(f"{path}: {'; also '.join(missing)}")
        rows = [_row(reader.line_num, cells, faults) for cells in reader]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: malformed CSV ({error}); correct the file") from None
    if not rows:
        raise InputError(f"{path}: has no rows; add one for each measured run")
    if faults:
        more = [f"{len(faults) - _MOST_FAULTS:,} more"] if len(faults) > _MOST_FAULTS else []
        raise InputError(f"{path}, {'; also '.join(faults[:_MOST_FAULTS] + more)}")
    return [row for row in rows if row is not None]


def _row(line: int, cells: dict[str, str | None], faults: list[str]) -> Row | None:
    """The row of a line; where it breaks a rule, None, and what is wrong joins `faults`."""
    values: dict[str, str | int | float | None] = {}
    known = len(faults)
    for name in _COLUMNS:
        text = (cells[name] or "").strip()
        values[name] = text
        if name in _WHOLE or name in _REAL or name == "value":
            values[name] = None
            if text or name == "value":
                try:
                    values[name] = _number(text, whole=name in _WHOLE)
                except ValueError as error:
                    faults.append(f"line {line}: {name}: {error}")
    metric, value = metric_named(str(values["metric"])), values["value"]
    if isinstance(metric, str):
        faults.append(f"line {line}: metric: {values['metric']!r} {metric}")
    elif isinstance(value, int | float):
        values |= {"metric": metric.metric, "value": metric.factor * value}
        if metric.metric == MFU and not 1.0 < metric.factor * value <= 100.0:
            faults.append(
                f"line {line}: mfu: {value:g} is no percentage above 1; write percent, or the metric mfu_fraction"
            )
    if None in cells:
        faults.append(f"line {line}: has more cells than the header; put quotes around cells with commas")
    if len(faults) > known:
        return None
    others = {name: (text or "").strip() for name, text in cells.items() if name not in _COLUMNS}
    return Row(line=line, **values, others=others)  # type: ignore[arg-type]


def _number(text: str, *, whole: bool = False) -> float:
    """Raises ValueError with what is wrong."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < (_MOST_WHOLE if whole else _MOST):
        kind = f"a whole number from 1 to {_MOST_WHOLE:,}" if whole else "a number above 0"
        raise ValueError(f"{text!r} is not {kind}; correct it, or leave it blank")
    return value

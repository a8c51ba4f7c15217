"""The rows of a file of measured training runs, one run per row, as stated; a blank is None."""

import csv
import io
import re
from dataclasses import dataclass, fields
from pathlib import Path

from hexiopt.errors import InputError, did_you_mean
from hexiopt.reading import read_text

METRICS = ("tokens_per_s_per_gpu", "iter_time_s", "tflops_per_gpu", "mfu")
MAX_BYTES = 2**24
_MOST_WHOLE, _MOST = 2**27, 1e18
_WHOLE = (
    *("gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len"),
    *("global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp"),
)
_REAL = ("gpu_mem_gb", "inter_node_link_gbps")


@dataclass(frozen=True)
class Row:
    """One measured run. Fields are named for the file's columns; `line` is its line in the file."""

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

    def note(self, key: str) -> str | None:
        """The text after `key=`, or after `key ` before a bracket, in the notes; None where the key is absent."""
        found = re.search(rf"(?:^|;)\s*{re.escape(key)}\s*(?:=\s*|(?=\[))([^;]*)", self.notes)
        return found[1].strip() if found else None

    def says(self, *words: str) -> bool:
        """Whether the notes contain one of `words`, ignoring case."""
        return any(word.lower() in self.notes.lower() for word in words)


_COLUMNS = tuple(field.name for field in fields(Row) if field.name != "line")


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, in order. Raises InputError naming the line and column that break a rule."""
    reader = csv.DictReader(io.StringIO(read_text(path, max_bytes=MAX_BYTES)), strict=True)
    try:
        header = reader.fieldnames
        if not header:
            raise InputError(f"{path}: is empty; its first line must name the columns {', '.join(_COLUMNS[:3])}, ...")
        for name in _COLUMNS:
            if name not in header:
                raise InputError(f"{path}: the column {name!r} is missing; {did_you_mean(name, header)}")
        rows = [_row(path, reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: malformed CSV ({error}); correct the file") from None
    if not rows:
        raise InputError(f"{path}: has no rows; add one for each measured run")
    return rows


def _row(path: Path, line: int, cells: dict[str, str | None]) -> Row:
    values: dict[str, str | int | float | None] = {}
    for name in _COLUMNS:
        text = (cells[name] or "").strip()
        where = f"{path}, line {line}: {name}"
        if name in _WHOLE:
            values[name] = _number(where, text, whole=True) if text else None
        elif name in _REAL:
            values[name] = _number(where, text) if text else None
        elif name == "value":
            values[name] = _number(where, text)
        else:
            values[name] = text
    if values["metric"] not in METRICS:
        raise InputError(f"{path}, line {line}: metric: {values['metric']!r} is not known; write {', '.join(METRICS)}")
    if None in cells:
        raise InputError(f"{path}, line {line}: has more cells than the header; put quotes around cells with commas")
    return Row(line=line, **values)  # type: ignore[arg-type]


def _number(where: str, text: str, *, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < (_MOST_WHOLE if whole else _MOST):
        kind = f"a whole number from 1 to {_MOST_WHOLE:,}" if whole else "a number above 0"
        raise InputError(f"{where}: {text!r} is not {kind}; correct it, or leave it blank")
    return value

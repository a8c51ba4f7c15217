"""The GPUs of a machine from its driver's tool: nvidia-smi, `--query-gpu=index,name,memory.total,... --format=csv` or
`-L`; or AMD's, `rocm-smi --showproductname --showmeminfo vram`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.errors import InputError
from hexiopt.ledger import Vocabulary, words
from hexiopt.numbers.products import fits_some_type

QUERY = "nvidia-smi --query-gpu=index,name,memory.total --format=csv"
_ALIASES = {"gpu_name": "name"}
_READ = (
    "index",
    "name",
    "memory.total",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "mig.mode.current",
    "fabric.clusterUuid",
    "fabric.cliqueId",
)
# Of `nvidia-smi --help-query-gpu`: nothing about which GPU it is, or what another column states better.
_VOCABULARY = Vocabulary(
    harmless=words("""
        accounting.* addressing_mode c2c.* clocks.* clocks_event_reasons.* clocks_throttle_reasons.* compute_cap
        compute_mode count display_active display_attached display_mode dramEncryption.* driver_model.* driver_version
        ecc.* encoder.* fabric.* fan.speed gom.* gpu_bus_id gpu_recovery_action gpu_serial gpu_uuid gsp.mode.*
        hostname inforom.* memory.free memory.reserved memory.used mig.mode.pending module.id pci.* pcie.link.gen.*
        pcie.link.width.* persistence_mode platform.* power.* protected_memory.* pstate remapped_rows.*
        reset_status.* retired_pages.* serial temperature.* timestamp utilization.* uuid vbios_version vgpu_*
    """)
)
_UNKNOWN = re.compile(r"\[.*\]|N/A|ERR!", re.IGNORECASE)  # [N/A], [Not Supported], [Unknown Error]
_LISTED = re.compile(r"GPU (\d{1,4}): (.+?) \(UUID: .*\)")
_LISTED_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: .*\)")
_PRODUCT = re.compile(r"\b(NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID|RTX|GTX)\b|[A-Z]+[0-9]+")
_MIB = 2**20
_MOST_MIB = 4096 * 1024
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU as the driver reports it; None marks what it does not report.

    GPUs that NVLink switches join, also of several machines, have the same `fabric` (the columns fabric.clusterUuid and
    fabric.cliqueId). `slices` are the profiles of MIG slices, such as 3g.20gb; an `is_sliced` GPU is in MIG mode.
    """

    index: int
    name: str
    memory_bytes: int | None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    fabric: str | None = None
    is_sliced: bool = False
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class SmiGpus:
    """The GPUs of a machine by index, from 0 without gaps, and notes on what was not read."""

    gpus: tuple[SmiGpu, ...]
    notes: tuple[str, ...] = ()


def is_table(text: Text) -> bool:
    """Whether the text is CSV with a header of --query-gpu."""
    cells = _header_cells(text.first)
    return cells == ["name"] or (len(cells) > 1 and not {*cells}.isdisjoint({"name", "memory.total", "index", "uuid"}))


def is_headerless(text: Text) -> bool:
    """Whether each line is CSV with the name of a product, as `--format=csv,noheader` prints it."""
    rows = [[cell.strip() for cell in line.text.split(",")] for line in text.lines]
    return bool(rows) and all(len(row) > 1 and any(_is_product(cell) for cell in row) for row in rows)


def is_list(text: Text) -> bool:
    """Whether the text is the output of nvidia-smi -L."""
    return _LISTED.fullmatch(text.first) is not None


def read_table(text: Text) -> SmiGpus:
    """The GPUs of a table with header, columns in any order, with units or `nounits`. Raises InputError with lines."""
    header, *rows = text.lines
    columns = _header_cells(header.text)
    if "name" not in columns:
        header.refuse(f"is a header without name; write it with {QUERY}")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        header.refuse("is a column that appears twice; keep one", twice)
    unread = [name for name in columns if name not in _READ and not _VOCABULARY.is_harmless(name)]
    notes = (f"not read: {', '.join(unread)}",) if unread else ()
    return _gpus(text, rows, columns, notes)


def read_headerless(text: Text) -> SmiGpus:
    """The GPUs of a table without header: index, name, and memory if only one column can be that.

    Raises InputError with file and line.
    """
    rows = [[cell.strip() for cell in line.text.split(",")] for line in text.lines]
    if len({len(row) for row in rows}) > 1:
        raise InputError(f"{text.path}: has no header, and lines of different lengths; write it with {QUERY}")
    columns = list(zip(*rows, strict=True))
    products = [k for k, column in enumerate(columns) if all(map(_is_product, column))]
    if len(products) != 1:
        raise InputError(
            f"{text.path}: has no header, and which column is the name is not certain; write it with {QUERY}"
        )
    names = [f"column {k + 1}" for k in range(len(columns))]
    names[products[0]] = "name"
    counted = [str(k) for k in range(len(rows))]
    index = next((k for k, column in enumerate(columns) if list(column) == counted), None)
    if index is not None:
        names[index] = "index"
    memory = [k for k, column in enumerate(columns) if k != index and _may_be_memory(columns[products[0]], column)]
    if len(memory) == 1:
        names[memory[0]] = "memory.total"
    unread = [name for name in names if name.startswith("column")]
    notes = (f"not read: {', '.join(unread)} of a table without header",) if unread else ()
    return _gpus(text, list(text.lines), names, notes)


def read_list(text: Text) -> SmiGpus:
    """The GPUs of `nvidia-smi -L`, with the MIG slices below each; it states no memory. Raises InputError."""
    gpus: list[SmiGpu] = []
    for line in text.lines:
        if (gpu_line := _LISTED.fullmatch(line.text)) is not None:
            gpus.append(SmiGpu(int(gpu_line[1]), gpu_line[2], None))
        elif gpus and (slice_ := _LISTED_SLICE.fullmatch(line.text)) is not None:
            gpus[-1] = replace(gpus[-1], is_sliced=True, slices=(*gpus[-1].slices, slice_[1]))
        else:
            line.refuse("is no line of nvidia-smi -L; write it again")
    return SmiGpus(_in_order(text, {gpu.index: gpu for gpu in gpus}))


def _header_cells(text: str) -> list[str]:
    cells = [re.sub(r"\s*\[.*\]$", "", cell.strip()) for cell in text.split(",")]
    return [_ALIASES.get(cell, cell) for cell in cells]


def _is_product(cell: str) -> bool:
    looks_like_one = _PRODUCT.search(cell) is not None and not re.fullmatch(r"[0-9A-Fa-f:.-]+|GPU-.*|MIG-.*|P\d+", cell)
    return looks_like_one and not re.search(r"\d (MiB|W|%|MHz)$", cell)


def _may_be_memory(names: Sequence[str], column: Sequence[str]) -> bool:
    """Whether every cell is a memory that a product of its row's name has, rather than memory in use."""
    cells = [re.fullmatch(r"(\d{1,9})( MiB)?", cell) for cell in column]
    return all(
        cell is not None and fits_some_type(name, int(cell[1]) * _MIB) for name, cell in zip(names, cells, strict=True)
    )


def _gpus(text: Text, rows: Sequence[Line], columns: Sequence[str], notes: tuple[str, ...]) -> SmiGpus:
    gpus: dict[int, SmiGpu] = {}
    faults = Faults(text.path)
    for k, line in enumerate(rows):
        with faults.collect():
            cells = [cell.strip() for cell in line.text.split(",")]
            if len(cells) != len(columns):
                line.refuse(f"has {len(cells)} columns, the header {len(columns)}; write it with {QUERY}")
            gpu = _gpu(line, {"index": str(k)} | dict(zip(columns, cells, strict=True)))
            if gpu.index in gpus:
                line.refuse("is an index that appears twice; give the output of one machine", str(gpu.index))
            gpus[gpu.index] = gpu
    faults.refuse()
    if not gpus:
        raise InputError(f"{text.path}: names no GPU below its header; write it with {QUERY}")
    return SmiGpus(_in_order(text, gpus), notes)


def _in_order(text: Text, gpus: Mapping[int, SmiGpu]) -> tuple[SmiGpu, ...]:
    if sorted(gpus) != list(range(len(gpus))):
        raise InputError(
            f"{text.path}: has the indices {sorted(gpus)}; give all GPUs of a machine, from 0 without gaps"
        )
    return tuple(gpus[index] for index in sorted(gpus))


def _gpu(line: Line, cells: Mapping[str, str]) -> SmiGpu:
    index = _whole(line, cells["index"], "", 0, _MOST_GPUS - 1)
    if index is None:
        line.refuse("is not an index; write the GPU's number", cells["index"])
    name = cells["name"]
    if not name or len(name) > 100 or not name.isprintable() or _UNKNOWN.fullmatch(name):
        line.refuse("is not a GPU's name; query it again", name)
    memory_mib = _whole(line, cells.get("memory.total", "N/A"), "MiB", 1, _MOST_MIB)
    return SmiGpu(
        index=index,
        name=name,
        memory_bytes=None if memory_mib is None else memory_mib * _MIB,
        pcie_gen=_whole(line, cells.get("pcie.link.gen.max", "N/A"), "", 1, 9),
        pcie_width=_whole(line, cells.get("pcie.link.width.max", "N/A"), "", 1, 64),
        fabric=_fabric(cells),
        is_sliced=cells.get("mig.mode.current") == "Enabled",
    )


def _fabric(cells: Mapping[str, str]) -> str | None:
    """The fabric of a GPU; None for zeros, which the driver writes if the switches join one machine only."""
    cluster, clique = cells.get("fabric.clusterUuid", ""), cells.get("fabric.cliqueId", "")
    is_set = set(cluster) - set("0-") and not _UNKNOWN.fullmatch(cluster) and not _UNKNOWN.fullmatch(clique)
    return f"{cluster}.{clique}" if is_set else None


def _whole(line: Line, cell: str, unit: str, least: int, most: int) -> int | None:
    """The whole number in a cell, with or without its unit; None if the driver does not report it."""
    if _UNKNOWN.fullmatch(cell):
        return None
    digits = cell.removesuffix(unit).strip() if unit else cell
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not least <= int(digits) <= most:
        within = f"{least} to {most}{' ' + unit if unit else ''}"
        line.refuse(f"is not a whole number from {within}; query it again", cell)
    return int(digits)


# ------------------------------------------------------------------ of AMD

ROCM_COMMAND = "rocm-smi --showproductname --showmeminfo vram"
ROCM_BANNER = "ROCm System Management Interface"
_ROCM_LINE = re.compile(r"GPU\[(\d{1,4})\]\s*:\s*(Card series|Card Series|VRAM Total Memory \(B\)):\s*(.+)")


def read_rocm_smi(text: Text) -> SmiGpus:
    """The GPUs by index. Raises InputError."""
    names: dict[int, str] = {}
    memory: dict[int, int] = {}
    for line in text.lines:
        if (match := _ROCM_LINE.match(line.text)) is None:
            continue
        index, value = int(match[1]), match[3].strip()
        if match[2].lower() == "card series":
            names[index] = value
        elif value.isdecimal():
            memory[index] = int(value)
    if sorted(names) != list(range(len(names))):
        raise InputError(f"{text.path}: has the GPUs {sorted(names)}; give all of a machine, from 0 without gaps")
    return SmiGpus(tuple(SmiGpu(index, names[index], memory.get(index)) for index in sorted(names)))

"""The GPUs of a machine, from `nvidia-smi --query-gpu=index,name,memory.total,... --format=csv`."""

import re
from dataclasses import dataclass

from hexiopt.errors import InputError
from hexiopt.readers.discovery.lines import Line, read_lines

_QUERY = "nvidia-smi --query-gpu=index,name,memory.total --format=csv"
_REQUIRED = ("index", "name", "memory.total")
_UNKNOWN = re.compile(r"\[.*\]|N/A|ERR!", re.IGNORECASE)  # [N/A], [Not Supported], [Unknown Error]
_MIB = 2**20
_MOST_MIB = 4096 * 1024
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU as the driver reports it; None marks what it does not report.

    `fabric` is equal for GPUs, also of several machines, that NVLink switches join: the columns fabric.clusterUuid and
    fabric.cliqueId.
    """

    index: int
    name: str
    memory_bytes: int | None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    fabric: str | None = None


def read_nvidia_smi(path: str) -> tuple[SmiGpu, ...]:
    """The GPUs by index, from 0 without gaps.

    Columns may be in any order, others are ignored, and units may be absent (`nounits`). Raises InputError naming file
    and line.
    """
    lines = list(read_lines(path))
    if not lines:
        raise InputError(f"{path}: is empty; write it with {_QUERY}")
    columns = _columns(lines[0])
    gpus: dict[int, SmiGpu] = {}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.text.split(",")]
        if len(cells) != len(columns):
            line.refuse(f"has {len(cells)} columns, the header {len(columns)}; write it with {_QUERY}")
        gpu = _gpu(line, dict(zip(columns, cells, strict=True)))
        if gpu.index in gpus:
            line.refuse("is an index that appears twice; give the output of one machine", str(gpu.index))
        gpus[gpu.index] = gpu
    if not gpus:
        raise InputError(f"{path}: names no GPU below its header; write it with {_QUERY}")
    if sorted(gpus) != list(range(len(gpus))):
        raise InputError(f"{path}: has the indices {sorted(gpus)}; give all GPUs of a machine, from 0 without gaps")
    return tuple(gpus[index] for index in sorted(gpus))


def _columns(header: Line) -> list[str]:
    columns = [re.sub(r"\s*\[.*\]$", "", cell.strip()) for cell in header.text.split(",")]
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        header.refuse(f"is not a header with {', '.join(missing)}; write it with {_QUERY}")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        header.refuse("is a column that appears twice; keep one", twice)
    return columns


def _gpu(line: Line, cells: dict[str, str]) -> SmiGpu:
    index = _whole(line, cells["index"], "", 0, _MOST_GPUS - 1)
    if index is None:
        line.refuse("is not an index; write the GPU's number", cells["index"])
    name = cells["name"]
    if not name or len(name) > 100 or not name.isprintable() or _UNKNOWN.fullmatch(name):
        line.refuse("is not a GPU's name; query it again", name)
    memory_mib = _whole(line, cells["memory.total"], "MiB", 1, _MOST_MIB)
    return SmiGpu(
        index=index,
        name=name,
        memory_bytes=None if memory_mib is None else memory_mib * _MIB,
        pcie_gen=_whole(line, cells.get("pcie.link.gen.max", "N/A"), "", 1, 9),
        pcie_width=_whole(line, cells.get("pcie.link.width.max", "N/A"), "", 1, 64),
        fabric=_fabric(cells),
    )


def _fabric(cells: dict[str, str]) -> str | None:
    """The fabric of a GPU; the driver writes zeros where a machine has switches of its own alone."""
    cluster, clique = cells.get("fabric.clusterUuid", ""), cells.get("fabric.cliqueId", "")
    stated = set(cluster) - set("0-") and not _UNKNOWN.fullmatch(cluster) and not _UNKNOWN.fullmatch(clique)
    return f"{cluster}.{clique}" if stated else None


def _whole(line: Line, cell: str, unit: str, least: int, most: int) -> int | None:
    """A whole number with or without its unit; None where the driver does not report it."""
    if _UNKNOWN.fullmatch(cell):
        return None
    digits = cell.removesuffix(unit).strip() if unit else cell
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not least <= int(digits) <= most:
        within = f"{least} to {most}{' ' + unit if unit else ''}"
        line.refuse(f"is not a whole number from {within}; query it again", cell)
    return int(digits)

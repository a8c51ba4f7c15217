"""The connections between the GPUs of a machine, from `nvidia-smi topo -m` or `rocm-smi --showtopo`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hexiopt.discovery.lines import Faults, Line, Text
from hexiopt.errors import InputError
from hexiopt.numbers.gpus import Gpu

# GB/s per NVLink and direction, by the `link` of the catalogue: NVIDIA's whitepapers of P100 (4 links, 160 GB/s both
# ways), V100 (6 links, 300), A100 (12 links, 600) and H100 (18 links, 900), and HGX B200 datasheet (18 links, 1800).
_NVLINK_GB_PER_S = {"nvlink1": 20.0, "nvlink2": 25.0, "nvlink3": 25.0, "nvlink4": 25.0, "nvlink5": 50.0}
# Of cards that a bridge joins in pairs. NVLink 2: Turing architecture whitepaper (TU102 has two links of 25 GB/s each
# way, 100 GB/s both ways; TU104 has one). NVLink 3 of GA102: its whitepaper (four links of 14.0625 GB/s each way, 112.5
# GB/s both ways), A40 and RTX A4500 to A6000 datasheets. GA100 and GH100: datasheets of A100 PCIe (three bridges, 12
# links, 600 GB/s), A30 (4 links, 200 GB/s), A800 PCIe (8 links, 400 GB/s), H100 PCIe and NVL (12 links, 600 GB/s) and
# H200 NVL (18 links, 900 GB/s).
_BRIDGE_GB_PER_S = {
    **dict.fromkeys(("rtx_2070_super", "rtx_2080", "rtx_2080_super", "rtx_2080_ti", "titan_rtx"), 25.0),
    **dict.fromkeys(("quadro_rtx_5000", "quadro_rtx_6000", "quadro_rtx_8000"), 25.0),
    **dict.fromkeys(("rtx_3090", "rtx_3090_ti", "rtx_a4500", "rtx_a5000", "rtx_a5500", "rtx_a6000", "a40"), 14.0625),
    **dict.fromkeys(("a30", "a100_40gb_pcie", "a100_80gb_pcie", "a800_40gb_pcie", "a800_80gb_pcie"), 25.0),
    **dict.fromkeys(("h100_80gb_pcie", "h100_nvl", "h200_nvl"), 25.0),
}


def nvlink_gb_per_s(gpu: Gpu) -> float | None:
    """GB/s per NVLink and direction of a type of the catalogue, by its datasheet; None where none is known."""
    return _BRIDGE_GB_PER_S.get(gpu.name, _NVLINK_GB_PER_S.get(gpu.link))


_SELF = "X"
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "PSB", "SOC")  # SOC is what old drivers call SYS
_CELL = re.compile(rf"{_SELF}|NV[1-9][0-9]?|C2C|{'|'.join(_PCIE)}")
_GPU = re.compile(r"GPU(0|[1-9][0-9]{0,3})")
_ROCM_CELL = re.compile(r"0|XGMI|PCIE")
_COMMAND = "nvidia-smi topo -m"
_ROCM_COMMAND = "rocm-smi --showtopo"


@dataclass(frozen=True)
class Topology:
    """The paths between a machine's GPUs i < j (`NV12`, `SYS`, ...), and its network cards by the tool's names."""

    num_gpus: int
    paths: Mapping[tuple[int, int], str]
    cards: tuple[str, ...]

    def nvlinks(self, i: int, j: int) -> int:
        """The number of NVLinks between two GPUs; 0 where a path crosses PCIe."""
        path = self.paths[min(i, j), max(i, j)]
        return int(path[2:]) if path.startswith("NV") else 0


def read_topology(text: Text) -> Topology:
    """The topology of nvidia-smi topo -m. Raises InputError naming file and lines."""
    start = next(k for k, line in enumerate(text.lines) if line.text.split()[0] == "GPU0")
    header = text.lines[start]
    devices = _devices(header)
    num_gpus = sum(_GPU.fullmatch(name) is not None for name in devices)
    if devices[:num_gpus] != [f"GPU{i}" for i in range(num_gpus)]:
        header.refuse("is not a header GPU0 GPU1 ...; give all GPUs of the machine, from 0 without gaps")
    rows = _rows(text, text.lines[start + 1 :], num_gpus, len(devices), _CELL, _SELF)
    return Topology(num_gpus, _paths(text, rows), tuple(devices[num_gpus:]))


def read_rocm_topology(text: Text) -> Topology:
    """The topology of rocm-smi --showtopo. Raises InputError naming file and lines."""
    start = next(k for k, line in enumerate(text.lines) if "Link Type between two GPUs" in line.text)
    rest = text.lines[start + 1 :]
    end = next((k for k, line in enumerate(rest) if line.text.startswith("=")), len(rest))
    if not end:
        raise InputError(f"{text.path}: has no table of link types; write it with {_ROCM_COMMAND}")
    devices = rest[0].text.split()
    if devices != [f"GPU{i}" for i in range(len(devices))]:
        rest[0].refuse(f"is not a header GPU0 GPU1 ...; write it with {_ROCM_COMMAND}")
    rows = _rows(text, rest[1:end], len(devices), len(devices), _ROCM_CELL, "0")
    return Topology(len(devices), _paths(text, rows), ())


def _rows(
    text: Text, lines: Sequence[Line], num_gpus: int, count: int, cell: re.Pattern[str], itself: str
) -> dict[int, list[str]]:
    """The paths of each GPU to `count` devices; those to itself are called `itself`."""
    rows: dict[int, list[str]] = {}
    faults = Faults(text.path)
    for line in lines:
        words = line.text.split()
        named = _GPU.fullmatch(words[0])
        if named is None:
            continue
        with faults.collect():
            index = int(named[1])
            if index >= num_gpus or index in rows:
                line.refuse(f"is not one row for each GPU of the header; write it with {_COMMAND}", words[0])
            rows[index] = _cells(line, words[1:], index, count, cell, itself)
    faults.refuse()
    if len(rows) != num_gpus:
        lost = next(i for i in range(num_gpus) if i not in rows)
        raise InputError(f"{text.path}: has no row GPU{lost}; write it with {_COMMAND}")
    return rows


def _paths(text: Text, rows: Mapping[int, Sequence[str]]) -> dict[tuple[int, int], str]:
    """The paths between GPUs i < j, which must be equal in both directions."""
    for j in range(len(rows)):
        for i in range(j):
            if rows[i][j] != rows[j][i]:
                both = f"{rows[i][j]} from GPU{i} to GPU{j} and {rows[j][i]} back"
                raise InputError(f"{text.path}: {both}; write it with {_COMMAND}, whole")
    return {(i, j): rows[i][j] for j in range(len(rows)) for i in range(j)}


def _devices(header: Line) -> list[str]:
    """The columns of GPUs and network cards, which precede those of affinity."""
    names = re.split(r"\s+(?:CPU|NUMA) Affinity", header.text)[0].split()
    if len(set(names)) != len(names):
        header.refuse(f"names a device twice; write it with {_COMMAND}")
    return names


def _cells(line: Line, words: Sequence[str], index: int, count: int, cell: re.Pattern[str], itself: str) -> list[str]:
    """The first `count` cells of a row, where columns that run together are told apart by what a cell may be."""
    cells: list[str] = []
    for word in words:
        whole = re.fullmatch(rf"(?:{cell.pattern})+", word) is not None
        cells += [match[0] for match in cell.finditer(word)] if whole else [word]
    cells = cells[:count]
    if len(cells) < count:
        line.refuse(f"has {len(cells)} paths, the header {count} devices; write it with {_COMMAND}")
    for k, path in enumerate(cells):
        if not cell.fullmatch(path) or (path == itself) != (k == index):
            line.refuse(f"is not a path such as NV4, PIX or SYS; write it with {_COMMAND}", path)
    return cells

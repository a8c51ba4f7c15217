"""The connections between the GPUs of a machine, from `nvidia-smi topo -m`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hexiopt.errors import InputError
from hexiopt.readers.discovery.lines import Line, read_lines

# GB/s per NVLink and direction, by the `link` of the catalogue: NVIDIA's whitepapers of P100 (4 links, 160 GB/s both
# ways), V100 (6 links, 300), A100 (12 links, 600) and H100 (18 links, 900), and HGX B200 datasheet (18 links, 1800).
NVLINK_GB_PER_S = {"nvlink1": 20.0, "nvlink2": 25.0, "nvlink3": 25.0, "nvlink4": 25.0, "nvlink5": 50.0}

_SELF = "X"
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "PSB", "SOC")  # SOC is what old drivers call SYS
_CELL = re.compile(rf"{_SELF}|NV[1-9][0-9]?|C2C|{'|'.join(_PCIE)}")
_GPU = re.compile(r"GPU(0|[1-9][0-9]{0,3})")
_COMMAND = "nvidia-smi topo -m"


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


def read_topology(path: str) -> Topology:
    """The topology in a file. Raises InputError naming file and line."""
    lines = list(read_lines(path))
    start = next((k for k, line in enumerate(lines) if line.text.split()[0] == "GPU0"), None)
    if start is None:
        raise InputError(f"{path}: has no header GPU0 ...; write it with {_COMMAND}")
    header = lines[start]
    devices = _devices(header)
    num_gpus = sum(_GPU.fullmatch(name) is not None for name in devices)
    if devices[:num_gpus] != [f"GPU{i}" for i in range(num_gpus)]:
        header.refuse("is not a header GPU0 GPU1 ...; give all GPUs of the machine, from 0 without gaps")
    rows: dict[int, list[str]] = {}
    for line in lines[start + 1 :]:
        words = line.text.split()
        named = _GPU.fullmatch(words[0])
        if named is None:
            continue
        index = int(named[1])
        if index >= num_gpus or index in rows:
            line.refuse(f"is not one row for each GPU of the header; write it with {_COMMAND}", words[0])
        rows[index] = _cells(line, words[1:], index, len(devices))
    if len(rows) != num_gpus:
        lost = next(i for i in range(num_gpus) if i not in rows)
        raise InputError(f"{path}: has no row GPU{lost}; write it with {_COMMAND}")
    for j in range(num_gpus):
        for i in range(j):
            if rows[i][j] != rows[j][i]:
                said = f"{rows[i][j]} from GPU{i} to GPU{j} and {rows[j][i]} back"
                raise InputError(f"{path}: {said}; write it with {_COMMAND}, whole")
    paths = {(i, j): rows[i][j] for j in range(num_gpus) for i in range(j)}
    return Topology(num_gpus, paths, tuple(devices[num_gpus:]))


def _devices(header: Line) -> list[str]:
    """The columns of GPUs and network cards, which precede those of affinity."""
    names = re.split(r"\s+(?:CPU|NUMA) Affinity", header.text)[0].split()
    if len(set(names)) != len(names):
        header.refuse(f"names a device twice; write it with {_COMMAND}")
    return names


def _cells(line: Line, words: list[str], index: int, count: int) -> list[str]:
    cells = words[:count]
    if len(cells) < count:
        line.refuse(f"has {len(cells)} paths, the header {count} devices; write it with {_COMMAND}")
    for k, cell in enumerate(cells):
        if not _CELL.fullmatch(cell) or (cell == _SELF) != (k == index):
            line.refuse(f"is not a path such as NV4, PIX or SYS; write it with {_COMMAND}", cell)
    return cells

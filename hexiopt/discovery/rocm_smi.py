"""The GPUs of a machine from `rocm-smi --showproductname --showmeminfo vram`, AMD's tool."""

import re

from hexiopt.discovery.lines import Text
from hexiopt.discovery.nvidia_smi import SmiGpu, SmiGpus
from hexiopt.errors import InputError

COMMAND = "rocm-smi --showproductname --showmeminfo vram"
BANNER = "ROCm System Management Interface"
_STATED = re.compile(r"GPU\[(\d{1,4})\]\s*:\s*(Card series|Card Series|VRAM Total Memory \(B\)):\s*(.+)")


def is_rocm_smi(text: Text) -> bool:
    """Whether the text names products as rocm-smi does."""
    return text.has(r"^GPU\[\d+\]\s*:\s*Card [Ss]eries:")


def read_rocm_smi(text: Text) -> SmiGpus:
    """The GPUs by index. Raises InputError."""
    names: dict[int, str] = {}
    memory: dict[int, int] = {}
    for line in text.lines:
        if (match := _STATED.match(line.text)) is None:
            continue
        index, value = int(match[1]), match[3].strip()
        if match[2].lower() == "card series":
            names[index] = value
        elif value.isdecimal():
            memory[index] = int(value)
    if sorted(names) != list(range(len(names))):
        raise InputError(f"{text.path}: has the GPUs {sorted(names)}; give all of a machine, from 0 without gaps")
    return SmiGpus(tuple(SmiGpu(index, names[index], memory.get(index)) for index in sorted(names)))

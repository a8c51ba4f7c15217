"""Link measurements of others: Sailor's fits of bandwidth over message size, and the output of nccl-tests."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hexiopt.errors import InputError, closest
from hexiopt.readers.profiles.channel import Channel, channel_of
from hexiopt.readers.profiles.sailor import GPUS
from hexiopt.reading import read_mapping, read_text
from hexiopt.units import GB, MICROSECOND


@dataclass(frozen=True)
class NetworkFits:
    """Sailor's fits: bytes/s by GPU type and by how many GPUs of a machine send at once, inside and between machines.

    The rates of large messages: the greatest that each fit takes.
    """

    inside: Mapping[str, Mapping[int, float]]
    between: Mapping[str, Mapping[int, float]]


def sailor_network(path: Path) -> NetworkFits:
    """The fits in a file of Sailor's (`network_coeffs_homogeneous.json`): {inter, intra}, GPU, count, [[a, b, c], max].

    GB/s = a·x² + b·x + c with x = log2(MB), at most `max` B/s. Raises InputError.
    """
    data = read_mapping(path)
    return NetworkFits(*(_rates(data, key, str(path)) for key in ("intra", "inter")))


def _rates(data: Mapping[str, Any], key: str, where: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    try:
        for gpu, counts in data[key].items():
            if gpu not in GPUS:
                raise InputError(f"{where}: {key}.{gpu}: is no GPU of Sailor's; {closest(gpu, GPUS)}")
            found[GPUS[gpu]] = {int(count): float(most) for count, (_, most) in counts.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{where}: {key} is not GPUs, counts and [[a, b, c], maximum]; mend the file") from None
    return found


_COLUMNS = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\S+)\s+(\S+)\s+(-?\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


def read_nccl_tests(path: Path) -> Channel:
    """Latency and bus bandwidth of a run of nccl-tests, from the text that it prints.

    Its columns are size, count, type, redop, root, and time (µs), algbw and busbw (GB/s) out of place. Bus bandwidth is
    what each link carries (nccl-tests, doc/PERFORMANCE.md), so that rings of any length give the rate of a link.
    Raises InputError where no line has these columns.
    """
    moved: list[float] = []  # bytes that a link carried
    times: list[float] = []
    for line in read_text(path).splitlines():
        found = _COLUMNS.match(line)
        if found and float(found[6]) > 0:
            times.append(float(found[6]) * MICROSECOND)
            moved.append(float(found[8]) * GB * times[-1])
    if len(times) < 2 or max(moved) == 0:
        raise InputError(f"{path}: has no two lines of sizes and times; give the output of all_gather_perf or the like")
    return channel_of(np.ones(len(times)), np.array(moved), np.array(times))

"""Measured links: the line fitted to measured messages, Sailor's fits, and the output of nccl-tests."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import InputError, did_you_mean
from hexiopt.files.profile_files import SAILOR_GPUS
from hexiopt.reading import read_mapping, read_text
from hexiopt.units import GB, MICROSECOND

Floats = NDArray[np.float64]
_OUTLIER = 0.1  # relative error above which the loss is linear rather than quadratic
_ROUNDS = 30
_SEEN = 2.0  # times the rate of the fastest message: no point supports a higher bandwidth


@dataclass(frozen=True)
class Channel:
    """A link on which a message takes `latency_s` plus its bytes over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


def channel_of(per_latency: Floats, per_byte: Floats, seconds: Floats) -> Channel:
    """The channel fitted to points of `per_latency` latencies and `per_byte` bytes each, all of shape [points].

    Its bandwidth is at most twice that of the fastest point, latency included. At least one point must have bytes.
    """
    latency_s, s_per_byte = nonnegative([per_latency, per_byte], seconds)
    most_bytes_per_s = _SEEN * float((per_byte / seconds).max())
    return Channel(latency_s, 1.0 / max(s_per_byte, 1.0 / most_bytes_per_s))


def nonnegative(columns: Sequence[Floats], seconds: Floats) -> list[float]:
    """Non-negative coefficients of columns [points] that fit `seconds` [points] by relative errors.

    The soft L1 loss is minimised by iteratively reweighted least squares.
    """
    from scipy.optimize import nnls  # here, because scipy.optimize is slow to import

    relative = np.column_stack(columns) / seconds[:, None]
    scale = 1.0 / relative.max(axis=0)
    weights = np.ones_like(seconds)
    coefficients = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        coefficients, _norm = nnls(relative * scale * weights[:, None], weights)
        errors = relative @ (coefficients * scale) - 1.0
        weights = (1.0 + (errors / _OUTLIER) ** 2) ** -0.25
    return [float(value) for value in coefficients * scale]


@dataclass(frozen=True)
class NetworkFits:
    """Sailor's fits inside and between machines: bytes/s by GPU type and by the number of GPUs of a machine that send
    at once.

    The rates are those of large messages: the maximum of each fit.
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
    rates: dict[str, dict[int, float]] = {}
    try:
        for gpu, counts in data[key].items():
            if gpu not in SAILOR_GPUS:
                raise InputError(f"{where}: {key}.{gpu}: is not a GPU of Sailor's; {did_you_mean(gpu, SAILOR_GPUS)}")
            rates[SAILOR_GPUS[gpu]] = {int(count): float(most) for count, (_, most) in counts.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{where}: {key} is not GPUs, counts and [[a, b, c], maximum]; correct the file") from None
    return rates


_COLUMNS = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\S+)\s+(\S+)\s+(-?\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


def read_nccl_tests(path: Path) -> Channel:
    """Latency and bus bandwidth of a run of nccl-tests, from the text that it prints.

    Its columns are size, count, type, redop, root, and time (µs), algbw and busbw (GB/s) out of place. Bus bandwidth is
    the rate on each link (nccl-tests, doc/PERFORMANCE.md), so rings of any length give the rate of a link.
    Raises InputError where no line has these columns.
    """
    bytes_moved: list[float] = []  # bytes that a link has carried
    times: list[float] = []
    for line in read_text(path).splitlines():
        columns = _COLUMNS.match(line)
        if columns and float(columns[6]) > 0:
            times.append(float(columns[6]) * MICROSECOND)
            bytes_moved.append(float(columns[8]) * GB * times[-1])
    if len(times) < 2 or max(bytes_moved) == 0:
        raise InputError(f"{path}: has no two lines of sizes and times; give the output of all_gather_perf or the like")
    return channel_of(np.ones(len(times)), np.array(bytes_moved), np.array(times))

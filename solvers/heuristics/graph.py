"""The cluster as a graph for partitioning: GPUs weighted by speed, edges by bandwidth or its reciprocal."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.problem.problem import Problem

_LARGEST = 10_000  # integer weight of the heaviest edge or vertex: METIS takes integers, so scale, then round


@dataclass(frozen=True)
class DeviceGraph:
    """A complete graph over some devices. `speed[i]` in FLOP/s, `bandwidth[i, j]` in bytes/s."""

    devices: tuple[int, ...]
    speed: NDArray[np.float64]
    bandwidth: NDArray[np.float64]

    def subset(self, members: list[int]) -> "DeviceGraph":
        """The graph over the devices at positions `members`."""
        return DeviceGraph(
            tuple(self.devices[i] for i in members),
            self.speed[members],
            self.bandwidth[np.ix_(members, members)],
        )


def device_graph(problem: Problem) -> DeviceGraph:
    """All usable devices."""
    cluster, network, devices = problem.cluster, problem.cluster.network, problem.usable_devices
    machine = cluster.machine_of[list(devices)]
    bandwidth = network.bandwidth[np.ix_(machine, machine)].copy()
    np.fill_diagonal(bandwidth, 0.0)
    for i, a in enumerate(devices):
        for j in np.flatnonzero(machine == machine[i]):
            if cluster.machines[int(machine[i])].intra_links and i != j:
                bandwidth[i, j] = network.pair_bandwidth(a, devices[j])
    precision = problem.workload.precision
    speed = np.array([cluster.gpu_of(d).peak_flops(precision) or 0.0 for d in devices])
    return DeviceGraph(devices, speed, bandwidth)


def scaled(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positive weights as integers from 1 to `_LARGEST`, with ratios kept as far as possible."""
    top = float(weights.max()) or 1.0
    return np.maximum(1, np.rint(weights / top * _LARGEST)).astype(np.int64)


def partition_graph(
    graph: DeviceGraph,
    parts: int,
    edge_weights: NDArray[np.float64],
    seed: int,
    *,
    shares: Sequence[float] | None = None,
    exponent: float = 1.0,
) -> list[list[int]]:
    """METIS: `parts` non-empty sets of positions that cut little edge weight.

    Each set has about its share (`shares`, summing to 1; equal by default) of Σ speed^`exponent`. With fewer than two
    GPUs per part on average, METIS has no vertices left to move; the GPUs are then distributed by weight alone.

    Raises ImportError where pymetis is missing.
    """
    import pymetis

    count = len(graph.devices)
    if parts <= 1 or count <= 1:
        return [list(range(count))]
    if parts >= count:
        return [[i] for i in range(count)]
    if 2 * parts > count:
        return _by_weight(graph.speed**exponent, shares or [1.0 / parts] * parts)
    others = ~np.eye(count, dtype=bool)
    adjacency = np.broadcast_to(np.arange(count), (count, count))[others]
    starts = np.arange(0, count * (count - 1) + 1, count - 1)
    with _silent_c():
        _, labels = pymetis.part_graph(
            parts,
            adjacency=pymetis.CSRAdjacency(starts, adjacency),
            vweights=scaled(graph.speed**exponent),
            tpwgts=None if shares is None else list(shares),
            eweights=scaled(edge_weights[others]),
            options=pymetis.Options(seed=seed),
            recursive=parts <= 8,
        )
    found: list[list[int]] = [[] for _ in range(parts)]
    for position, label in enumerate(labels):
        found[label].append(position)
    return [members for members in found if members]


def _by_weight(weights: NDArray[np.float64], shares: Sequence[float]) -> list[list[int]]:
    """Positions distributed heaviest first: one to every part, then each to the part with the least of its share."""
    found: list[list[int]] = [[] for _ in shares]
    filled = [0.0] * len(shares)
    for turn, position in enumerate(np.argsort(-weights, kind="stable").tolist()):
        part = turn if turn < len(shares) else min(range(len(shares)), key=lambda k: filled[k] / shares[k])
        found[part].append(position)
        filled[part] += float(weights[position])
    return found


@contextmanager
def _silent_c() -> Iterator[None]:
    """Drop what C code prints: METIS complains on standard output of weights with which it copes."""
    c = ctypes.CDLL(None)
    c.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        c.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)

"""Gradient synchronisation across pipelines whose stages and TP degrees differ.

Every device of a sequence layout holds all that a TP group does.
A layer's sharded dimension is cut at the union of all TP boundaries; each slice has one holder per pipeline and
replica, and slices with the same holders share one buffer and one all-reduce. A group starts when the last backward
of its holders' stages has ended, so late stages synchronise while early ones still compute. Groups run as rings in the
order of machines, over all interfaces at their devices; rings that cross the same interface, uplink, link or device
port share it, as in `boundary.py`.
With tied embeddings, first and last stages hold the matrix together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
from numpy.typing import NDArray

from hexiopt.calibration.coefficients import LAST_BUCKET
from hexiopt.cost.executors.collectives import tree_depth
from hexiopt.plan.plan import Pipeline
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterHolders:
    """Groups of devices that hold the same parameters.

    `holders[k]` has shape [groups, devices in a group], devices ascending; `params[k]` shape [groups].
    """

    holders: tuple[Ints, ...]
    params: tuple[Floats, ...]

    @property
    def count(self) -> int:
        """Groups in all, each one all-reduce."""
        return sum(len(params) for params in self.params)


@lru_cache(maxsize=4096)
def slices(degrees: tuple[int, ...]) -> tuple[list[float], Ints]:
    """Widths of the slices between all TP boundaries, and per slice the rank that holds it in each degree."""
    unit = lcm(*degrees)
    cuts = sorted({k * (unit // t) for t in set(degrees) for k in range(t + 1)})
    widths = [(end - start) / unit for start, end in pairwise(cuts)]
    ranks = np.array([[start * t // unit for t in degrees] for start in cuts[:-1]])
    return widths, ranks


def parameter_holders(pipelines: Sequence[Pipeline], model: ModelSpec) -> ParameterHolders:
    """Who holds what together."""
    table_rows: list[tuple[int, ...]] = []
    holds = []  # per pipeline: the end of each range of layers, in order, and the rows of the replicas that hold it
    for pipeline in pipelines:
        rows_of = []
        for stage in pipeline.stages:
            start = len(table_rows)
            table_rows += stage.copies
            rows_of.append(range(start, len(table_rows)))
        holds.append(
            [
                (stage.layers[chunk][1], own)
                for chunk in range(pipeline.num_chunks)
                for stage, own in zip(pipeline.stages, rows_of, strict=True)
            ]
        )
    degree = [len(devices) for devices in table_rows]
    table = np.zeros((len(degree), max(degree)), np.int64)
    for row, devices in enumerate(table_rows):
        table[row, : len(devices)] = devices
    rows: dict[int, dict[bytes, list[float]]] = {}

    def add(members: list[int], params: float) -> None:
        """Slices of a tensor of `params` parameters that the replicas `members` hold."""
        if len(members) == 1 or not params:
            return
        widths, ranks = slices(tuple([degree[m] for m in members]))
        holders = np.sort(table[np.array(members), ranks], axis=1)
        family = rows.setdefault(len(members), {})
        for row, width in zip(holders, widths, strict=True):
            family.setdefault(row.tobytes(), [0.0])[0] += width * params

    cuts = sorted({0} | {end for ranges in holds for end, _ in ranges})
    at = [0] * len(pipelines)
    for first, end in pairwise(cuts):
        members: list[int] = []
        for k, ranges in enumerate(holds):
            if ranges[at[k]][0] <= first:
                at[k] += 1
            members += ranges[at[k]][1]
        add(members, float(model.layer_params) * (end - first))
    heads = [m for ranges in holds for m in ranges[0][1]]
    tails = [m for ranges in holds for m in ranges[-1][1]]
    if model.tied_embeddings:
        add(sorted({*heads, *tails}), float(model.vocabulary_params))
        add(heads, float(model.embedding_params - model.vocabulary_params))
    else:
        add(heads, float(model.embedding_params))
    add(tails, float(model.head_params))
    return ParameterHolders(
        tuple(np.frombuffer(b"".join(family), np.int64).reshape(-1, size) for size, family in rows.items()),
        tuple(np.array([value[0] for value in family.values()]) for family in rows.values()),
    )


def ring_edges(cluster: Cluster, ring: Sequence[int]) -> list[tuple[int, int, float]]:
    """(sender, receiver, share of the data) of one pass around a ring of devices, which stand by machine.

    As NCCL does, as many rings as the machines have interfaces at the ring's devices run at once, each with its share
    of the data, and each leaves and enters machines by interfaces of its own.
    """
    machine_of, network = cluster.machine_of, cluster.network
    nic_devices: dict[int, dict[int, int]] = {}  # per machine, a device at each interface
    for device in ring:
        nic_devices.setdefault(int(machine_of[device]), {}).setdefault(network.transmit_interface(device), device)
    count = min(map(len, nic_devices.values()))
    found = []
    for a, b in pairwise([*ring, ring[0]]):
        here, there = int(machine_of[a]), int(machine_of[b])
        if here == there or count == 1:
            found.append((a, b, 1.0))
        else:
            lanes = zip(
                list(nic_devices[here].values())[:count], list(nic_devices[there].values())[:count], strict=True
            )
            found += [(c, d, 1.0 / count) for c, d in lanes]
    return found


class RingTimes:
    """Seconds per byte of a parameter, and latency, of every group, all groups at once."""

    def __init__(self, groups: ParameterHolders, cluster: Cluster) -> None:
        self.groups = groups
        size = cluster.num_devices
        plain = all(machine.num_interfaces == 1 for machine in cluster.machines)
        each = [
            (_plain_edges if plain else _edges)(cluster, holders, params)
            for holders, params in zip(groups.holders, groups.params, strict=True)
        ]
        if not each:
            self._per_byte: list[Floats] = []
            self._latency: list[Floats] = []
            return
        moved = np.concatenate([found.moved for found in each])
        codes, where = np.unique(
            np.concatenate([found.sources * size + found.targets for found in each]), return_inverse=True
        )
        volume = np.bincount(where, moved).astype(np.float64)
        pair_s, pair_latency_s = self._pairs(cluster, codes, volume)
        per_edge, latency_per_edge = pair_s[where], pair_latency_s[where]
        waits = np.zeros(size)  # a device starts its groups one after another
        self._per_byte, latencies, at = [], [], 0
        for holders, found in zip(groups.holders, each, strict=True):
            end, n = at + len(found.sources), holders.shape[1]
            self._per_byte.append(np.maximum.reduceat(per_edge[at:end], found.first))
            latencies.append(np.maximum.reduceat(latency_per_edge[at:end], found.first) * tree_depth(n))
            np.add.at(waits, holders.ravel(), np.repeat(latencies[-1], n))
            at = end
        self._latency = [waits[holders].max(axis=1) for holders in groups.holders]

    @staticmethod
    def _pairs(cluster: Cluster, codes: Ints, volume: Floats) -> tuple[Floats, Floats]:
        """Per edge (source · devices + target) carrying `volume` parameters: seconds per byte of a parameter,
        shared, and latency."""
        network, machine_of, size = cluster.network, cluster.machine_of, cluster.num_devices
        load: dict[int, float] = {}
        ways: list[tuple[int, ...]] = []
        latency_s = np.empty(len(codes))
        for k, (code, params) in enumerate(zip(codes.tolist(), volume.tolist(), strict=True)):
            a, b = divmod(code, size)
            latency_s[k] = network.pair_latency(a, b)
            if machine_of[a] == machine_of[b]:
                way: tuple[int, ...] = (-1 - a,)  # the sender's port
                load[way[0]] = load.get(way[0], 0.0) + params / network.pair_bandwidth(a, b)
            else:
                way = network.route(a, b)
                for resource in way:
                    load[resource] = load.get(resource, 0.0) + params / float(network.capacity[resource])
            ways.append(way)
        return np.array([max(load[r] for r in way) for way in ways]), latency_s

    def ring_pass_s(self, bytes_per_param: float) -> list[Floats]:
        """Seconds of one ring pass (reduce-scatter or all-gather) of every group, shape as `groups.params`."""
        return [s * bytes_per_param + wait for s, wait in zip(self._per_byte, self._latency, strict=True)]


def after_all_reduce(
    sync: RingTimes, copy_of: Ints, start: Floats, num_bytes: float, passes: int, beside_s: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """When each copy has ended all its rings, every one starting when all its holders are ready.

    `passes` over `num_bytes` a parameter each. Where rings run beside `beside_s` seconds of compute per copy, only
    what goes beyond counts, and the last part of them; returned with what is left of these seconds.
    """
    if not passes or not sync.groups.count:
        return start, beside_s
    ended = start.copy()
    left = None if beside_s is None else beside_s.copy()
    for holders, duration in zip(sync.groups.holders, sync.ring_pass_s(num_bytes), strict=True):
        at = copy_of[holders]
        seconds = passes * duration
        if beside_s is not None and left is not None:
            np.minimum.at(left, at, np.maximum(beside_s[at] - seconds[:, None], 0.0))
            seconds = np.maximum(seconds - beside_s[at].min(axis=1), LAST_BUCKET * seconds)
        done = start[at].max(axis=1) + seconds
        np.maximum.at(ended, at, done[:, None])
    return ended, left


@dataclass(frozen=True)
class _Edges:
    """Edges of rings of one length: who sends to whom, how many parameters in a pass, and each ring's first edge."""

    sources: Ints
    targets: Ints
    moved: Floats
    first: Ints


def _plain_edges(_: Cluster, holders: Ints, params: Floats) -> _Edges:
    """Where every machine has one interface: each device sends to the next. Each edge carries (n−1)/n of the buffer."""
    n = holders.shape[1]
    return _Edges(
        holders.ravel(),
        np.roll(holders, -1, axis=1).ravel(),
        np.repeat(params * ((n - 1) / n), n),
        np.arange(0, holders.size, n),
    )


def _edges(cluster: Cluster, holders: Ints, params: Floats) -> _Edges:
    """As `ring_edges` has them."""
    share = (holders.shape[1] - 1) / holders.shape[1]
    each = [ring_edges(cluster, ring) for ring in holders.tolist()]
    rows = [
        (a, b, part * amount * share) for ring, amount in zip(each, params.tolist(), strict=True) for a, b, part in ring
    ]
    sources, targets, moved = zip(*rows, strict=True)
    first = np.cumsum([0, *map(len, each)])[:-1]
    return _Edges(np.array(sources), np.array(targets), np.array(moved), first)

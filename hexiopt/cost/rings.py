"""The rings in which devices synchronise the gradients and weights that they hold together.

Each group of holders is one all-reduce. It starts when the last backward of its holders' stages has ended, so late
stages synchronise while early ones still compute. Groups run as rings in the order of machines, over all interfaces at
their devices, and share them as in `executors/network_load.py`; inside a machine a ring loads the sender's port alone.
Sharding groups cut a ring: gradients and weights go around inside each group, and devices that hold the same shard in
each of them all-reduce its gradient once, at the end of the step (hybrid sharding, Zhao et al., arXiv 2304.11277,
section 3.2.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from hexiopt.cost.executors.collectives import tree_depth
from hexiopt.cost.executors.network_load import load_of
from hexiopt.plan.holdings import Floats, Holdings, Ints, ParameterHolders, parameter_holders, slices
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec


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
        volume = np.bincount(where, moved).astype(np.float64)  # parameters from one device to another
        senders, receivers = np.divmod(codes, size)
        transfers = zip(senders.tolist(), receivers.tolist(), volume.tolist(), strict=True)
        load, crossings = load_of(cluster.network, transfers, receivers=False)
        per_edge = np.array([max([load[resource] for resource, _ in crossed]) for _, crossed in crossings])[where]
        latency_per_edge = np.array([latency_s for latency_s, _ in crossings])[where]
        waits = np.zeros(size)  # a device starts its groups one after another
        self._per_byte, latencies, at = [], [], 0
        for holders, found in zip(groups.holders, each, strict=True):
            end, n = at + len(found.sources), holders.shape[1]
            self._per_byte.append(np.maximum.reduceat(per_edge[at:end], found.first))
            latencies.append(np.maximum.reduceat(latency_per_edge[at:end], found.first) * tree_depth(n))
            np.add.at(waits, holders.ravel(), np.repeat(latencies[-1], n))
            at = end
        self._latency = [waits[holders].max(axis=1) for holders in groups.holders]

    def ring_pass_s(self, bytes_per_param: float) -> list[Floats]:
        """Seconds of one ring pass (reduce-scatter or all-gather) of every group, shape as `groups.params`."""
        return [s * bytes_per_param + wait for s, wait in zip(self._per_byte, self._latency, strict=True)]


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


@dataclass(frozen=True)
class GradientRings:
    """The rings of a plan: inside the sharding groups, or over all holders where none divide them; and between groups.

    `copy_of` [devices]: the number of the parameter copy that each device holds, in the order of the plan.
    `sharding_group` [devices]: as `sharding_groups` has it.
    """

    within_group: RingTimes
    between_groups: RingTimes
    copy_of: Ints
    sharding_group: Sequence[int] | None


def gradient_rings(plan: Plan, groups: Sequence[int] | None, model: ModelSpec, cluster: Cluster) -> GradientRings:
    """The rings of `plan`; `groups` from `sharding_groups`. Raises InputError where its pipelines do not hold the same
    layers."""
    held = Holdings.of(plan.pipelines)
    holders, copies = parameter_holders(held, model), held.copies
    within, between = (holders, ParameterHolders((), ())) if groups is None else divided(holders, groups)
    copy_of = np.zeros(cluster.num_devices, np.int64)
    copy_of[list(chain.from_iterable(copies))] = np.repeat(np.arange(len(copies)), list(map(len, copies)))
    return GradientRings(RingTimes(within, cluster), RingTimes(between, cluster), copy_of, groups)


def divided(holders: ParameterHolders, groups: Sequence[int]) -> tuple[ParameterHolders, ParameterHolders]:
    """Rings inside the sharding groups, and between them: of those that hold the same part of a shard in each."""
    within, between = (_Rings({}, {}), _Rings({}, {}))
    for rows, amounts, ends in zip(holders.holders, holders.params, holders.last or holders.params, strict=True):
        for row, params, last in zip(rows.tolist(), amounts.tolist(), ends.tolist(), strict=True):
            parts: dict[int, list[int]] = {}
            for device in row:
                parts.setdefault(groups[device], []).append(device)
            for part in parts.values():
                within.add(tuple(part), params, last)
            widths, ranks = slices(tuple(map(len, parts.values())))
            for width, at in zip(widths, ranks.tolist(), strict=True):
                ring = tuple(sorted(part[k] for part, k in zip(parts.values(), at, strict=True)))
                between.add(ring, width * params, width * last)
    return grouped(*within), grouped(*between)


class _Rings(NamedTuple):
    """By the devices of a ring: its parameters, and those that a backward ends with."""

    params: dict[tuple[int, ...], float]
    last: dict[tuple[int, ...], float]

    def add(self, ring: tuple[int, ...], params: float, last: float) -> None:
        self.params[ring] = self.params.get(ring, 0.0) + params
        self.last[ring] = max(self.last.get(ring, 0.0), last)


def grouped(
    params: Mapping[tuple[int, ...], float], last: Mapping[tuple[int, ...], float] | None = None
) -> ParameterHolders:
    """Rings of two devices or more, by their length; `last` of their parameters as in `ParameterHolders`."""
    lengths = sorted({len(ring) for ring in params} - {1})
    chosen = [[ring for ring in params if len(ring) == n] for n in lengths]
    return ParameterHolders(
        tuple(np.array(rings, np.int64) for rings in chosen),
        tuple(np.array([params[ring] for ring in rings]) for rings in chosen),
        () if last is None else tuple(np.array([last[ring] for ring in rings]) for rings in chosen),
    )

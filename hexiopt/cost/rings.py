"""The rings in which devices synchronise the gradients and weights of the parameters that they hold in common.

Each group of holders is one all-reduce. It starts when the last backward of its holders' stages has ended, so late
stages synchronise while early ones still compute. A group is a ring in the order of machines over all interfaces at its
devices; rings share interfaces as in `executors/network_load.py`, and inside a machine load only the sender's port.
Sharding groups cut a ring: gradients and weights go around inside each group, and the devices that hold the same shard
in each group all-reduce its gradient once, at the end of the step (hybrid sharding, Zhao et al., arXiv 2304.11277,
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
from hexiopt.problem.operators import ParameterGroup


def ring_edges(cluster: Cluster, ring: Sequence[int]) -> list[tuple[int, int, float]]:
    """(sender, receiver, share of the data) of one pass around a ring of devices, which are ordered by machine.

    As in NCCL, as many rings run at once as every machine has interfaces at the ring's devices. Each carries an equal
    share of the data and leaves and enters machines by its own interfaces.
    """
    machine_of, network = cluster.machine_of, cluster.network
    nic_devices: dict[int, dict[int, int]] = {}  # per machine, a device at each interface
    for device in ring:
        nic_devices.setdefault(int(machine_of[device]), {}).setdefault(network.transmit_interface(device), device)
    count = min(map(len, nic_devices.values()))
    edges = []
    for a, b in pairwise([*ring, ring[0]]):
        here, there = int(machine_of[a]), int(machine_of[b])
        if here == there or count == 1:
            edges.append((a, b, 1.0))
        else:
            lanes = zip(
                list(nic_devices[here].values())[:count], list(nic_devices[there].values())[:count], strict=True
            )
            edges += [(c, d, 1.0 / count) for c, d in lanes]
    return edges


class RingTimes:
    """Seconds of a ring pass of every group of holders, where all groups run at once."""

    def __init__(self, groups: ParameterHolders, cluster: Cluster, *, exchange: bool = False) -> None:
        """With `exchange`, each device of a group sends every other one its share at once, instead of a ring pass."""
        self.groups = groups
        size = cluster.num_devices
        plain = all(machine.num_interfaces == 1 for machine in cluster.machines)
        edges_of = _exchange_edges if exchange else _plain_edges if plain else _edges
        edges = [
            edges_of(cluster, holders, params) for holders, params in zip(groups.holders, groups.params, strict=True)
        ]
        if not edges:
            self._per_byte: list[Floats] = []
            self._latency: list[Floats] = []
            return
        moved = np.concatenate([part.moved for part in edges])
        codes, where = np.unique(
            np.concatenate([part.sources * size + part.targets for part in edges]), return_inverse=True
        )
        volume = np.bincount(where, moved).astype(np.float64)  # parameters from one device to another
        senders, receivers = np.divmod(codes, size)
        transfers = zip(senders.tolist(), receivers.tolist(), volume.tolist(), strict=True)
        load, crossings = load_of(cluster.network, transfers, receivers=False)
        per_edge = np.array([max([load[resource] for resource, _ in crossed]) for _, crossed in crossings])[where]
        latency_per_edge = np.array([latency_s for latency_s, _ in crossings])[where]
        waits = np.zeros(size)  # a device starts its groups one after another
        self._per_byte, latencies, at = [], [], 0
        for holders, part in zip(groups.holders, edges, strict=True):
            end, n = at + len(part.sources), holders.shape[1]
            self._per_byte.append(np.maximum.reduceat(per_edge[at:end], part.first))
            latencies.append(np.maximum.reduceat(latency_per_edge[at:end], part.first) * tree_depth(n))
            np.add.at(waits, holders.ravel(), np.repeat(latencies[-1], n))
            at = end
        self._latency = [waits[holders].max(axis=1) for holders in groups.holders]

    def ring_pass_s(self, bytes_per_param: float) -> list[Floats]:
        """Seconds of one ring pass (reduce-scatter or all-gather) of every group, shaped as `groups.params`."""
        return [s * bytes_per_param + wait for s, wait in zip(self._per_byte, self._latency, strict=True)]


@dataclass(frozen=True)
class _Edges:
    """Edges of rings of one length: sending and receiving devices and parameters per pass [edges], and the first edge
    of each ring [rings]."""

    sources: Ints
    targets: Ints
    moved: Floats
    first: Ints


def _plain_edges(_: Cluster, holders: Ints, params: Floats) -> _Edges:
    """The edges where every machine has one interface: each device sends (n−1)/n of the buffer to the next."""
    n = holders.shape[1]
    return _Edges(
        holders.ravel(),
        np.roll(holders, -1, axis=1).ravel(),
        np.repeat(params * ((n - 1) / n), n),
        np.arange(0, holders.size, n),
    )


def _exchange_edges(_: Cluster, holders: Ints, params: Floats) -> _Edges:
    """Those of an all-to-all: each device sends 1/n of the buffer to each other one."""
    n = holders.shape[1]
    senders, receivers = np.nonzero(~np.eye(n, dtype=bool))
    return _Edges(
        holders[:, senders].ravel(),
        holders[:, receivers].ravel(),
        np.repeat(params / n, len(senders)),
        np.arange(0, len(holders) * len(senders), len(senders)),
    )


def _edges(cluster: Cluster, holders: Ints, params: Floats) -> _Edges:
    """The edges as of `ring_edges`, each with its share of (n−1)/n of the buffer."""
    share = (holders.shape[1] - 1) / holders.shape[1]
    rings = [ring_edges(cluster, ring) for ring in holders.tolist()]
    rows = [
        (a, b, part * amount * share)
        for ring, amount in zip(rings, params.tolist(), strict=True)
        for a, b, part in ring
    ]
    sources, targets, moved = zip(*rows, strict=True)
    first = np.cumsum([0, *map(len, rings)])[:-1]
    return _Edges(np.array(sources), np.array(targets), np.array(moved), first)


@dataclass(frozen=True)
class GradientRings:
    """The rings of a plan: inside sharding groups, or over all holders where the plan has none; and between groups.

    `scatter` has those inside groups as gradients are scattered: in rings, or by all-to-alls where in 8 bits.
    `copy_of` [devices]: the number of the parameter copy that a device holds, in the order of the plan.
    `sharding_group` [devices]: as of `sharding_groups`.
    """

    within_group: RingTimes
    between_groups: RingTimes
    copy_of: Ints
    sharding_group: Sequence[int] | None
    scatter: RingTimes


def gradient_rings(
    plan: Plan,
    groups: Sequence[int] | None,
    trained: Sequence[ParameterGroup],
    cluster: Cluster,
    *,
    exchange: bool = False,
) -> GradientRings:
    """The rings of `plan` for `trained` parameters; `groups` [devices] as of `sharding_groups`; `exchange` where
    gradients are scattered so.

    Raises InputError where its pipelines do not hold the same layers.
    """
    held = Holdings.of(plan.pipelines)
    holders, copies = parameter_holders(held, trained), held.copies
    within, between = (holders, ParameterHolders((), ())) if groups is None else split_rings(holders, groups)
    copy_of = np.zeros(cluster.num_devices, np.int64)
    copy_of[list(chain.from_iterable(copies))] = np.repeat(np.arange(len(copies)), list(map(len, copies)))
    rings = RingTimes(within, cluster)
    scatter = RingTimes(within, cluster, exchange=True) if exchange else rings
    return GradientRings(rings, RingTimes(between, cluster), copy_of, groups, scatter)


def split_rings(holders: ParameterHolders, groups: Sequence[int]) -> tuple[ParameterHolders, ParameterHolders]:
    """Rings inside sharding groups `groups` [devices], and rings between them, of the devices that hold the same part
    of a shard."""
    within, between = dict[_Ring, RingAmounts](), dict[_Ring, RingAmounts]()
    columns = (holders.params, holders.last, holders.layer, holders.embedding)
    for rows, *amounts in zip(holders.holders, *columns, strict=True):
        for row, *values in zip(rows.tolist(), *[column.tolist() for column in amounts], strict=True):
            parts: dict[int, list[int]] = {}
            for device in row:
                parts.setdefault(groups[device], []).append(device)
            for part in parts.values():
                _add(within, tuple(part), RingAmounts(*values))
            widths, ranks = slices(tuple(map(len, parts.values())))
            for width, at in zip(widths, ranks.tolist(), strict=True):
                ring = tuple(sorted(part[k] for part, k in zip(parts.values(), at, strict=True)))
                _add(between, ring, RingAmounts(*[width * value for value in values]))
    return rings_by_length(within), rings_by_length(between)


_Ring = tuple[int, ...]  # its devices, ascending


class RingAmounts(NamedTuple):
    """Parameters of a ring, as in `ParameterHolders`."""

    params: float
    last: float = 0.0
    layer: float = 0.0
    embedding: float = 0.0


def _add(rings: dict[_Ring, RingAmounts], ring: _Ring, more: RingAmounts) -> None:
    held = rings.get(ring, RingAmounts(0.0))
    rings[ring] = RingAmounts(
        held.params + more.params,
        max(held.last, more.last),
        max(held.layer, more.layer),
        held.embedding + more.embedding,
    )


def rings_by_length(amounts: Mapping[_Ring, RingAmounts]) -> ParameterHolders:
    """The rings of two devices or more, grouped by length."""
    lengths = sorted({len(ring) for ring in amounts} - {1})
    rings_of = [[ring for ring in amounts if len(ring) == n] for n in lengths]
    return ParameterHolders(
        tuple(np.array(rings, np.int64) for rings in rings_of),
        *[
            tuple(np.array([amounts[ring][column] for ring in rings]) for rings in rings_of)
            for column in range(len(RingAmounts._fields))
        ],
    )

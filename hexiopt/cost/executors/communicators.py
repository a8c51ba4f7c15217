"""GPU memory that NCCL's communicators hold: of those that the executor makes, with the channels that it allows them.

A communicator has structures, tables of each channel, and in each channel buffers towards the devices that it exchanges
with. Buffers are in GPU memory where GPUs, or GPU and network interface, reach each other's; GeForce ones stay in host
memory. A device of a plan is in

- one of all ranks, for sums of a few numbers: one channel;
- that of its TP group, with NCCL's own number of channels, or those of its sequence layout, which connect every device
  of an all-to-all group with all others;
- those that sum its gradients, which share sixteen channels as equally as powers of two allow, none with fewer than
  two;
- one for each direction in which it exchanges messages with another device, which share as many, none with more than
  four.

So a device with eight groups of either kind, or fewer, holds no more than is reserved on every device: searches and
bounds count that. The price of a plan adds what it has beyond (`hexiopt/cost/crowded.py`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.cluster import Cluster

Ranks = tuple[int, ...]

RESERVED_GROUPS = c.SHARED_CHANNELS // c.LEAST_CHANNELS
_NVLINKS = {"nvlink1": 4, "nvlink2": 6, "nvlink_bridge": 4, "pcie3": 0, "pcie4": 0, "pcie5": 0}
_PROCESSOR = "memory"  # the link of processors, whose processes talk over gloo


@dataclass(frozen=True)
class Channels:
    """The most channels of the communicators of groups, by their ranks, and of pairs (sender, receiver), that are
    bounded."""

    groups: Mapping[Ranks, int] = field(default_factory=dict)
    pairs: Mapping[Ranks, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layouts: Iterable[Ranks], sums: Collection[Ranks], pairs: Collection[Ranks]) -> "Channels":
        """Those of the groups of sequence layouts, of all others that sum gradients, and of all pairs."""
        groups = dict.fromkeys(layouts, c.LAYOUT_CHANNELS)
        return cls({**groups, **_shared(sums, c.SHARED_CHANNELS)}, _shared(pairs, c.PAIR_CHANNELS))


def _shared(groups: Collection[Ranks], most: int) -> dict[Ranks, int]:
    number = Counter(rank for ranks in groups for rank in ranks)
    found = {}
    for ranks in groups:
        share = max(c.SHARED_CHANNELS // max(number[rank] for rank in ranks), c.LEAST_CHANNELS)
        found[ranks] = min(most, 1 << (share.bit_length() - 1))
    return found


class Communicators:
    """Bytes of the communicators of a device, by its GPU type, in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._alone = cluster.num_devices == 1
        self._ring_bytes = c.NETWORK_BUFFER_BYTES if len(cluster.machines) > 1 else c.PEER_BUFFER_BYTES

    def held(self, gpu: Gpu, inside_bytes: float, num_sums: int = 0, num_pairs: int = 0) -> float:
        """Bytes on a device with so many groups that sum gradients and so many pairs; at least what is reserved.

        `inside_bytes` are those of its TP group or layout.
        """
        if self._alone or gpu.link == _PROCESSOR:
            return 0.0
        ring = self._ring_bytes if gpu.peer_to_peer else 0
        pair = c.PEER_BUFFER_BYTES / 2 if gpu.peer_to_peer else 0.0
        found = inside_bytes + _bytes(c.WORLD_CHANNELS, ring)
        for number, buffer in ((num_sums, ring), (num_pairs, pair)):
            more = max(number, RESERVED_GROUPS)
            found += more * _bytes(c.LEAST_CHANNELS, buffer)
        return found

    def tensor_parallel(self, gpu: Gpu, tp: int) -> float:
        """Bytes of a TP group on each of its devices."""
        channels = _default_channels(gpu)
        return 0.0 if tp == 1 else _bytes(channels, c.PEER_BUFFER_BYTES if gpu.peer_to_peer else 0)

    def layout(self, gpu: Gpu, group_size: int, num_groups: int) -> float:
        """Bytes of a sequence layout of so many groups on a device in one of `group_size` devices."""
        channels = min(c.LAYOUT_CHANNELS, _default_channels(gpu))
        peer, ring = (c.PEER_BUFFER_BYTES, self._ring_bytes) if gpu.peer_to_peer else (0, 0)
        found = _bytes(channels, peer * (group_size - 1)) if group_size > 1 else 0.0
        return found + (_bytes(channels, ring) if num_groups > 1 else 0.0)

    def reserved(self, gpu: Gpu, tp: int) -> float:
        """Bytes on every device of a TP group."""
        return self.held(gpu, self.tensor_parallel(gpu, tp))


def _default_channels(gpu: Gpu) -> int:
    """NCCL's own number of channels of a group inside a machine: two for each NVLink of a GPU."""
    links = _NVLINKS.get(gpu.link, c.MOST_CHANNELS)
    return int(min(c.MOST_CHANNELS, 2 * links)) or int(c.PCIE_CHANNELS)


def _bytes(channels: int, buffer_bytes: float) -> float:
    """Bytes of a communicator with buffers of so many bytes in each channel; tables are those of a power of two."""
    tables = 1 << (channels - 1).bit_length()
    return float(c.COMMUNICATOR_BYTES + tables * c.CHANNEL_BYTES + channels * buffer_bytes)

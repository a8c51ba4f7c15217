"""GPU memory of the NCCL communicators that the executor makes, with the channels that it allows them.

A communicator holds structures, tables for each channel, and in each channel buffers for the devices that it exchanges
with. Buffers are in GPU memory where GPUs, or GPU and network interface, reach each other's memory; those of GeForce
cards stay in host memory. A device of a plan is in these communicators:

- one of all ranks, for sums of a few numbers: one channel;
- that of its TP group, with NCCL's default number of channels, or those of its sequence layout, which connect every
  device of an all-to-all group with all others;
- those that sum its gradients, which share sixteen channels as equally as powers of two allow, none with fewer than
  two;
- one for each direction in which it exchanges messages with another device; these share sixteen channels too, none with
  more than four.

So a device with at most eight groups of either kind holds no more than is reserved on every device, which is what
searches and bounds count. The price of a plan adds the rest (`hexiopt/cost/extra_communicators.py`).
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
_PROCESSOR = "memory"  # the link of processors, whose processes communicate by gloo


@dataclass(frozen=True)
class Channels:
    """Upper limits on channels: of the communicators of groups, by their ranks, and of pairs (sender, receiver). Groups
    that are not listed have NCCL's default."""

    groups: Mapping[Ranks, int] = field(default_factory=dict)
    pairs: Mapping[Ranks, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layouts: Iterable[Ranks], sums: Collection[Ranks], pairs: Collection[Ranks]) -> "Channels":
        """The limits for the groups of sequence layouts, for all other groups that sum gradients, and for all pairs."""
        groups = dict.fromkeys(layouts, c.LAYOUT_CHANNELS)
        return cls({**groups, **_channel_shares(sums, c.SHARED_CHANNELS)}, _channel_shares(pairs, c.PAIR_CHANNELS))


def _channel_shares(groups: Collection[Ranks], most: int) -> dict[Ranks, int]:
    number = Counter(rank for ranks in groups for rank in ranks)
    channels = {}
    for ranks in groups:
        share = max(c.SHARED_CHANNELS // max(number[rank] for rank in ranks), c.LEAST_CHANNELS)
        channels[ranks] = min(most, 1 << (share.bit_length() - 1))
    return channels


class Communicators:
    """Bytes of the communicators of a device of one cluster, by its GPU type."""

    def __init__(self, cluster: Cluster) -> None:
        self._alone = cluster.num_devices == 1
        self._ring_bytes = c.NETWORK_BUFFER_BYTES if len(cluster.machines) > 1 else c.PEER_BUFFER_BYTES

    def total_bytes(self, gpu: Gpu, inside_bytes: float, num_sums: int = 0, num_pairs: int = 0) -> float:
        """Bytes of all communicators of a device in `num_sums` groups that sum gradients and `num_pairs` pairs, at
        least those that are reserved; `inside_bytes` are those of its TP group or layout.
        """
        if self._alone:
            return 0.0
        total = inside_bytes + self.sum_bytes(gpu, c.WORLD_CHANNELS)
        for number, of_each in ((num_sums, self.sum_bytes(gpu)), (num_pairs, self.pair_bytes(gpu))):
            total += max(number, RESERVED_GROUPS) * of_each
        return total

    def sum_bytes(self, gpu: Gpu, channels: int = c.LEAST_CHANNELS) -> float:
        """Bytes of a communicator that sums over a ring, on each of its devices."""
        return _bytes(gpu, channels, self._ring_bytes)

    def pair_bytes(self, gpu: Gpu, channels: int = c.LEAST_CHANNELS) -> float:
        """Bytes of the communicator of a pair (sender, receiver), on either."""
        return _bytes(gpu, channels, c.PEER_BUFFER_BYTES / 2)

    def tp_group_bytes(self, gpu: Gpu, tp: int) -> float:
        """Bytes of a TP group's communicator on each of its devices."""
        return 0.0 if tp == 1 else _bytes(gpu, _default_channels(gpu), c.PEER_BUFFER_BYTES)

    def layout_bytes(self, gpu: Gpu, group_size: int, num_groups: int) -> float:
        """Bytes of a sequence layout's communicators, of `num_groups` groups, on a device in one of `group_size`."""
        channels = min(c.LAYOUT_CHANNELS, _default_channels(gpu))
        all_to_all = _bytes(gpu, channels, c.PEER_BUFFER_BYTES * (group_size - 1)) if group_size > 1 else 0.0
        return all_to_all + (self.sum_bytes(gpu, channels) if num_groups > 1 else 0.0)

    def least_bytes(self, gpu: Gpu, tp: int) -> float:
        """Bytes that are reserved for communicators on every device of a TP group."""
        return self.total_bytes(gpu, self.tp_group_bytes(gpu, tp))


def _default_channels(gpu: Gpu) -> int:
    """NCCL's default number of channels of a group inside a machine: two for each NVLink of a GPU."""
    links = _NVLINKS.get(gpu.link, c.MOST_CHANNELS)
    return int(min(c.MOST_CHANNELS, 2 * links)) or int(c.PCIE_CHANNELS)


def _bytes(gpu: Gpu, channels: int, buffer_bytes: float) -> float:
    """Bytes of a communicator with `buffer_bytes` in each channel; its tables are those of a power of two channels."""
    if gpu.link == _PROCESSOR:
        return 0.0
    tables, buffers = 1 << (channels - 1).bit_length(), buffer_bytes if gpu.peer_to_peer else 0.0
    return float(c.COMMUNICATOR_BYTES + tables * c.CHANNEL_BYTES + channels * buffers)

"""Bytes of communicators by hand from NCCL's buffers and tables, and the channels that groups and pairs get."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.communicators import RESERVED_GROUPS, Channels, Communicators
from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.cluster import Cluster

MIB = 2**20
ALONE = Cluster.of({"a100_80gb_sxm": 1})
INSIDE = Cluster.of({"a100_80gb_sxm": 8})
BETWEEN = Cluster.of({"a100_80gb_sxm": 16}, 25)
A100, A100_PCIE = catalogue()["a100_80gb_sxm"], catalogue()["a100_80gb_pcie"]
RTX_4090, V100 = catalogue()["rtx_4090"], catalogue()["v100_32gb_sxm"]
RANKS = st.lists(st.lists(st.integers(0, 9), min_size=2, unique=True).map(lambda r: tuple(sorted(r))), unique=True)


def test_groups_by_hand() -> None:
    """NVLink: 24 channels of 12 MiB of buffers, tables of 32. PCIe: 4 channels. GeForce keep buffers in host memory."""
    communicators = Communicators(INSIDE)
    assert communicators.tp_group_bytes(A100, 1) == 0
    assert communicators.tp_group_bytes(A100, 8) == (4 + 32 * 6 + 24 * 12) * MIB
    assert communicators.tp_group_bytes(V100, 8) == (4 + 16 * 6 + 12 * 12) * MIB
    assert communicators.tp_group_bytes(A100_PCIE, 2) == (4 + 4 * 6 + 4 * 12) * MIB
    assert communicators.tp_group_bytes(RTX_4090, 2) == (4 + 4 * 6) * MIB
    # An all-to-all connects a device with the seven others; beside it the ring of all groups.
    assert communicators.layout_bytes(A100, 8, 1) == (4 + 8 * 6 + 8 * 7 * 12) * MIB
    assert communicators.layout_bytes(A100, 8, 2) == (4 + 8 * 6 + 8 * 7 * 12 + 4 + 8 * 6 + 8 * 12) * MIB
    assert communicators.layout_bytes(A100, 1, 2) == (4 + 8 * 6 + 8 * 12) * MIB


def test_every_device_has_room_for_the_groups_of_most_plans() -> None:
    world, sums, pairs = 4 + 6 + 20, 8 * (4 + 2 * (6 + 20)), 8 * (4 + 2 * (6 + 6))
    assert Communicators(BETWEEN).least_bytes(A100, 1) == (world + sums + pairs) * MIB
    inside = Communicators(INSIDE)
    assert inside.least_bytes(A100, 1) == (22 + 8 * (4 + 2 * 18) + pairs) * MIB
    assert inside.least_bytes(A100, 4) == inside.least_bytes(A100, 1) + inside.tp_group_bytes(A100, 4)
    assert Communicators(ALONE).least_bytes(A100, 1) == 0
    assert inside.least_bytes(catalogue()["cpu"], 1) == 0


def test_groups_beyond_the_reserved_ones_are_counted() -> None:
    communicators = Communicators(BETWEEN)
    reserved = communicators.least_bytes(A100, 1)
    assert communicators.total_bytes(A100, 0.0, RESERVED_GROUPS, RESERVED_GROUPS) == reserved
    assert communicators.total_bytes(A100, 0.0, RESERVED_GROUPS + 1) == reserved + (4 + 2 * (6 + 20)) * MIB
    assert communicators.total_bytes(A100, 0.0, 0, RESERVED_GROUPS + 3) == reserved + 3 * (4 + 2 * (6 + 6)) * MIB


def test_channels_are_shared() -> None:
    layouts, pairs = [(0, 1, 2, 3)], [(0, 4), (4, 0)]
    channels = Channels.of(layouts, [(0, 4)], pairs)
    assert channels.groups == {(0, 1, 2, 3): 8, (0, 4): 16}
    assert channels.pairs == dict.fromkeys(pairs, 4)
    many = [(0, k) for k in range(1, 6)]
    assert Channels.of((), [*many, (6, 7)], ()).groups == dict.fromkeys(many, 2) | {(6, 7): 16}


@given(RANKS)
def test_a_rank_in_no_more_groups_than_are_reserved_shares_sixteen_channels(groups: list[tuple[int, ...]]) -> None:
    number = Counter(rank for ranks in groups for rank in ranks)
    used = Counter[int]()
    for ranks, channels in Channels.of((), groups, ()).groups.items():
        assert channels >= 2
        assert channels.bit_count() == 1
        for rank in ranks:
            used[rank] += channels
    assert all(used[rank] <= max(16, 2 * number[rank]) for rank in number)


@pytest.mark.parametrize("num_groups", range(1, 21))
def test_what_a_device_holds_is_within_what_is_counted(num_groups: int) -> None:
    """Of groups that share their channels with no others: a communicator's own bytes, tables and buffers, added up."""
    communicators = Communicators(BETWEEN)
    channels = Channels.of((), [(0, k) for k in range(1, num_groups + 1)], ()).groups.values()
    held_bytes = sum(4 + each * (6 + 20) for each in channels) * MIB
    world, pairs = (4 + 6 + 20) * MIB, 8 * (4 + 2 * (6 + 6)) * MIB
    assert held_bytes <= communicators.total_bytes(A100, 0.0, num_groups) - world - pairs

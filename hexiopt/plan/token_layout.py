"""The geometry of a sequence layout: which tokens and heads a device holds, and which rings carry which keys.

A stage's *groups* divide the sequence. Inside a group an all-to-all turns "my tokens, all heads" into "the group's
tokens, my heads", as in DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Each device then needs the keys and values
of its heads from every other group. Groups may cut the heads at different places; cut at the places of all, the heads
fall into *segments*, each held by one device of every group: these devices form the segment's *sub-ring* (HexiSeq,
arXiv 2605.07569). At step j of a ring of G groups, group g meets the keys and values of group (g - j) mod G.

Shards lie in the order of the groups and their devices. `contiguous`: each device has one run of tokens. `zigzag`: the
first half of each shard (the longer one) lies in this order from the front of the sequence, the second half in the
same order from its back, so that everyone has queries that see little and queries that see much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel

Range = tuple[int, int]  # half open
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SubRing:
    """Query heads that one device of every group holds, the key-value heads they read, and these devices' places."""

    heads: Range
    kv_heads: Range
    places: tuple[int, ...]


def misfit(layout: SequenceParallel, seq_len: int, num_heads: int) -> str | None:
    """Why the layout is not one of sequences of `seq_len` tokens and `num_heads` query heads, in words, with a remedy;
    None if it is."""
    for g, group in enumerate(layout.groups):
        if (count := len(group.devices)) > num_heads:
            fault = f"group {g} has {count} devices for {num_heads} heads"
            return f"{fault}; a device computes at least one, so leave some out"
        if sum(group.heads) != num_heads:
            return f"group {g} has {sum(group.heads)} heads, the model {num_heads}; the heads of a group make all"
    total = sum(map(tokens_of, layout.groups))
    if total != seq_len:
        return f"the groups have {total} tokens, a sequence {seq_len}; the tokens of all groups make the sequence"
    return None


def tokens_of(group: SequenceGroup) -> int:
    """Tokens of the sequence that a group holds."""
    return sum(group.tokens)


def token_ranges(layout: SequenceParallel) -> tuple[tuple[tuple[Range, ...], ...], ...]:
    """Per group and device, its runs of the sequence in ascending order: one, or two in zigzag order."""
    sizes = [tokens for group in layout.groups for tokens in group.tokens]
    if layout.order == "contiguous":
        pieces = [merge_runs([piece]) for piece in _runs(sizes)]
    else:
        total = sum(sizes)
        fronts, mirrored = _runs([size - size // 2 for size in sizes]), _runs([size // 2 for size in sizes])
        backs = [(total - end, total - first) for first, end in mirrored]
        pieces = [merge_runs(both) for both in zip(fronts, backs, strict=True)]
    in_order = iter(pieces)
    return tuple(tuple(next(in_order) for _ in group.devices) for group in layout.groups)


def group_ranges(layout: SequenceParallel) -> tuple[tuple[Range, ...], ...]:
    """Per group, the runs of the sequence that its devices hold together, ascending."""
    return tuple(merge_runs([run for runs in shards for run in runs]) for shards in token_ranges(layout))


def head_ranges(heads: Sequence[int]) -> tuple[Range, ...]:
    """The query heads of each device of a group that holds `heads`, in order."""
    return tuple(_runs(heads))


def kv_range(heads: Range, num_heads: int, num_kv_heads: int) -> Range:
    """The key-value heads that the query heads read: grouped-query attention shares each among as many."""
    queries_per_kv = num_heads // num_kv_heads
    return heads[0] // queries_per_kv, -(-heads[1] // queries_per_kv)


def sub_rings(layout: SequenceParallel, num_heads: int, num_kv_heads: int) -> tuple[SubRing, ...]:
    """The rings in which groups exchange keys and values, in the order of the heads.

    `places[g]` is the place in group g of the device that holds the heads. Key-value heads that two segments share
    travel in both of their rings.
    """
    held = [head_ranges(group.heads) for group in layout.groups]
    cuts = sorted({end for ranges in held for _, end in ranges})
    rings = []
    for heads in pairwise([0, *cuts]):
        places = tuple(_at(ranges, heads) for ranges in held)
        rings.append(SubRing(heads, kv_range(heads, num_heads, num_kv_heads), places))
    return tuple(rings)


def merge_runs(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same tokens in ascending runs: adjacent ones merged, empty ones left out."""
    merged: list[Range] = []
    for first, end in sorted(run for run in ranges if run[0] < run[1]):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return tuple(merged)


def common(a: Sequence[Range], b: Sequence[Range]) -> tuple[Range, ...]:
    """What both have, in ascending runs."""
    return merge_runs([(max(first, low), min(end, high)) for first, end in a for low, high in b])


def _runs(sizes: Sequence[int]) -> list[Range]:
    ends = [0, *accumulate(sizes)]
    return list(pairwise(ends))


def _at(ranges: Sequence[Range], heads: Range) -> int:
    return next(place for place, (first, end) in enumerate(ranges) if first <= heads[0] and heads[1] <= end)


@dataclass(frozen=True)
class Members:
    """The devices of a layout in order, in arrays [devices]; `starts` [groups] is each group's first place."""

    device: Ints
    group: Ints
    tokens: Ints
    heads: Ints
    first_head: Ints
    starts: Ints

    @property
    def group_tokens(self) -> Ints:
        """Tokens of each group [groups]."""
        return np.add.reduceat(self.tokens, self.starts)


def members(layout: SequenceParallel) -> Members:
    """The layout in arrays."""
    sizes = np.array([len(group.devices) for group in layout.groups])
    device, tokens, heads = (
        np.array([value for group in layout.groups for value in getattr(group, word)], np.int64)
        for word in ("devices", "tokens", "heads")
    )
    starts, before = np.cumsum(sizes) - sizes, np.cumsum(heads) - heads
    group = np.repeat(np.arange(len(sizes)), sizes)
    return Members(device, group, tokens, heads, before - before[starts][group], starts)


@dataclass(frozen=True)
class RingHolders:
    """All sub-rings: `place` [groups, rings] is the place among the members of the device that holds the heads of each,
    `kv_heads` [rings] how many key-value heads travel in it; `starts` [devices] a device's first ring in `place`."""

    place: Ints
    kv_heads: Ints
    starts: Ints


def kv_heads_of(devices: Members, num_heads: int, num_kv_heads: int) -> Ints:
    """How many key-value heads the query heads of each device read [devices]: see `kv_range`."""
    queries_per_kv = num_heads // num_kv_heads
    return -(-(devices.first_head + devices.heads) // queries_per_kv) - devices.first_head // queries_per_kv


def uneven_kv_copies(devices: Members, kv_heads: Ints, num_heads: int, num_kv_heads: int) -> Ints:
    """By how many the query heads of each device exceed its `kv_heads`, unless each of these serves equally many of
    them [devices]: then attention reads keys and values in place."""
    queries_per_kv = num_heads // num_kv_heads
    at_first = np.minimum(queries_per_kv - devices.first_head % queries_per_kv, devices.heads)
    at_last = np.minimum((devices.first_head + devices.heads - 1) % queries_per_kv + 1, devices.heads)
    even = (kv_heads == 1) | ((at_first == at_last) & ((kv_heads == 2) | (at_first == queries_per_kv)))
    return np.where(even, 0, devices.heads - kv_heads)


def ring_holders(devices: Members, num_heads: int, num_kv_heads: int) -> RingHolders:
    """As `sub_rings`, in arrays."""
    ends = devices.first_head + devices.heads
    cuts = np.unique(ends)
    cut_starts = np.concatenate([[0], cuts[:-1]])
    count = np.searchsorted(cuts, ends) - np.searchsorted(cut_starts, devices.first_head) + 1
    queries_per_kv = num_heads // num_kv_heads
    place = np.repeat(np.arange(len(count)), count).reshape(len(devices.starts), len(cuts))
    return RingHolders(place, -(-cuts // queries_per_kv) - cut_starts // queries_per_kv, np.cumsum(count) - count)


class RingSchedule:
    """Which keys the groups of a layout meet at the steps of a ring, and what of them the causal mask leaves.

    At step j, group g holds the keys of group (g - j) mod G. All runs at the front of the sequence come before all at
    its back, and the backs stand in the reverse order: a group's queries see the front of each earlier group, and those
    at its back all of each later one. The last group's two runs meet.
    """

    def __init__(self, devices: Members, order: str) -> None:
        halves = devices.tokens if order == "contiguous" else devices.tokens - devices.tokens // 2
        self.num_groups = len(devices.starts)
        self.tokens = devices.group_tokens
        self._front = np.add.reduceat(halves, devices.starts)
        self._back = self.tokens - self._front
        self._runs = 1 + (self._back > 0)
        self._runs[-1] = 1

    def source(self, steps: Ints) -> Ints:
        """Whose keys each group holds [steps, groups]."""
        return (np.arange(self.num_groups) - steps[:, None]) % self.num_groups

    def blocks(self, steps: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Of each group at each step [steps, groups]: (query, key) pairs with the key before the query, a query's own
        counting half; pairs of all runs that have any; how many such pairs of runs; and queries that have any."""
        queries, keys = np.arange(self.num_groups), self.source(steps)
        tokens, front, back, runs = (a.astype(float) for a in (self.tokens, self._front, self._back, self._runs))
        earlier, later = keys < queries, keys > queries
        rows = np.where(later, back, tokens)
        causal = rows * np.where(later, tokens[keys], front[keys])
        kernels = np.where(later, (back > 0) * runs[keys], runs)
        diagonal = ~(earlier | later)
        causal[diagonal], whole = 0.5 * (tokens**2)[keys[diagonal]], causal.copy()
        parted = np.where(runs == 1, tokens**2, front**2 + front * back + back**2)
        whole[diagonal], kernels[diagonal] = parted[keys[diagonal]], np.where(runs == 1, 1.0, 3.0)[keys[diagonal]]
        return causal, whole, kernels, rows

    def last_step(self) -> Ints:
        """The last step at which the keys of each group meet a query that sees any of them [groups]: until then they
        travel on."""
        at = np.arange(self.num_groups)
        seeing = np.maximum.accumulate(np.where(self._back > 0, at, -1))  # the last group so far with a back
        last: Ints = self.num_groups - at + np.concatenate([[-1], seeing[:-1]])
        return last

"""The geometry of a sequence layout: which tokens and heads a device holds, and which rings carry which keys.

A stage's *groups* divide the sequence. Inside a group an all-to-all turns "my tokens, all heads" into "the group's
tokens, my heads", as in DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Each device then needs the keys and values
of its heads from every other group. Groups may cut the heads at different places; cut at the places of all, the heads
fall into *segments*, each held by one device of every group: these devices form the segment's *sub-ring* (HexiSeq,
arXiv 2605.07569). At turn j of a ring of G groups, group g meets the keys and values of group (g - j) mod G.

Shards lie in the order of the groups and their devices. `contiguous`: each device has one run of tokens. `zigzag`: the
first half of each shard (the longer one) lies in this order from the front of the sequence, the second half in the
same order from its back, so that everyone has queries that see little and queries that see much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hexiopt.plan import SequenceGroup, SequenceLayout

ORDERS = ("contiguous", "zigzag")

Range = tuple[int, int]  # half open


@dataclass(frozen=True, slots=True)
class SubRing:
    """Query heads that one device of every group holds, the key-value heads they read, and these devices' places."""

    heads: Range
    kv_heads: Range
    places: tuple[int, ...]


def misfit(layout: SequenceLayout, seq_len: int, num_heads: int) -> str | None:
    """The first rule that `layout` breaks, in words; None if none."""
    if layout.order not in ORDERS:
        return f"order {layout.order!r}; choose {' or '.join(ORDERS)}"
    if not layout.groups:
        return "no group; name at least one"
    for g, group in enumerate(layout.groups):
        count = len(group.devices)
        for word, given in (("tokens", group.tokens), ("heads", group.heads)):
            if len(given) != count:
                return f"group {g} states {len(given)} {word} for {count} devices; state one number for each"
            if not given or min(given) < 1:
                return f"group {g} has {word} {list(given)}; give every device at least 1, or leave it out"
        if sum(group.heads) != num_heads:
            return f"group {g} has {sum(group.heads)} heads, the model {num_heads}; the heads of a group make all"
    total = sum(map(tokens_of, layout.groups))
    if total != seq_len:
        return f"the groups have {total} tokens, a sequence {seq_len}; the tokens of all groups make the sequence"
    return None


def tokens_of(group: SequenceGroup) -> int:
    """Tokens of the sequence that a group holds."""
    return sum(group.tokens)


def token_ranges(layout: SequenceLayout) -> tuple[tuple[tuple[Range, ...], ...], ...]:
    """Per group and device, its runs of the sequence in ascending order: one, or two in zigzag order."""
    sizes = [tokens for group in layout.groups for tokens in group.tokens]
    if layout.order == "contiguous":
        pieces = [joined([piece]) for piece in _runs(sizes)]
    else:
        total = sum(sizes)
        fronts, mirrored = _runs([size - size // 2 for size in sizes]), _runs([size // 2 for size in sizes])
        backs = [(total - end, total - first) for first, end in mirrored]
        pieces = [joined(both) for both in zip(fronts, backs, strict=True)]
    found = iter(pieces)
    return tuple(tuple(next(found) for _ in group.devices) for group in layout.groups)


def group_ranges(layout: SequenceLayout) -> tuple[tuple[Range, ...], ...]:
    """Per group, the runs of the sequence that its devices hold together, ascending."""
    return tuple(joined([run for own in shards for run in own]) for shards in token_ranges(layout))


def head_ranges(heads: Sequence[int]) -> tuple[Range, ...]:
    """The query heads of each device of a group that holds `heads`, in order."""
    return tuple(_runs(heads))


def kv_range(heads: Range, num_heads: int, num_kv_heads: int) -> Range:
    """The key-value heads that the query heads read: grouped-query attention shares each among as many."""
    each = num_heads // num_kv_heads
    return heads[0] // each, -(-heads[1] // each)


def sub_rings(layout: SequenceLayout, num_heads: int, num_kv_heads: int) -> tuple[SubRing, ...]:
    """The rings in which groups exchange keys and values, in the order of the heads.

    `places[g]` is the place in group g of the device that holds the heads. Key-value heads that two segments share
    travel in both of their rings.
    """
    held = [head_ranges(group.heads) for group in layout.groups]
    cuts = sorted({end for ranges in held for _, end in ranges})
    found = []
    for heads in pairwise([0, *cuts]):
        places = tuple(_at(ranges, heads) for ranges in held)
        found.append(SubRing(heads, kv_range(heads, num_heads, num_kv_heads), places))
    return tuple(found)


def causal_pairs(queries: Sequence[Range], keys: Sequence[Range]) -> int:
    """How many (query, key) pairs have the key no later than the query."""
    return sum(_pairs(query, key) for query in queries for key in keys)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same tokens in ascending runs, neighbours made one, empty ones left out."""
    found: list[Range] = []
    for first, end in sorted(run for run in ranges if run[0] < run[1]):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return tuple(found)


def common(a: Sequence[Range], b: Sequence[Range]) -> tuple[Range, ...]:
    """What both have, in ascending runs."""
    return joined([(max(first, low), min(end, high)) for first, end in a for low, high in b])


def _runs(sizes: Sequence[int]) -> list[Range]:
    ends = [0, *accumulate(sizes)]
    return list(pairwise(ends))


def _at(ranges: Sequence[Range], heads: Range) -> int:
    return next(place for place, (first, end) in enumerate(ranges) if first <= heads[0] and heads[1] <= end)


def _pairs(queries: Range, keys: Range) -> int:
    """Sum over the queries q of how many keys k <= q there are."""
    (first, end), (low, high) = queries, keys
    whole = max(0, end - max(first, high)) * (high - low)  # queries beyond all keys
    start, stop = max(first, low), min(end, high)  # queries among the keys: q sees q - low + 1
    if start < stop:
        whole += (stop - start) * (start + stop + 1 - 2 * low) // 2
    return whole

"""Which parameters share a bucket of gradients, and the collectives that sum it: the same on every rank."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from runtime.mapping.layout import HeldParts
from runtime.mapping.parts import ParameterPart

BUCKET_ELEMENTS = 8_000_000  # of a bucket, unless one parameter is larger


class GradientCollective(NamedTuple):
    """Sums the gradients of bucket number `bucket` over `ranks`; with `between`, those that sharding groups have each
    summed for themselves."""

    bucket: int
    ranks: tuple[int, ...]
    between: bool = False

    def __str__(self) -> str:
        return f"{'sum between groups' if self.between else 'sum'} of gradient bucket {self.bucket}"


@dataclass(frozen=True, slots=True)
class BucketParts:
    """What a bucket has: parts that the same ranks hold, decayed by the optimiser or not; if `sharded`, summed in each
    sharding group of theirs, so that each rank gets a share, and else over all."""

    held: HeldParts
    decays: bool
    parts: tuple[ParameterPart, ...]
    sharded: bool

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that sum it."""
        return self.held.groups if self.sharded else (self.held.ranks,)

    def between(self) -> list[tuple[tuple[int, ...], int, int, int]]:
        """As of `HeldParts`."""
        return self.held.between() if self.sharded else []


def bucket_parts(held: Iterable[HeldParts], sharded: bool) -> list[BucketParts]:
    """All buckets of a plan, in the order of `held`: that in which backwards make their gradients."""
    found = []
    for same in held:
        by_decay: dict[bool, list[ParameterPart]] = defaultdict(list)
        for part in same.parts:
            if prod(part.local_shape):
                by_decay[part.decays].append(part)
        for decays, kept in by_decay.items():
            found += [BucketParts(same, decays, tuple(some), sharded) for some in _filled(kept)]
    return found


def _filled(parts: Sequence[ParameterPart]) -> list[list[ParameterPart]]:
    found: list[list[ParameterPart]] = []
    size = 0
    for part in parts:
        length = prod(part.local_shape)
        if not found or size + length > BUCKET_ELEMENTS:
            found.append([])
            size = 0
        found[-1].append(part)
        size += length
    return found


def collectives(found: Sequence[BucketParts]) -> Iterator[GradientCollective]:
    """Every first sum of every bucket."""
    for number, bucket in enumerate(found):
        for ranks in bucket.groups():
            if len(ranks) > 1:
                yield GradientCollective(number, ranks)


def collectives_between(found: Sequence[BucketParts]) -> Iterator[GradientCollective]:
    """Those between sharding groups, which follow all others."""
    for number, bucket in enumerate(found):
        for ranks, *_ in bucket.between():
            yield GradientCollective(number, ranks, True)

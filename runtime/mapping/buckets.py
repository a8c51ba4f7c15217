"""Which parameters share a bucket, and the collectives on it: the same on every rank."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from math import prod
from typing import NamedTuple

from hexiopt.numbers.coefficients import BUCKET_PARAMS
from runtime.mapping.layout import HeldParts, backward_turn
from runtime.mapping.moments import ADAMW, rule_of
from runtime.mapping.parts import ParameterPart

BUCKET_ELEMENTS = BUCKET_PARAMS  # of a bucket, unless one parameter is larger


class CollectiveKind(Enum):
    """What is done with a bucket; the values are the words for it."""

    SUM = "sum of gradient bucket"
    SUM_BETWEEN = "sum between groups of gradient bucket"
    SCATTER = "scatter of gradient bucket"
    GATHER = "gather of weight bucket"


class BucketCollective(NamedTuple):
    """What `ranks` do with bucket number `bucket`: sum its gradients of a step, or, between sharding groups, what these
    have summed; scatter its gradients of a micro-batch; gather its weights."""

    kind: CollectiveKind
    bucket: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind.value} {self.bucket}"


@dataclass(frozen=True, slots=True)
class BucketParts:
    """What a bucket has: parts that the same ranks hold, decayed by the optimiser or not. `zero` is the ZeRO stage by
    which each sharding group of theirs shards it: with 0, it is summed over all of them."""

    held: HeldParts
    decays: bool
    parts: tuple[ParameterPart, ...]
    zero: int

    @property
    def is_sharded(self) -> bool:
        """Whether each rank of a group steps a share of its own."""
        return self.zero >= 1

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that sum it."""
        return self.held.groups if self.is_sharded else (self.held.ranks,)

    def between(self) -> list[tuple[tuple[int, ...], int, int, int]]:
        """As of `HeldParts`."""
        return self.held.between() if self.is_sharded else []


def bucket_parts(held: Iterable[HeldParts], zero: int, optimizer: str = ADAMW) -> list[BucketParts]:
    """All buckets of a plan of that ZeRO stage, in the order of `held`: that in which backwards make their gradients.
    The optimizer keeps the same of all parts of a bucket.

    From ZeRO-2 on, the matrices of a unit (a layer, embedding or LM head) are a bucket. Norms and biases are left to
    ZeRO-1, as small parameters are by DeepSpeed (`stage3_param_persistence_threshold`): a collective of their own in
    every unit would take longer than they are worth.
    """
    buckets = []
    for same in held:
        parts_by_rule: dict[tuple[bool, str], list[ParameterPart]] = defaultdict(list)
        for part in same.parts:
            if prod(part.local_shape):
                parts_by_rule[part.decays, rule_of(optimizer, part)].append(part)
        for (decays, _), parts in parts_by_rule.items():
            if zero >= 2 and decays:
                units = [tuple(unit) for _, unit in groupby(parts, lambda part: backward_turn(part.name))]
                buckets += [BucketParts(same, decays, unit, zero) for unit in units]
            else:
                buckets += [BucketParts(same, decays, tuple(some), min(zero, 1)) for some in _fill_buckets(parts)]
    return buckets


def forward_turn(parts: Iterable[ParameterPart]) -> int:
    """When a forward through all layers needs the first of some parts: the less, the earlier."""
    return min(-backward_turn(part.name) for part in parts)


def _fill_buckets(parts: Sequence[ParameterPart]) -> list[list[ParameterPart]]:
    buckets: list[list[ParameterPart]] = []
    size = 0
    for part in parts:
        length = prod(part.local_shape)
        if not buckets or size + length > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(part)
        size += length
    return buckets


def collectives(buckets: Sequence[BucketParts]) -> Iterator[BucketCollective]:
    """Every first sum of every bucket that is summed once a step."""
    for number, bucket in enumerate(buckets):
        for ranks in bucket.groups():
            if len(ranks) > 1 and bucket.zero < 2:
                yield BucketCollective(CollectiveKind.SUM, number, ranks)


def collectives_between(buckets: Sequence[BucketParts]) -> Iterator[BucketCollective]:
    """Those between sharding groups, which follow all others."""
    for number, bucket in enumerate(buckets):
        for ranks, *_ in bucket.between():
            yield BucketCollective(CollectiveKind.SUM_BETWEEN, number, ranks)

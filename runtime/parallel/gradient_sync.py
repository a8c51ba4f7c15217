"""Gradients of parameters that several ranks hold: summed in flat buckets, beside the last backward.

The elements that the same ranks hold share buckets (`runtime/mapping/buckets.py`). Each rank adds what its own tokens
and heads contribute, so a plain sum is right for every kind of holder: pipelines, replicas, ranks of a TP group that
hold a norm whole, and those that share a key-value head. When a bucket's collective starts, stands in the rank's
actions, so that all ranks start them in one order. From ZeRO-2 on, units are scattered in every micro-batch instead.
In 8 bits (`quantized_sums.py`), sums that all holders need come back when all others have been made: in one order, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.buckets import BucketCollective, BucketParts, CollectiveKind
from runtime.mapping.parts import ParameterPart
from runtime.network import ProcessGroups
from runtime.parallel.quantized_sums import QuantizedSum


@dataclass(frozen=True, slots=True)
class Place:
    """Where elements of a bucket lie: `at` in it, as a `shape`, and `where` in the rank's own part of a parameter."""

    at: slice
    shape: tuple[int, ...]
    where: tuple[slice, ...]


@dataclass(eq=False)
class Bucket:
    """A rank's own of a bucket: elements of parameters that the same ranks hold, flat; decayed by the optimiser or not.

    `number` is that of the plan's bucket, `length` that of the flat elements, `places` say by name where they belong.
    Under ZeRO-`zero` each rank of the `group` steps an equal share: from ZeRO-2 on, `gradient` is that of the share
    alone, and under ZeRO-3 so is `weight`. Elsewhere parameters are views of `weight`; it is None where they cannot be,
    because one is in several buckets. What other sharding groups hold too is summed between them: `between` has the
    elements by ranks. Of several groups, the first one counts for all.
    """

    number: int
    group: tuple[int, ...]
    is_first: bool
    between: dict[tuple[int, ...], slice]
    decays: bool
    zero: int
    parts: tuple[ParameterPart, ...]
    length: int
    places: dict[str, Place]
    gradient: Tensor
    weight: Tensor | None = None
    work: dist.Work | None = None
    quantized: QuantizedSum | None = None
    whole: Tensor | None = None  # gradients of a micro-batch, until they are scattered
    scattered: Tensor | None = None  # where a collective puts this rank's share of a whole gradient

    @property
    def is_sharded(self) -> bool:
        """Whether this rank steps a share, and others the rest."""
        return self.zero >= 1 and len(self.group) > 1

    @property
    def share(self) -> slice:
        """What this rank steps of the flat elements."""
        if not self.is_sharded:
            return slice(0, self.length)
        size = self.length // len(self.group)
        at = self.group.index(dist.get_rank()) * size
        return slice(at, at + size)

    @property
    def summed_gradient(self) -> Tensor:
        """The gradient of the share."""
        return self.gradient if self.zero >= 2 else self.gradient[self.share]

    @property
    def own_weight(self) -> Tensor | None:
        """The weights of the share, if there are flat ones."""
        return self.weight if self.weight is None or self.zero == 3 else self.weight[self.share]

    @property
    def counts(self) -> bool:
        """Whether this rank counts the share for all who have it."""
        return self.is_first and (self.is_sharded or self.group[0] == dist.get_rank())

    def pieces(self, flat: Tensor) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
        """The elements of every parameter in `flat`, which is laid out as the bucket, and where they are in it."""
        for name, place in self.places.items():
            yield name, flat[place.at].view(place.shape), place.where


def buckets(
    of_plan: Sequence[BucketParts],
    parts: Sequence[ParameterPart],
    dtype: torch.dtype,
    device: torch.device,
    block: int = 1,
) -> list[Bucket]:
    """Of all buckets of a plan, those of a rank that holds `parts`: with gradients of `dtype`, no weights. What
    ranks sum for each other is a multiple of `block` elements."""
    rank, by_name = dist.get_rank(), {part.name: part for part in parts}
    return [
        _bucket(number, bucket, by_name, block, torch.empty(0, dtype=dtype, device=device))
        for number, bucket in enumerate(of_plan)
        if rank in bucket.held.ranks
    ]


def _bucket(number: int, bucket: BucketParts, by_name: Mapping[str, ParameterPart], block: int, like: Tensor) -> Bucket:
    rank, groups = dist.get_rank(), bucket.groups()
    group = next(group for group in groups if rank in group)
    size = sum(prod(part.local_shape) for part in bucket.parts)
    multiple = lcm(*map(len, groups)) if bucket.is_sharded else 1
    if block > 1:
        sizes = [len(ranks) for ranks, *_ in bucket.between()]
        multiple = lcm(*map(len, groups)) * lcm(*sizes) * block
    length = -(-size // multiple) * multiple
    places, at = {}, 0
    for part in bucket.parts:
        end, mine = at + prod(part.local_shape), by_name[part.name]
        where = tuple(
            slice(part.start - mine.start, part.end - mine.start) if d == part.dim else slice(None)
            for d in range(len(part.shape))
        )
        places[part.name] = Place(slice(at, end), part.local_shape, where)
        at = end
    between = {
        ranks: slice(first * length // units, end * length // units)
        for ranks, first, end, units in bucket.between()
        if rank in ranks
    }
    gradient = like.new_zeros(length // len(group) if bucket.zero >= 2 else length)
    is_first = group == groups[0]
    return Bucket(number, group, is_first, between, bucket.decays, bucket.zero, bucket.parts, length, places, gradient)


class GradientSync:
    """Collects the gradients of a step in buckets, and sums them over the ranks that hold the same elements.

    From ZeRO-2 on, a bucket is whole only from its unit's backward until its gradients are scattered. Two units are
    whole at most: the one that is made, and the one before it, which is scattered meanwhile. Where sums are
    `quantized`, there are none of these.
    """

    def __init__(
        self,
        of_rank: Sequence[Bucket],
        weights: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
        *,
        quantized: bool = False,
    ) -> None:
        self._buckets, self._groups = {bucket.number: bucket for bucket in of_rank}, groups
        self._is_quantized = quantized
        self._works: list[dist.Work] = []
        self._returning: list[QuantizedSum] = []  # sums that all of a group need
        self._between: list[QuantizedSum] = []
        self._of: dict[str, list[Bucket]] = defaultdict(list)
        self._collected: dict[str, nn.Parameter] = {}  # whose gradients are added to buckets here
        self._scattered: tuple[list[Bucket], list[Bucket]] = [], []  # of the unit before the last one, of the last
        self.most_bytes = 0
        """The most that whole gradients of units, or quantised ones, have held at once."""
        for bucket in of_rank:
            for name in bucket.places:
                self._of[name].append(bucket)
        for name, weight in weights.items():
            if name in self._of and not self._is_added_in_place(name, weight):
                self._collected[name] = weight
                hook = partial(self._add_to_buckets, name)
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _is_added_in_place(self, name: str, weight: nn.Parameter) -> bool:
        """Let autograd add a parameter's gradients where its bucket has them, which takes the host no time: where it is
        whole in one that lasts, and of its type."""
        bucket, *others = self._of[name]
        place = bucket.places[name]
        is_scattered = bucket.zero >= 2 and bucket.is_sharded
        if others or is_scattered or place.shape != weight.shape or bucket.gradient.dtype != weight.dtype:
            return False
        weight.grad = bucket.gradient[place.at].view(place.shape)
        return True

    def begin(self) -> None:
        """Before the first backward of a step."""
        for bucket in self._buckets.values():
            bucket.gradient.zero_()

    def collect(self) -> None:
        """Take the gradients that weights have been given outside of a backward."""
        for name, weight in self._collected.items():
            if weight.grad is not None:
                self._add_to_buckets(name, weight)

    def _add_to_buckets(self, name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is None:  # it is put off: a split backward leaves it to `collect`
            return
        for bucket in self._of[name]:
            place = bucket.places[name]
            self._whole(bucket)[place.at].view(place.shape).add_(gradient[place.where])

    def _whole(self, bucket: Bucket) -> Tensor:
        if bucket.zero < 2 or not bucket.is_sharded:
            return bucket.gradient
        if bucket.whole is None:
            bucket.whole = bucket.gradient.new_zeros(bucket.length)
            held = sum(other.whole.nbytes for other in self._buckets.values() if other.whole is not None)
            self.most_bytes = max(self.most_bytes, held)
        return bucket.whole

    def start(self, collective: BucketCollective) -> None:
        """Start a collective; those before it, of the same bucket, are waited for."""
        bucket, group = self._buckets[collective.bucket], self._groups.of(collective.ranks)
        match collective.kind:
            case CollectiveKind.SUM_BETWEEN:
                self._settle(bucket)
                first = bucket.share.start if bucket.zero >= 2 else 0
                at = bucket.between[collective.ranks]
                elements = bucket.gradient[at.start - first : at.stop - first]
                if self._is_quantized:
                    self._between.append(QuantizedSum(elements, group))
                    self._count()
                else:
                    self._works.append(dist.all_reduce(elements, group=group, async_op=True))
            case CollectiveKind.SCATTER:
                # What the micro-batches before have summed goes into the sum once more, so nothing is added after it.
                whole = self._whole(bucket)
                whole[bucket.share] += bucket.gradient
                bucket.work = dist.reduce_scatter_single(bucket.gradient, whole, group=group, async_op=True)
                self._scattered[1].append(bucket)
            case _ if self._is_quantized:
                bucket.quantized = QuantizedSum(bucket.gradient, group)
                self._count()
            case _ if bucket.is_sharded:
                bucket.scattered = bucket.gradient[bucket.share].clone()
                bucket.work = dist.reduce_scatter_single(bucket.scattered, bucket.gradient, group=group, async_op=True)
            case _:
                bucket.work = dist.all_reduce(bucket.gradient, group=group, async_op=True)

    def begin_part(self, is_first: bool) -> None:
        """Before a part of a backward: wait for what has been scattered beside the part before, if any."""
        earlier, last = self._scattered
        for bucket in earlier + (last if is_first else []):
            self._settle(bucket)
        self._scattered = [] if is_first else last, []

    def finish(self) -> None:
        """Wait for all sums. Parameters without a gradient count as zero."""
        for bucket in self._buckets.values():
            self._settle(bucket)
        for sums in self._between:
            sums.reduce()
            sums.spread()
        self._returning += self._between
        self._count()
        while self._returning:
            self._returning.pop(0).finish()
        self._between = []
        while self._works:
            self._works.pop(0).wait()

    def _count(self) -> None:
        """What quantised gradients hold now."""
        first = [bucket.quantized for bucket in self._buckets.values() if bucket.quantized is not None]
        held = sum(sums.num_bytes for sums in first + self._between + self._returning)
        self.most_bytes = max(self.most_bytes, held)

    def _settle(self, bucket: Bucket) -> None:
        if bucket.quantized is not None:
            bucket.quantized.reduce()
            if not bucket.is_sharded:
                bucket.quantized.spread()
                self._returning.append(bucket.quantized)
            bucket.quantized = None
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = bucket.whole = None
        if bucket.scattered is not None:
            bucket.gradient[bucket.share] = bucket.scattered
            bucket.scattered = None

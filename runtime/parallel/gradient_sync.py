"""Gradients of parameters that several ranks hold: summed in flat buckets, beside the last backward.

The elements that the same ranks hold share buckets (`runtime/mapping/buckets.py`). Each rank adds what its own tokens
and heads contribute, so a plain sum is right for every kind of holder: pipelines, replicas, ranks of a TP group that
hold a norm whole, and those that share a key-value head. When a bucket's collective starts, stands in the rank's
actions, so that all ranks start them in one order.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.buckets import BucketParts, GradientCollective
from runtime.mapping.parts import ParameterPart
from runtime.network import ProcessGroups


@dataclass(eq=False)
class Bucket:
    """A rank's own of a bucket: elements of parameters that the same ranks hold, flat; decayed by the optimiser or not.

    `number` is that of the plan's bucket. `views[name]` pairs the bucket's elements with the rank's own part of a
    parameter. With `sharded`, each rank of the `group` ends up with the sum of an equal share of the bucket; otherwise
    all with the whole. What other sharding groups hold too is summed between them: `between` has the elements by ranks.
    Of several groups, the first one counts for all.
    """

    number: int
    group: tuple[int, ...]
    is_first: bool
    between: dict[tuple[int, ...], slice]
    decays: bool
    sharded: bool
    parts: tuple[ParameterPart, ...]
    gradient: Tensor
    views: dict[str, tuple[Tensor, tuple[slice, ...]]]
    work: dist.Work | None = None
    scattered: Tensor | None = None  # where a collective puts this rank's share

    @property
    def share(self) -> slice:
        """What this rank keeps of the flat elements."""
        if not self.sharded:
            return slice(0, len(self.gradient))
        size = len(self.gradient) // len(self.group)
        at = self.group.index(dist.get_rank()) * size
        return slice(at, at + size)

    @property
    def counts(self) -> bool:
        """Whether this rank counts the share for all who have it."""
        return self.is_first and (self.sharded or self.group[0] == dist.get_rank())


def buckets(
    found: Sequence[BucketParts], own: Sequence[ParameterPart], dtype: torch.dtype, device: torch.device
) -> list[Bucket]:
    """Of all buckets of a plan, those of a rank that holds the parts `own`; gradients of `dtype`."""
    by_name = {part.name: part for part in own}
    return [
        _bucket(number, bucket, by_name, dtype, device)
        for number, bucket in enumerate(found)
        if dist.get_rank() in bucket.held.ranks
    ]


def _bucket(
    number: int, bucket: BucketParts, own: dict[str, ParameterPart], dtype: torch.dtype, device: torch.device
) -> Bucket:
    rank, groups = dist.get_rank(), bucket.groups()
    group = next(group for group in groups if rank in group)
    size = sum(prod(part.local_shape) for part in bucket.parts)
    multiple = lcm(*map(len, groups)) if bucket.sharded else 1
    flat = torch.zeros(-(-size // multiple) * multiple, dtype=dtype, device=device)
    views, at = {}, 0
    for part in bucket.parts:
        length = prod(part.local_shape)
        mine = own[part.name]
        where = tuple(
            slice(part.start - mine.start, part.end - mine.start) if d == part.dim else slice(None)
            for d in range(len(part.shape))
        )
        views[part.name] = flat[at : at + length].view(part.local_shape), where
        at += length
    between = {
        ranks: slice(first * len(flat) // units, end * len(flat) // units)
        for ranks, first, end, units in bucket.between()
        if rank in ranks
    }
    sharded = bucket.sharded and len(group) > 1
    return Bucket(number, group, group == groups[0], between, bucket.decays, sharded, bucket.parts, flat, views)


class GradientSync:
    """Collects the gradients of a step in buckets, and sums them over the ranks that hold the same elements."""

    def __init__(self, found: Sequence[Bucket], weights: dict[str, nn.Parameter], groups: ProcessGroups) -> None:
        self._buckets, self._groups = {bucket.number: bucket for bucket in found}, groups
        self._works: list[dist.Work] = []
        self._of: dict[str, list[Bucket]] = defaultdict(list)
        for bucket in found:
            for name in bucket.views:
                self._of[name].append(bucket)
        for name, weight in weights.items():
            if name in self._of:
                hook = partial(self._came, name)
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before the first backward of a step."""
        for bucket in self._buckets.values():
            bucket.gradient.zero_()

    def _came(self, name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        for bucket in self._of[name]:
            view, where = bucket.views[name]
            view += gradient[where]

    def start(self, one: GradientCollective) -> None:
        """Start a collective; those before it, of the same bucket, are waited for."""
        bucket, group = self._buckets[one.bucket], self._groups.of(one.ranks)
        if one.between:
            self._settle(bucket)
            elements = bucket.gradient[bucket.between[one.ranks]]
            self._works.append(dist.all_reduce(elements, group=group, async_op=True))
        elif bucket.sharded:
            bucket.scattered = bucket.gradient[bucket.share].clone()
            bucket.work = dist.reduce_scatter_single(bucket.scattered, bucket.gradient, group=group, async_op=True)
        else:
            bucket.work = dist.all_reduce(bucket.gradient, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for all sums. Parameters without a gradient count as zero."""
        for bucket in self._buckets.values():
            self._settle(bucket)
        while self._works:
            self._works.pop(0).wait()

    def _settle(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        if bucket.scattered is not None:
            bucket.gradient[bucket.share] = bucket.scattered
            bucket.scattered = None

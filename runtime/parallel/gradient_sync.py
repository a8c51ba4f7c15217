"""Gradients of parameters that several ranks hold: summed in flat buckets, beside the last backward.

The elements that the same ranks hold share buckets (`Layout.held`). Each rank adds what its own tokens and heads
contribute, so a plain sum is right for every kind of holder: pipelines, replicas, ranks of a TP group that hold a norm
whole, and those that share a key-value head. A bucket's collective starts as soon as its last gradient has come, in the
same order on all of its ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.layout import HeldParts
from runtime.mapping.parts import ParameterPart
from runtime.parallel.groups import ProcessGroups

_BUCKET_ELEMENTS = 8_000_000  # of a bucket, unless one parameter is larger


@dataclass(eq=False)
class Bucket:
    """Elements of parameters that the same ranks hold, flat; decayed by the optimiser or not.

    `views[name]` pairs the bucket's elements with the rank's own part of a parameter. With `sharded`, each rank of the
    `group` ends up with the sum of an equal share of the bucket; otherwise all with the whole. What other sharding
    groups hold too is summed between them: `between` has the ranks and the elements. Of several groups, the first one
    counts for all.
    """

    group: tuple[int, ...]
    is_first: bool
    between: tuple[tuple[tuple[int, ...], slice], ...]
    decays: bool
    sharded: bool
    parts: tuple[ParameterPart, ...]
    gradient: Tensor
    views: dict[str, tuple[Tensor, tuple[slice, ...]]]
    missing: set[str] = field(default_factory=set)
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
    held: Sequence[HeldParts], parts: Sequence[ParameterPart], dtype: torch.dtype, device: torch.device, shard: bool
) -> list[Bucket]:
    """The buckets of a rank that holds `parts`; gradients of `dtype`, sharded over their ranks if `shard`."""
    own, rank, found = {part.name: part for part in parts}, dist.get_rank(), []
    for same in held:
        if rank not in same.ranks:
            continue
        by_decay: dict[bool, list[ParameterPart]] = defaultdict(list)
        for part in same.parts:
            if prod(part.local_shape):
                by_decay[part.decays].append(part)
        for decays, kept in by_decay.items():
            for some in _filled(kept):
                found.append(_bucket(same, decays, shard, some, own, dtype, device))
    return found


def _filled(parts: Sequence[ParameterPart]) -> list[list[ParameterPart]]:
    found: list[list[ParameterPart]] = []
    size = 0
    for part in parts:
        length = prod(part.local_shape)
        if not found or size + length > _BUCKET_ELEMENTS:
            found.append([])
            size = 0
        found[-1].append(part)
        size += length
    return found


def _bucket(
    same: HeldParts,
    decays: bool,
    shard: bool,
    parts: Sequence[ParameterPart],
    own: dict[str, ParameterPart],
    dtype: torch.dtype,
    device: torch.device,
) -> Bucket:
    rank = dist.get_rank()
    groups = same.groups if shard else (same.ranks,)
    group = next(group for group in groups if rank in group)
    size = sum(prod(part.local_shape) for part in parts)
    multiple = lcm(*map(len, groups)) if shard else 1
    flat = torch.zeros(-(-size // multiple) * multiple, dtype=dtype, device=device)
    views, at = {}, 0
    for part in parts:
        length = prod(part.local_shape)
        mine = own[part.name]
        where = tuple(
            slice(part.start - mine.start, part.end - mine.start) if d == part.dim else slice(None)
            for d in range(len(part.shape))
        )
        views[part.name] = flat[at : at + length].view(part.local_shape), where
        at += length
    between = [
        (ranks, slice(first * len(flat) // units, end * len(flat) // units))
        for ranks, first, end, units in (same.between() if shard else [])
        if rank in ranks
    ]
    return Bucket(
        group, group == groups[0], tuple(between), decays, shard and len(group) > 1, tuple(parts), flat, views
    )


class GradientSync:
    """Collects the gradients of a step in buckets, and sums them over the ranks that hold the same elements."""

    def __init__(self, found: Sequence[Bucket], weights: dict[str, nn.Parameter], groups: ProcessGroups) -> None:
        self.buckets, self._weights, self._groups = list(found), weights, groups
        self._of: dict[str, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            for name in bucket.views:
                self._of[name].append(bucket)
        self._ending: set[str] = set()
        for name, weight in weights.items():
            if name in self._of:
                hook = partial(self._came, name)
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before the first backward of a step."""
        self._ending.clear()
        for bucket in self.buckets:
            bucket.gradient.zero_()
            bucket.missing, bucket.work = set(bucket.views), None

    def ending(self, names: Sequence[str]) -> None:
        """The next gradients of these parameters are the last ones of the step."""
        self._ending.update(names)

    def ended(self, names: Sequence[str]) -> None:
        """The last gradients of these parameters have arrived without having been announced by `ending`."""
        for name in names:
            for bucket in self._of[name]:
                bucket.missing.discard(name)
        self._start(False)

    def _came(self, name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        for bucket in self._of[name]:
            view, where = bucket.views[name]
            view += gradient[where]
            if name in self._ending:
                bucket.missing.discard(name)
        if name in self._ending:
            self._start(False)

    def _start(self, even_if_missing: bool) -> None:
        """Start the collectives of complete buckets: all ranks of a group must issue them in the same order."""
        blocked: set[tuple[int, ...]] = set()
        for bucket in self.buckets:
            if bucket.work is not None or len(bucket.group) == 1 or bucket.group in blocked:
                continue
            if bucket.missing and not even_if_missing:
                blocked.add(bucket.group)
                continue
            group = self._groups.of(bucket.group)
            if bucket.sharded:
                own = bucket.gradient[bucket.share].clone()
                bucket.work = dist.reduce_scatter_single(own, bucket.gradient, group=group, async_op=True)
                bucket.scattered = own
            else:
                bucket.work = dist.all_reduce(bucket.gradient, group=group, async_op=True)

    def finish(self) -> None:
        """After the last backward, wait for all sums. Parameters without a gradient count as zero."""
        self._start(True)
        works: list[dist.Work] = []
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if bucket.scattered is not None:
                    bucket.gradient[bucket.share] = bucket.scattered
                    bucket.scattered = None
            for ranks, elements in bucket.between:
                works.append(dist.all_reduce(bucket.gradient[elements], group=self._groups.of(ranks), async_op=True))
        for work in works:
            work.wait()

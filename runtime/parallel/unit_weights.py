"""Weights under ZeRO-3: a rank keeps its share of each unit, and has the unit whole while it is run.

When a bucket is gathered, stands in the rank's actions, one part of an operation ahead. Parameters are the same objects
all the time, so that graphs of forwards find them again: what they hold comes and goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.actions import Unit
from runtime.mapping.buckets import BucketCollective
from runtime.mapping.parts import ParameterPart
from runtime.network import ProcessGroups
from runtime.parallel.gradient_sync import Bucket


@dataclass(frozen=True, eq=False, slots=True)
class _Coming:
    whole: Tensor
    work: dist.Work


class UnitWeights:
    """The weights of a rank that are in buckets of ZeRO-3; `units` has the numbers of each unit's buckets."""

    def __init__(
        self,
        found: Sequence[Bucket],
        units: Mapping[Unit, Sequence[int]],
        weights: Mapping[str, nn.Parameter],
        own: Sequence[ParameterPart],
        groups: ProcessGroups,
    ) -> None:
        buckets = {bucket.number: bucket for bucket in found if bucket.zero == 3}
        self._units = {unit: [buckets[n] for n in numbers if n in buckets] for unit, numbers in units.items()}
        self._buckets, self._weights, self._groups = buckets, weights, groups
        self._shapes = {part.name: part.local_shape for part in own}
        self._coming: dict[int, _Coming] = {}
        self._using: dict[int | str, Tensor] = {}  # by bucket, and joined ones by parameter
        self.most_bytes = 0
        """The most that whole units have held at once."""

    def gather(self, one: BucketCollective) -> None:
        """Begin to gather a bucket."""
        bucket = self._buckets[one.bucket]
        assert bucket.weight is not None
        whole = bucket.weight.new_empty(bucket.length)
        work = dist.all_gather_single(whole, bucket.weight, group=self._groups.of(one.ranks), async_op=True)
        assert work is not None
        self._coming[one.bucket] = _Coming(whole, work)
        self._count()

    def begin(self, units: Sequence[Unit]) -> None:
        """Before units are run: wait for what they need, and let their parameters have it."""
        for bucket in (bucket for unit in units for bucket in self._units.get(unit, ())):
            whole = bucket.weight
            if bucket.sharded:
                coming = self._coming.pop(bucket.number)
                coming.work.wait()
                self._using[bucket.number] = whole = coming.whole
            assert whole is not None
            for name, view, where in bucket.pieces(whole):
                weight = self._weights[name]
                if view.shape == self._shapes[name]:
                    weight.data = view
                else:  # a key-value head that other ranks share, beside others
                    if name not in self._using:
                        self._using[name] = weight.data = view.new_empty(self._shapes[name])
                    weight.data[where] = view
        self._count()

    def end(self, units: Sequence[Unit]) -> None:
        """After units have been run: give back what they needed."""
        for bucket in (bucket for unit in units for bucket in self._units.get(unit, ())):
            self._using.pop(bucket.number, None)
            for name in bucket.places:
                self._using.pop(name, None)
                self._weights[name].data = self._weights[name].data.new_empty(0)

    def _count(self) -> None:
        held = [coming.whole for coming in self._coming.values()] + [*self._using.values()]
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in held))

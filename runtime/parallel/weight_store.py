"""A rank's weights: where they lie, when those that others step come, and under ZeRO-3 when they are there at all.

Weights are views of what their buckets hold flat, so that an optimizer steps them where they are. Under ZeRO-1 and 2 it
begins to gather what each holder has stepped, bucket by bucket, in the order in which forwards need it: the same one on
all ranks, and before anything else of the next step. A forward waits, unit by unit, for what it is about to use;
whoever else reads weights waits for all. Under ZeRO-3 a rank keeps its share of each unit, and has the unit whole while
it is run: gathers stand in its actions, one part of an operation ahead. Parameters are the same objects all the time,
so that graphs of forwards find them again: what they hold comes and goes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.actions import Unit
from runtime.mapping.buckets import BucketCollective
from runtime.mapping.parts import ParameterPart
from runtime.network import ProcessGroups
from runtime.parallel.gradient_sync import Bucket


@dataclass(frozen=True, eq=False, slots=True)
class _Coming:
    bucket: Bucket
    whole: Tensor
    work: dist.Work | None


class WeightStore:
    """The weights of the `parts` of a rank, with their `initial` values: frozen ones of the type and device of `like`,
    others of `dtype`. `units` has the numbers of each unit's buckets.

    Parameters that lie in several buckets have memory of their own, and none of their buckets a `weight`; those in
    buckets of ZeRO-3 are without elements between units, and the buckets have this rank's share.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parts: Sequence[ParameterPart],
        initial: Callable[[ParameterPart], Tensor],
        units: Mapping[Unit, Sequence[int]],
        groups: ProcessGroups,
        like: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._units, self._groups, self.dtype, self.device = units, groups, dtype, like.device
        self._buckets = {bucket.number: bucket for bucket in buckets}
        self._parts = {part.name: part for part in parts}
        self.parameters = self._first(initial, like)
        """By name, in the order of the parts."""
        self._apart = {
            bucket.number: [self.parameters[name].data[place.where] for name, place in bucket.places.items()]
            for bucket in buckets
            if bucket.weight is None
        }
        self._stepped: dict[int, _Coming] = {}  # what others have stepped, by bucket
        self._gathered: dict[int, _Coming] = {}  # units of ZeRO-3, likewise
        self._using: dict[int | str, Tensor] = {}  # whole units by bucket, and joined ones by parameter
        self.most_bytes = 0
        """The most that whole units of ZeRO-3 have held at once."""

    def _first(self, initial: Callable[[ParameterPart], Tensor], like: Tensor) -> dict[str, nn.Parameter]:
        weights: dict[str, nn.Parameter] = {}
        for bucket in self._buckets.values():
            parts = [self._parts[name] for name in bucket.places]
            if bucket.zero == 3:
                bucket.weight = self._first_share(bucket, initial, like)
                weights |= {part.name: nn.Parameter(like.new_empty(0, dtype=self.dtype)) for part in parts}
            elif all(bucket.places[part.name].shape == part.local_shape for part in parts):
                bucket.weight = like.new_zeros(bucket.length, dtype=self.dtype)
                for name, view, _ in bucket.pieces(bucket.weight):
                    weights[name] = nn.Parameter(view)
                    weights[name].data.copy_(initial(self._parts[name]))
        for part in self._parts.values():
            if part.name not in weights:
                weight = like.new_empty(part.local_shape, dtype=self.dtype if part.trained else like.dtype)
                weights[part.name] = nn.Parameter(weight, part.trained)
                weight.copy_(initial(part))
        return {name: weights[name] for name in self._parts}

    def _first_share(self, bucket: Bucket, initial: Callable[[ParameterPart], Tensor], like: Tensor) -> Tensor:
        share = bucket.share
        values = like.new_zeros(share.stop - share.start, dtype=self.dtype)
        for part in bucket.parts:
            at = bucket.places[part.name].at
            low, high = max(at.start, share.start), min(at.stop, share.stop)
            if low < high:
                piece = initial(part).flatten()[low - at.start : high - at.start]
                values[low - share.start : high - share.start].copy_(piece)
        return values

    # ------------------------------------------------------------------ what others step

    @property
    def are_under_way(self) -> bool:
        """Whether any weights that others have stepped are still to come."""
        return bool(self._stepped)

    @torch.no_grad()
    def lay_out(self, bucket: Bucket, flat: Tensor) -> None:
        """Copy the weights of a bucket that has no flat ones to where they are in `flat`."""
        torch._foreach_copy_(_views(bucket, flat), self._apart[bucket.number])

    @torch.no_grad()
    def give(self, bucket: Bucket, master: Tensor) -> None:
        """Give every holder the new weights, of which this rank has its share `master`; under ZeRO-3, its share. What
        others have yet to send is under way."""
        whole = bucket.weight
        if bucket.is_sharded and bucket.zero < 3:
            whole = master.new_empty(bucket.length, dtype=self.dtype) if whole is None else whole
            share = whole[bucket.share]
            if share.data_ptr() != master.data_ptr():
                share.copy_(master)
            self._stepped[bucket.number] = self._begin(bucket, whole, share, bucket.group)
        elif whole is None:
            self._take(bucket, master.to(self.dtype))
        elif whole.data_ptr() != master.data_ptr():
            whole.copy_(master)

    def after(self, unit: Unit, part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A part of a forward, which runs `unit`: as it is, or behind the weights that are still to come for it."""
        numbers = [number for number in self._units.get(unit, ()) if number in self._stepped]
        if not numbers:
            return part

        def waiting(x: Tensor) -> Tensor:
            self._wait(numbers)
            return part(x)

        return waiting

    def finish(self) -> None:
        """Wait for all weights: before any are read outside of a forward."""
        self._wait(tuple(self._stepped))

    def _wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            coming = self._stepped.pop(number, None)
            if coming is not None:
                whole = _wait_for(coming)
                if coming.bucket.weight is None:
                    self._take(coming.bucket, whole)

    @torch.no_grad()
    def _take(self, bucket: Bucket, whole: Tensor) -> None:
        torch._foreach_copy_(self._apart[bucket.number], _views(bucket, whole))

    def _begin(self, bucket: Bucket, whole: Tensor, share: Tensor, ranks: tuple[int, ...]) -> _Coming:
        work = dist.all_gather_single(whole, share, group=self._groups.of(ranks), async_op=True)
        return _Coming(bucket, whole, work)

    # ------------------------------------------------------------------ ZeRO-3

    def gather(self, collective: BucketCollective) -> None:
        """Begin to gather a bucket."""
        bucket = self._buckets[collective.bucket]
        assert bucket.weight is not None
        whole = bucket.weight.new_empty(bucket.length)
        self._gathered[collective.bucket] = self._begin(bucket, whole, bucket.weight, collective.ranks)
        self._count()

    def use(self, units: Sequence[Unit]) -> None:
        """Before units are run: wait for what they need, and let their parameters have it."""
        for bucket in self._of(units):
            whole = bucket.weight
            if bucket.is_sharded:
                self._using[bucket.number] = whole = _wait_for(self._gathered.pop(bucket.number))
            assert whole is not None
            for name, view, where in bucket.pieces(whole):
                weight, shape = self.parameters[name], self._parts[name].local_shape
                if view.shape == shape:
                    weight.data = view
                else:  # a key-value head that other ranks share, beside others
                    if name not in self._using:
                        self._using[name] = weight.data = view.new_empty(shape)
                    weight.data[where] = view
        self._count()

    def release(self, units: Sequence[Unit]) -> None:
        """After units have been run: give back what they needed."""
        for bucket in self._of(units):
            self._using.pop(bucket.number, None)
            for name in bucket.places:
                self._using.pop(name, None)
                self.parameters[name].data = self.parameters[name].data.new_empty(0)

    def _of(self, units: Sequence[Unit]) -> list[Bucket]:
        buckets = [self._buckets[number] for unit in units for number in self._units.get(unit, ())]
        return [bucket for bucket in buckets if bucket.zero == 3]

    def _count(self) -> None:
        held = [coming.whole for coming in self._gathered.values()] + [*self._using.values()]
        self.most_bytes = max(self.most_bytes, sum(tensor.nbytes for tensor in held))


def _wait_for(coming: _Coming) -> Tensor:
    """What has been gathered, once it is."""
    assert coming.work is not None
    coming.work.wait()
    return coming.whole


def _views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The elements of every parameter in `flat`, which is laid out as the bucket."""
    return [view for _, view, _ in bucket.pieces(flat)]

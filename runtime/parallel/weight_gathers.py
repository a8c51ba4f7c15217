"""Weights of which every holder steps a share: gathered beside the next forwards, each of which waits for what it uses.

The optimiser begins the gathers, bucket by bucket, in the order in which forwards need them: the same one on all ranks,
and before anything else of the next step. A forward waits, unit by unit, for the buckets that it is about to use;
whoever else reads weights waits for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.actions import Unit
from runtime.network import ProcessGroups
from runtime.parallel.gradient_sync import Bucket


@dataclass(frozen=True, eq=False, slots=True)
class _Coming:
    bucket: Bucket
    whole: Tensor
    work: dist.Work


class WeightGathers:
    """The weights of a rank that others step, on their way; `units` has the numbers of each unit's buckets."""

    def __init__(
        self,
        found: Sequence[Bucket],
        units: Mapping[Unit, Sequence[int]],
        weights: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
    ) -> None:
        self._units, self._groups = units, groups
        self._coming: dict[int, _Coming] = {}
        self._held = {
            bucket.number: [weights[name].data[place.where] for name, place in bucket.places.items()]
            for bucket in found
            if bucket.weight is None
        }
        """The weights of each bucket that has no flat ones."""

    @property
    def are_under_way(self) -> bool:
        """Whether any weights are still to come."""
        return bool(self._coming)

    @torch.no_grad()
    def lay_out(self, bucket: Bucket, flat: Tensor) -> None:
        """Copy the weights of a bucket that has no flat ones to where they are in `flat`."""
        torch._foreach_copy_(_pieces(bucket, flat), self._held[bucket.number])

    @torch.no_grad()
    def begin(self, bucket: Bucket, master: Tensor, dtype: torch.dtype) -> None:
        """Give every holder the new weights, of which this rank has its share `master`; under ZeRO-3, its share. What
        others have yet to send is under way."""
        whole = bucket.weight
        if bucket.sharded and bucket.zero < 3:
            whole = master.new_empty(bucket.length, dtype=dtype) if whole is None else whole
            own = whole[bucket.share]
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
            work = dist.all_gather_single(whole, own, group=self._groups.of(bucket.group), async_op=True)
            assert work is not None
            self._coming[bucket.number] = _Coming(bucket, whole, work)
        elif whole is None:
            self._take(bucket, master.to(dtype))
        elif whole.data_ptr() != master.data_ptr():
            whole.copy_(master)

    def after(self, unit: Unit, part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A part of a forward, which runs `unit`: as it is, or behind the weights that are still to come for it."""
        numbers = [number for number in self._units.get(unit, ()) if number in self._coming]
        if not numbers:
            return part

        def waiting(x: Tensor) -> Tensor:
            self._wait(numbers)
            return part(x)

        return waiting

    def finish(self) -> None:
        """Wait for all weights: before any are read outside of a forward."""
        self._wait(tuple(self._coming))

    def _wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            coming = self._coming.pop(number, None)
            if coming is not None:
                coming.work.wait()
                if coming.bucket.weight is None:
                    self._take(coming.bucket, coming.whole)

    @torch.no_grad()
    def _take(self, bucket: Bucket, whole: Tensor) -> None:
        torch._foreach_copy_(self._held[bucket.number], _pieces(bucket, whole))


def _pieces(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The elements of every parameter in `flat`, which is laid out as the bucket."""
    return [view for _, view, _ in bucket.pieces(flat)]

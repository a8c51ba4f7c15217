"""The first weights of a rank, laid out flat in its buckets, as gradients and the optimiser's states are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from runtime.mapping.parts import ParameterPart
from runtime.parallel.gradient_sync import Bucket


def first_weights(
    found: Sequence[Bucket],
    own: Sequence[ParameterPart],
    initial: Callable[[ParameterPart], Tensor],
    dtype: torch.dtype,
    device: torch.device,
    trained_dtype: torch.dtype | None = None,
) -> dict[str, nn.Parameter]:
    """A rank's parameters with their first values, of `dtype`, or, trained, of their own: views of the `weight` that
    their buckets get.

    So an optimiser steps them where they are. Those that lie in several buckets have memory of their own, and none of
    their buckets a `weight`. Those in buckets of ZeRO-3 are without elements, and the buckets get this rank's share.
    """
    parts, frozen_dtype, dtype = {part.name: part for part in own}, dtype, trained_dtype or dtype
    weights: dict[str, nn.Parameter] = {}
    for bucket in found:
        if bucket.zero == 3:
            bucket.weight = _share(bucket, initial, dtype, device)
            weights |= {name: nn.Parameter(torch.empty(0, dtype=dtype, device=device)) for name in bucket.places}
        elif all(place.shape == parts[name].local_shape for name, place in bucket.places.items()):
            bucket.weight = torch.zeros(bucket.length, dtype=dtype, device=device)
            for name, view, _ in bucket.pieces(bucket.weight):
                weights[name] = nn.Parameter(view)
                weights[name].data.copy_(initial(parts[name]))
    for part in own:
        if part.name not in weights:
            weight = torch.empty(part.local_shape, dtype=dtype if part.trained else frozen_dtype, device=device)
            weights[part.name] = nn.Parameter(weight, part.trained)
            weight.copy_(initial(part))
    return {part.name: weights[part.name] for part in own}


def _share(
    bucket: Bucket, initial: Callable[[ParameterPart], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """This rank's share of a bucket's first values."""
    share = bucket.share
    found = torch.zeros(share.stop - share.start, dtype=dtype, device=device)
    for part in bucket.parts:
        at = bucket.places[part.name].at
        low, high = max(at.start, share.start), min(at.stop, share.stop)
        if low < high:
            values = initial(part).flatten()[low - at.start : high - at.start]
            found[low - share.start : high - share.start].copy_(values)
    return found

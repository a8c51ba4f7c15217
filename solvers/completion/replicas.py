"""Replicas in a search: how many samples of a micro-batch each replica takes, and what a stage of them is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Share(NamedTuple):
    """One replica's part of a stage: a site and the samples of each micro-batch that come to it."""

    site: Any
    samples: int


def dealt_samples(seconds: Sequence[Callable[[int], float]], micro_batch_size: int) -> tuple[int, ...]:
    """Samples per replica, at least one each, that make the slowest as fast as possible.

    `seconds[k]` is what replica k takes for so many samples; where it never falls, dealing every sample to the
    replica that would have it done first is exact.
    """
    samples = [1] * len(seconds)
    after = [own(2) for own in seconds]
    for _ in range(micro_batch_size - len(samples)):
        k = min(range(len(samples)), key=after.__getitem__)
        samples[k] += 1
        after[k] = seconds[k](samples[k] + 1)
    return tuple(samples)

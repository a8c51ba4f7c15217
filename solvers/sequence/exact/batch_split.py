"""The optimal split of the global batch over pipelines, each with its own micro-batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

PipelineSeconds = Sequence[dict[tuple[int, int], float]]


@dataclass(frozen=True)
class BatchSplit:
    """Micro-batches of each pipeline as (size in sequences, number), and when the last pipeline finishes."""

    batches: tuple[tuple[int, int], ...]
    end_s: float


def best_split(seconds: PipelineSeconds, batch: int, uneven: bool) -> BatchSplit | None:
    """The split of `batch` sequences whose last pipeline finishes first; None where there is none.

    `seconds[p]` gives, by (size, number) of its micro-batches, when pipeline p would finish. Unless `uneven`, the
    pipelines' numbers of sequences differ by at most the largest micro-batch.
    """
    if uneven:
        return _within(seconds, batch, 1, batch, 0)
    sizes = sorted({size for own in seconds for size, _ in own})
    found = (
        _within([{k: s for k, s in own.items() if k[0] <= most} for own in seconds], batch, low, low + most, most)
        for most in sizes
        for low in range(1, batch + 1)
    )
    return min((split for split in found if split is not None), key=lambda split: split.end_s, default=None)


def _within(seconds: PipelineSeconds, batch: int, low: int, high: int, wanted: int) -> BatchSplit | None:
    """The best split with `low` to `high` sequences per pipeline and some micro-batch size of at least `wanted`."""
    # By sequences allocated so far, and whether some size was at least `wanted`.
    states: dict[tuple[int, bool], BatchSplit] = {(0, not wanted): BatchSplit((), 0.0)}
    for own in seconds:
        # For each number of sequences and either kind of size, the choice that finishes first.
        best: dict[tuple[int, bool], tuple[float, tuple[int, int]]] = {}
        for (size, count), end_s in own.items():
            key = size * count, size >= wanted
            if low <= size * count <= high and (key not in best or end_s < best[key][0]):
                best[key] = end_s, (size, count)
        after: dict[tuple[int, bool], BatchSplit] = {}
        for (allocated, has), split in states.items():
            for (sequences, large), (alone_s, chosen) in best.items():
                if allocated + sequences <= batch:
                    key, end_s = (allocated + sequences, has or large), max(split.end_s, alone_s)
                    if key not in after or end_s < after[key].end_s:
                        after[key] = BatchSplit((*split.batches, chosen), end_s)
        states = after
    return states.get((batch, True))

"""How many micro-batches each pipeline takes, so that the slowest pipeline is as fast as possible.

A pipeline of m micro-batches takes about fill + m · period. The least T with Σ size · ⌊(T − fill) / period⌋ ≥ batch is
found by bisection; the surplus is removed where that saves most time.
"""

from collections.abc import Sequence

from solvers.completion import allocation


def split_batch(
    fill_s: Sequence[float],
    period: Sequence[float],
    sizes: Sequence[int],
    global_batch: int,
    *,
    even: bool = False,
    multiples: Sequence[int] = (),
) -> list[int] | None:
    """Micro-batches per pipeline (each at least 1) with Σ size · count = global_batch; None where that is impossible.

    `even`: all pipelines get equally many sequences, up to one micro-batch. `multiples`: the divisor of each count.
    """
    if any(n > 1 for n in multiples):
        units = split_batch(
            fill_s,
            [b * n for b, n in zip(period, multiples, strict=True)],
            [s * n for s, n in zip(sizes, multiples, strict=True)],
            global_batch,
            even=even,
        )
        if units is None or (even and len(set(units)) > 1):
            return None
        return [count * n for count, n in zip(units, multiples, strict=True)]
    if sum(sizes) > global_batch:
        return None
    if even:
        return _even(sizes, global_batch)
    low, high = 0.0, max(f + b * (global_batch // s + 1) for f, b, s in zip(fill_s, period, sizes, strict=True))
    for _ in range(50):
        middle = 0.5 * (low + high)
        done = sum(s * max(1, int((middle - f) / b)) for f, b, s in zip(fill_s, period, sizes, strict=True))
        low, high = (low, middle) if done >= global_batch else (middle, high)
        if high - low <= 1e-6 * high:
            break
    counts = [max(1, int((high - f) / b)) for f, b in zip(fill_s, period, strict=True)]
    return _trim(counts, fill_s, period, sizes, global_batch)


def _trim(
    counts: list[int], fill_s: Sequence[float], period: Sequence[float], sizes: Sequence[int], global_batch: int
) -> list[int] | None:
    """Remove the surplus over the global batch from the pipelines that finish last; None where sizes do not add up."""
    surplus = sum(s * c for s, c in zip(sizes, counts, strict=True)) - global_batch
    while surplus > 0:
        fitting = [k for k, c in enumerate(counts) if c > 1 and sizes[k] <= surplus]
        if not fitting:
            break
        k = max(fitting, key=lambda k: fill_s[k] + period[k] * counts[k])
        counts[k] -= 1
        surplus -= sizes[k]
    if surplus > 0:
        # One micro-batch too large to take back whole: return it and fill up with smaller ones.
        for k in sorted(range(len(counts)), key=lambda k: -(fill_s[k] + period[k] * counts[k])):
            if counts[k] > 1 and sizes[k] > surplus:
                counts[k] -= 1
                surplus -= sizes[k]
                break
    while surplus < 0:
        fitting = [k for k in range(len(counts)) if sizes[k] <= -surplus]
        if not fitting:
            return None
        k = min(fitting, key=lambda k: fill_s[k] + period[k] * (counts[k] + 1))
        counts[k] += 1
        surplus += sizes[k]
    return counts if surplus == 0 else None


def _even(sizes: Sequence[int], global_batch: int) -> list[int] | None:
    if len(set(sizes)) > 1 or global_batch % sizes[0]:
        return None
    counts = allocation.even(global_batch // sizes[0], len(sizes))
    return counts if min(counts) else None

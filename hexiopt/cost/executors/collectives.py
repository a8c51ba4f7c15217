"""Seconds of communication inside a TP group: ring collectives, latency plus size over the slowest link."""

from math import ceil, log2


def ring_collective_s(num_bytes: float, ranks: int, bandwidth: float, latency_s: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` (the gathered size) over a ring of `ranks`.

    (n−1)/n of the bytes cross each link in n−1 messages (Thakur et al. 2005, "Optimization of collective
    communication operations in MPICH", section 4). `bandwidth` is that of the slowest link, in bytes/s.
    """
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * num_bytes / bandwidth + (ranks - 1) * latency_s


def tree_depth(ranks: int) -> int:
    """The number of sequential messages of one pass over `ranks` by a binary tree, which NCCL picks for many ranks."""
    return ceil(log2(ranks)) if ranks > 1 else 0

"""The sequences that a run sees, one after another: a function of its token file and seed."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import InputError
from runtime.data.tokens import Tokens, open_tokens

_ROUNDS = 6


@dataclass(frozen=True)
class Batches:
    """The sequences of a training run, each of `seq_len` tokens and the next one, numbered from 0 in the order in which
    global batches of any size take them.

    The tokens are cut into windows of seq_len + 1 with stride seq_len; the fewer than seq_len tokens left over at the
    end are not read. Every epoch visits each window once, in an order that depends on `seed` (from 0) and the epoch
    alone, and takes no memory. A batch may lie in several epochs. Documents end with the token `separator`, if any.
    `part` is that of the windows, from one share of them to another; `source` is what errors name instead of the file.
    Raises InputError where the file is no token file, or there is no window.
    """

    tokens: Path
    seq_len: int
    seed: int
    separator: int | None = None
    part: tuple[float, float] = (0.0, 1.0)
    source: Path | str | None = None

    def __post_init__(self) -> None:
        assert self.seq_len >= 1
        assert self.seed >= 0
        if len(self._corpus) <= self.seq_len:
            raise InputError(
                f"{self.source or self.tokens}: has {len(self._corpus)} tokens, and one window takes "
                f"{self.seq_len + 1} (workload.seq_len + 1); give a longer corpus or lower workload.seq_len"
            )
        if not self.num_windows:
            first, end = self.part
            raise InputError(
                f"{self.source or self.tokens}: {end - first:.4g} of it has no window of {self.seq_len + 1} tokens "
                "(workload.seq_len + 1); give a longer corpus or hold out another share of it (train.validation)"
            )

    @cached_property
    def _corpus(self) -> Tokens:
        """[num_tokens], mapped."""
        return open_tokens(self.tokens)

    @property
    def num_windows(self) -> int:
        """Sequences of one epoch."""
        first, end = self._windows
        return end - first

    @property
    def _windows(self) -> tuple[int, int]:
        every, (first, end) = (len(self._corpus) - 1) // self.seq_len, self.part
        return round(first * every), round(end * every)

    def sequences(self, first: int, end: int) -> NDArray[np.int64]:
        """Sequences `first` to `end` (exclusive) of the run: [end - first, seq_len + 1].

        The first seq_len columns are the input, the last seq_len the targets.
        """
        assert 0 <= first <= end
        windows = [np.empty(0, np.int64)]
        for epoch in range(first // self.num_windows, -(-end // self.num_windows)):
            before = epoch * self.num_windows
            numbers = np.arange(max(first, before) - before, min(end - before, self.num_windows))
            windows.append(_permute(numbers, self.num_windows, (self.seed, epoch)))
        first_tokens = (self._windows[0] + np.concatenate(windows)) * self.seq_len
        tokens: Tokens = self._corpus[first_tokens[:, None] + np.arange(self.seq_len + 1)]
        return tokens.astype(np.int64)

    def borders(self, first: int, end: int) -> NDArray[np.int32]:
        """Where documents begin and end in the inputs of sequences `first` to `end`, laid one after another: ascending,
        from 0 to (end - first) · seq_len. Also a sequence is the end of a document.
        """
        inputs = self.sequences(first, end)[:, :-1]
        ends = inputs == self.separator
        ends[:, -1] = True
        return np.concatenate([[0], np.flatnonzero(ends) + 1]).astype(np.int32)


def _permute(numbers: NDArray[np.int64], count: int, seed: tuple[int, int]) -> NDArray[np.int64]:
    """Where a permutation of range(`count`) takes some of its numbers.

    A Feistel network permutes the numbers of 2k bits; what it takes to `count` and beyond goes through it again (Black
    and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002: cycle walking).
    """
    bits = max(1, -(-(count - 1).bit_length() // 2))
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    permuted = numbers.astype(np.uint64)
    beyond = np.ones(len(permuted), bool)
    while beyond.any():
        permuted[beyond] = _feistel(permuted[beyond], np.uint64(bits), keys)
        beyond = permuted >= count
    return permuted.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

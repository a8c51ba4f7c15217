"""The global batches of a token file: a function of seed and step."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import InputError
from runtime.data.tokens import Tokens, open_tokens


@dataclass(frozen=True)
class Batches:
    """The global batches of a training run, each of `global_batch` sequences of `seq_len` tokens and the next one.

    The tokens are cut into windows of seq_len + 1 with stride seq_len; the fewer than seq_len tokens left over at the
    end are not read. Every epoch visits each window once, in an order that depends on `seed` (from 0) and the epoch
    alone. A batch may lie in several epochs.
    Raises InputError where the file is no token file, or too short for one window.
    """

    tokens: Path
    seq_len: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        assert self.seq_len >= 1
        assert self.global_batch >= 1
        assert self.seed >= 0
        if len(self._corpus) <= self.seq_len:
            raise InputError(
                f"{self.tokens}: has {len(self._corpus)} tokens, and one window takes {self.seq_len + 1} "
                "(seq_len + 1); give a longer corpus or lower seq_len"
            )

    @cached_property
    def _corpus(self) -> Tokens:
        """[num_tokens], mapped."""
        return open_tokens(self.tokens)

    @property
    def num_windows(self) -> int:
        """Sequences of one epoch."""
        return (len(self._corpus) - 1) // self.seq_len

    def sequences(self, step: int, first: int, end: int) -> NDArray[np.int64]:
        """Samples `first` to `end` (exclusive) of the global batch of `step`: [end - first, seq_len + 1].

        The first seq_len columns are the input, the last seq_len the targets.
        """
        assert step >= 0
        assert 0 <= first <= end <= self.global_batch
        start, stop = step * self.global_batch + first, step * self.global_batch + end
        epochs = range(start // self.num_windows, max(start, stop - 1) // self.num_windows + 1)
        windows = [
            _order(self.num_windows, self.seed, epoch)[
                max(0, start - epoch * self.num_windows) : stop - epoch * self.num_windows
            ]
            for epoch in epochs
        ]
        first_tokens = np.concatenate(windows).astype(np.int64) * self.seq_len
        found: Tokens = self._corpus[first_tokens[:, None] + np.arange(self.seq_len + 1)]
        return found.astype(np.int64)


@lru_cache(maxsize=2)  # two, because a batch may lie in two epochs
def _order(num_windows: int, seed: int, epoch: int) -> NDArray[np.unsignedinteger[Any]]:
    """The permutation of the windows in an epoch: [num_windows]."""
    windows = np.arange(num_windows, dtype=np.min_scalar_type(num_windows))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch)))).permutation(windows)

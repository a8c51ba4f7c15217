"""Batches read ahead are those that would be read in their time."""

from pathlib import Path
from threading import current_thread

import numpy as np
import pytest
import torch

from runtime.data.ahead import BatchesAhead
from runtime.data.batches import Batches

CPU = torch.device("cpu")


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    np.save(tmp_path / "tokens.npy", np.arange(101, dtype=np.uint16))
    return Batches(tmp_path / "tokens.npy", 4, seed=0)


def test_every_step_has_its_own_sequences(batches: Batches) -> None:
    """Also those asked for twice in a step, and those of a step that nobody expected."""
    ahead = BatchesAhead(batches.sequences, 6, CPU)
    for step in (0, 1, 2, 7, 8, 3):
        of = ahead.after(6 * step)
        for first, end in ((0, 2), (2, 4), (0, 2)):
            assert of(first, end).equal(torch.from_numpy(batches.sequences(6 * step + first, 6 * step + end)))
    ahead.close()


def test_the_next_step_is_read_by_another_thread(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, bool]] = []
    sequences = Batches.sequences

    def note(self: Batches, first: int, end: int) -> object:
        read.append((first, current_thread().name.startswith("sequences")))
        return sequences(self, first, end)

    monkeypatch.setattr(Batches, "sequences", note)
    ahead = BatchesAhead(batches.sequences, 6, CPU)
    for step in range(3):
        for first in (0, 3):
            ahead.after(6 * step)(first, first + 3)
    ahead.close()
    assert [first for first, is_ahead in read if not is_ahead] == [0, 3]
    assert {first for first, is_ahead in read if is_ahead} >= {6, 9, 12, 15}

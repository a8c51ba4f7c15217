"""The sequences of a run: a function of seed and number, however they are split."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.data import tokens as tokens_module
from runtime.data.batches import Batches
from runtime.data.corpus import prepare
from tests.runtime.data.corpora import position_file, token_file


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Numbers of tokens, tokens of a sequence, sequences of a batch; a seed."""
    seq_len = draw(st.integers(1, 12))
    num_tokens = draw(st.integers(seq_len + 1, 400))
    return num_tokens, seq_len, draw(st.integers(1, 25)), draw(st.integers(0, 2**70))


@given(corpora())
@example((5, 4, 7, 0))  # a batch of one window, seven times
def test_every_epoch_visits_every_window_once(corpus: tuple[int, int, int, int]) -> None:
    num_tokens, seq_len, global_batch, seed = corpus
    with TemporaryDirectory() as folder:
        batches = Batches(position_file(Path(folder), num_tokens), seq_len, seed)
        n = batches.num_windows
        assert n == (num_tokens - 1) // seq_len
        starts = range(0, 3 * n, global_batch)
        seen = np.concatenate([batches.sequences(first, first + global_batch) for first in starts])
    assert seen.dtype == np.int64
    np.testing.assert_array_equal(seen, seen[:, :1] + np.arange(seq_len + 1))
    for epoch in range(3):
        first_tokens = seen[epoch * n : (epoch + 1) * n, 0]
        assert sorted(first_tokens) == list(range(0, n * seq_len, seq_len))


@given(corpora(), st.integers(0, 10**9), st.data())
def test_a_batch_is_the_same_however_it_is_split(
    corpus: tuple[int, int, int, int], start: int, draw: st.DataObject
) -> None:
    """Over ranks with unequal shares, some with none, and whatever was read before."""
    num_tokens, seq_len, global_batch, seed = corpus
    cuts = draw.draw(st.lists(st.integers(0, global_batch), max_size=4).map(sorted))
    with TemporaryDirectory() as folder:
        path = position_file(Path(folder), num_tokens)
        batches = Batches(path, seq_len, seed)
        whole = batches.sequences(start, start + global_batch)
        assert whole.shape == (global_batch, seq_len + 1)
        shares = list(zip([0, *cuts], [*cuts, global_batch], strict=True))
        for first, end in reversed(shares):
            np.testing.assert_array_equal(batches.sequences(start + first, start + end), whole[first:end])


def test_the_order_stays_the_same_between_machines_and_releases(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint counts on it."""
    batches = Batches(position_file(tmp_path, 11), 1, 2**40)
    rows = [batches.sequences(first, first + 10)[:, 0].tolist() for first in (0, 10, 10**7)]
    assert rows == [
        [1, 9, 8, 4, 5, 6, 3, 7, 0, 2],
        [0, 9, 2, 7, 3, 8, 1, 6, 5, 4],
        [1, 7, 8, 2, 5, 4, 9, 3, 0, 6],
    ]


def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    path = position_file(tmp_path, 101)
    orders = {
        tuple(Batches(path, 1, seed).sequences(100 * epoch, 100 * (epoch + 1))[:, 0])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_every_window_comes_everywhere_alike(tmp_path: Path) -> None:
    """The places of 30 windows over 2,000 seeds: chi-square at its mean of 29 ± 5 standard deviations."""
    path, seeds = position_file(tmp_path, 31), 2000
    orders = np.array([Batches(path, 1, seed).sequences(0, 30)[:, 0] for seed in range(seeds)])
    for window in range(30):
        counts = np.bincount(np.nonzero(orders == window)[1], minlength=30)
        assert ((counts - seeds / 30) ** 2 / (seeds / 30)).sum() < 29 + 5 * 58**0.5


@pytest.mark.parametrize("dtype", ["uint8", "int8", ">u2", "uint32", "int64", "uint64"])
def test_any_type_of_integer(tmp_path: Path, dtype: str) -> None:
    path = prepare(token_file(tmp_path, [5, 6, 7], dtype), None, tmp_path, 8)
    rows = Batches(path, 2, 0).sequences(0, 1)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[5, 6, 7]]


def test_tokens_are_mapped(tmp_path: Path) -> None:
    """A file of a tebibyte, all of it a hole, opens; only what is read is in memory."""
    path = tmp_path / "tokens.npy"
    num_tokens = 2**39
    with path.open("wb") as file:
        tokens_module._write_header(file, np.dtype(np.uint16), num_tokens)
        try:
            file.truncate(file.tell() + 2 * num_tokens)
        except OSError:
            pytest.skip("the file system has no files of this size")
    batches = Batches(path, 2**26, 0)
    assert batches.num_windows == 2**13 - 1
    assert not Batches(path, 2**18, 0).sequences(10, 11).any()
    assert not Batches(path, 1, 0).sequences(2**40, 2**40 + 1).any()  # of an epoch of half a tera-sequence


@given(st.lists(st.integers(0, 3), min_size=9, max_size=60), st.integers(1, 8))
def test_documents_end_with_separators_and_sequences(tokens: list[int], seq_len: int) -> None:
    with TemporaryDirectory() as folder:
        batches = Batches(token_file(Path(folder), tokens), seq_len, 0, separator=2)
        inputs, borders = batches.sequences(0, 7)[:, :-1].flatten(), batches.borders(0, 7)
    assert borders.dtype == np.int32
    assert borders[0] == 0
    assert borders[-1] == len(inputs)
    whole = {0, *range(seq_len, len(inputs) + 1, seq_len)}
    assert set(borders.tolist()) == whole | {k + 1 for k, token in enumerate(inputs) if token == 2}
    assert (np.diff(borders) > 0).all()

"""Batches: a function of seed and step, however they are split."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.data import batches as batches_module
from runtime.data import tokens as tokens_module
from runtime.data.batches import Batches
from runtime.data.tokens import prepare
from tests.runtime.data.corpora import counted, token_file


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
        batches = Batches(counted(Path(folder), num_tokens), seq_len, global_batch, seed)
        n = batches.num_windows
        assert n == (num_tokens - 1) // seq_len
        num_steps = -(-3 * n // global_batch)
        seen = np.concatenate([batches.sequences(step, 0, global_batch) for step in range(num_steps)])
    assert seen.dtype == np.int64
    np.testing.assert_array_equal(seen, seen[:, :1] + np.arange(seq_len + 1))
    for epoch in range(3):
        first_tokens = seen[epoch * n : (epoch + 1) * n, 0]
        assert sorted(first_tokens) == list(range(0, n * seq_len, seq_len))


@given(corpora(), st.integers(0, 10**9), st.data())
def test_a_step_is_the_same_however_it_is_split(
    corpus: tuple[int, int, int, int], step: int, draw: st.DataObject
) -> None:
    """Over ranks with unequal shares, some with none, and whatever was read before."""
    num_tokens, seq_len, global_batch, seed = corpus
    cuts = draw.draw(st.lists(st.integers(0, global_batch), max_size=4).map(sorted))
    with TemporaryDirectory() as folder:
        path = counted(Path(folder), num_tokens)
        batches = Batches(path, seq_len, global_batch, seed)
        whole = batches.sequences(step, 0, global_batch)
        assert whole.shape == (global_batch, seq_len + 1)
        shares = list(zip([0, *cuts], [*cuts, global_batch], strict=True))
        for first, end in reversed(shares):
            np.testing.assert_array_equal(batches.sequences(step, first, end), whole[first:end])
        batches.sequences(step + num_tokens, 0, global_batch)
        batches_module._order.cache_clear()
        np.testing.assert_array_equal(
            Batches(path, seq_len, global_batch, seed).sequences(step, 0, global_batch), whole
        )


def test_the_order_stays_the_same_between_machines_and_releases(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint counts on it."""
    batches = Batches(counted(tmp_path, 11), 1, 10, 2**40)
    found = [batches.sequences(step, 0, 10)[:, 0].tolist() for step in (0, 1, 10**6)]
    assert found == [
        [3, 8, 9, 0, 7, 4, 6, 2, 5, 1],
        [7, 9, 8, 5, 4, 0, 6, 1, 3, 2],
        [0, 3, 6, 4, 5, 1, 7, 8, 9, 2],
    ]


def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    path = counted(tmp_path, 101)
    orders = {
        tuple(Batches(path, 1, 100, seed).sequences(epoch, 0, 100)[:, 0]) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_an_epoch_is_permuted_once(tmp_path: Path) -> None:
    """Also where a batch lies in two epochs."""
    batches_module._order.cache_clear()
    batches = Batches(counted(tmp_path, 101), 1, 8, 0)
    for step in range(25):
        for end in (4, 8, 8):
            batches.sequences(step, 0, end)
    assert batches_module._order.cache_info().misses == 2


@pytest.mark.parametrize("dtype", ["uint8", "int8", ">u2", "uint32", "int64", "uint64"])
def test_any_type_of_integer(tmp_path: Path, dtype: str) -> None:
    path = prepare(token_file(tmp_path, [5, 6, 7], dtype), None, tmp_path, 8)
    found = Batches(path, 2, 1, 0).sequences(0, 0, 1)
    assert found.dtype == np.int64
    assert found.tolist() == [[5, 6, 7]]


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
    batches = Batches(path, 2**26, 2, 0)
    assert batches.num_windows == 2**13 - 1
    assert not Batches(path, 2**18, 2, 0).sequences(5, 0, 1).any()

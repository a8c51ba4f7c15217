"""Blocks cover what the mask leaves, once; merged, they are torch's attention, and so are their gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hexiopt.plan.token_layout import Range, merge_runs
from runtime.model import block_attention
from runtime.model.block_attention import attend, attend_backward, blocks, merge
from tests.hexiopt.plan.layouts import causal_pairs

TOKENS = 12


@st.composite
def two_shards(draw: st.DrawFn) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Runs of queries and of keys that are the same or have no token in common, as those of groups."""
    cuts = [0, *sorted(draw(st.sets(st.integers(1, TOKENS - 1), max_size=3))), TOKENS]
    runs = list(pairwise(cuts))
    mine = draw(st.sets(st.sampled_from(runs), min_size=1))
    others = [run for run in runs if run not in mine]
    queries = merge_runs(list(mine))
    return queries, queries if not others or draw(st.booleans()) else merge_runs(others)


@given(two_shards(), st.integers(1, TOKENS))
def test_every_pair_of_a_chunk_is_in_one_block(shards: tuple[tuple[Range, ...], tuple[Range, ...]], chunk: int) -> None:
    queries, keys = ([token for run in runs for token in range(*run)] for runs in shards)
    met = torch.zeros(len(queries), len(keys), dtype=torch.int64)
    for block in blocks(*shards, chunk=chunk):
        assert block.is_causal or block.is_whole
        seen = ~block.hidden((0, block.queries[1] - block.queries[0]), torch.device("cpu"))
        met[slice(*block.queries), slice(*block.keys)] += seen
    q, k = torch.tensor(queries)[:, None], torch.tensor(keys)
    assert met.equal(((q >= k) & (q // chunk == k // chunk)).long())


@given(two_shards(), st.none() | st.integers(1, TOKENS))
def test_every_pair_that_the_mask_leaves_is_in_one_block(
    shards: tuple[tuple[Range, ...], tuple[Range, ...]], window: int | None
) -> None:
    queries, keys = ([token for run in runs for token in range(*run)] for runs in shards)
    met = torch.zeros(len(queries), len(keys), dtype=torch.int64)
    for block in blocks(*shards, window):
        seen = ~block.hidden((0, block.queries[1] - block.queries[0]), torch.device("cpu"))
        assert bool(seen.any())
        assert bool(seen.all()) == block.is_whole
        assert not block.is_causal or seen.equal(torch.ones(len(seen), len(seen), dtype=torch.bool).tril())
        assert block.is_causal or block.is_whole or window is not None
        met[slice(*block.queries), slice(*block.keys)] += seen
    back = torch.tensor(queries)[:, None] - torch.tensor(keys)
    want = (back >= 0) if window is None else (back >= 0) & (back < window)
    assert met.equal(want.long())
    if window is None:
        assert int(met.sum()) == causal_pairs(*shards)


def merge_blocks(q: Tensor, k: Tensor, v: Tensor, runs: list[Range], window: int | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for block in blocks(runs, runs, window):
        at, seen = slice(*block.queries), slice(*block.keys)
        merge(out[:, :, at], lse[:, :, at], *attend(block, q[:, :, at], k[:, :, seen], v[:, :, seen]))
    return out, lse


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("piece", [1, 2**24])
def test_merged_blocks_are_attention(window: int | None, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels and with products, whole and row by row."""
    monkeypatch.setattr(block_attention, "_PIECE", piece)
    if piece == 1:
        monkeypatch.setattr(block_attention, "_is_fused", lambda block, q, v: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, TOKENS, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    mask = (back >= 0) & (back < (window or TOKENS))
    want = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (q, k, v), grad)
    q, k, v = (x.detach() for x in (q, k, v))
    runs = [(0, 5), (5, 6), (6, TOKENS)]
    out, lse = merge_blocks(q, k, v, runs, window)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for block in blocks(runs, runs, window):
        at, seen = slice(*block.queries), slice(*block.keys)
        block_gradients = attend_backward(
            block, grad[:, :, at], q[:, :, at], k[:, :, seen], v[:, :, seen], out[:, :, at], lse[:, :, at]
        )
        for whole, part, rows in zip(gradients, block_gradients, (at, seen, seen), strict=True):
            whole[:, :, rows] += part
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_bf16_blocks_are_merged_in_float32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, TOKENS, 8).bfloat16() for _ in range(3))
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -torch.inf)
    for block in blocks([(0, 5), (5, TOKENS)], [(0, 5), (5, TOKENS)]):
        at, seen = slice(*block.queries), slice(*block.keys)
        merge(out[:, :, at], lse[:, :, at], *attend(block, q[:, :, at], k[:, :, seen], v[:, :, seen]))
    want = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-2)

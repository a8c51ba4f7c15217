"""Flash attention is asked for where a device has it, as its kernels want it; what it computes is the same."""

import inspect
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from hexiopt.problem.kinds import Attention
from runtime import device as devices
from runtime.mapping.parts import RankShard
from runtime.model import attention
from runtime.model.attention import WholeAttention

CPU = torch.device("cpu")
PART = Attention(heads=4, kv_heads=2, qk_dim=32, v_dim=32)
LIKE = torch.empty(0, dtype=torch.float64)
TOKENS, SAMPLES = 7, 3


def give_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device had it."""
    for module in (attention, devices):
        monkeypatch.setattr(module, "has_flash_attention", lambda *arguments: True)


def varlen_double(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **more: Any) -> Tensor:
    """What torch's kernel for GPUs is documented to do: of sequences between `cu_seq`, a token sees so many before."""
    given = inspect.signature(varlen_attn).bind(q, k, v, *arguments, **more).arguments
    ends, (before, after) = given["cu_seq_q"], given["window_size"]
    assert (ends.dtype, after, given["cu_seq_k"] is ends) == (torch.int32, 0, True)
    assert given["enable_gqa"] or q.shape[1] == k.shape[1]
    assert given["max_q"] == given["max_k"] >= int(ends.diff().max())
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    assert ends[0] == 0 and ends[-1] == len(q)  # noqa: PT018
    outputs = []
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        back = torch.arange(end - first)[:, None] - torch.arange(end - first)
        sees = (back >= 0) & (back <= (before if before >= 0 else end))
        query, key, value = (x[first:end].transpose(0, 1) for x in (q, k, v))
        outputs.append(functional.scaled_dot_product_attention(query, key, value, attn_mask=sees).transpose(0, 1))
    return torch.cat(outputs)


def random_inputs(shard: RankShard) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, kv = (end - first for first, end in (shard.share(PART.heads), shard.groups(PART.heads, PART.kv_heads)))
    return [
        torch.randn(TOKENS, SAMPLES, n, PART.qk_dim, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (q, kv, kv)
    ]


@pytest.mark.parametrize("window", [1, 3, TOKENS - 1])
@pytest.mark.parametrize("heads", [None, (3, 1)])  # all of one rank, or those of a rank that share others unevenly
def test_windows_of_any_length_are_those_of_a_mask(
    window: int, heads: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, shard = replace(PART, window=window), RankShard(0, len(heads or (0,)), heads or ())
    masked = WholeAttention(part, shard, TOKENS, LIKE)
    assert masked._mask is not None
    give_flash_attention(monkeypatch)
    monkeypatch.setattr(attention, "varlen_attn", varlen_double)
    flash = WholeAttention(part, shard, TOKENS, LIKE)
    assert flash._mask is None
    inputs = random_inputs(shard)
    output, expected = (attend(*inputs) for attend in (flash, masked))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    for gradient, other in zip(*(torch.autograd.grad(x, inputs, weight) for x in (output, expected)), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, TOKENS - 1])
@pytest.mark.parametrize("heads", [None, (3, 1)])
@pytest.mark.parametrize("has_flash", [False, True])
@pytest.mark.parametrize("borders", [None, [0, 2, 3, 7, 14, 15, 21]])
def test_chunks_are_those_of_a_mask(
    chunk: int,
    heads: tuple[int, ...] | None,
    has_flash: bool,
    borders: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equal lengths, or with a last one that is shorter, and within documents."""
    shard = RankShard(0, len(heads or (0,)), heads or ())
    if has_flash:
        give_flash_attention(monkeypatch)
        monkeypatch.setattr(attention, "varlen_attn", varlen_double)
    chunked = WholeAttention(replace(PART, window=chunk, chunked=True), shard, TOKENS, LIKE)
    inputs, at = random_inputs(shard), torch.arange(TOKENS)
    documents = None if borders is None else chunked.documents(torch.tensor(borders, dtype=torch.int32), SAMPLES)
    output = chunked(*inputs, documents=documents)
    meets = shard.meets(PART.heads, PART.kv_heads)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (inputs[0], *(x[:, :, meets] for x in inputs[1:])))
    sees = (at[:, None] >= at) & (at[:, None] // chunk == at // chunk)
    if borders is not None:
        document = torch.tensor([sum(end <= token for end in borders) for token in range(TOKENS * SAMPLES)])
        document = document.view(SAMPLES, 1, TOKENS)
        sees = sees & (document[..., None] == document[..., None, :])
    masked = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
    expected = masked.permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    for gradient, other in zip(*(torch.autograd.grad(x, inputs, weight) for x in (output, expected)), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


def test_chunks_are_computed_without_a_mask_or_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pairs as are priced, of views of what is given; where the last one is shorter, of a block each."""
    part, pairs = replace(PART, window=3, chunked=True), 0.0
    uneven = WholeAttention(part, RankShard(), TOKENS, LIKE)
    assert all(block.is_causal for block in uneven._blocks)
    lengths = [end - first for first, end in (block.keys for block in uneven._blocks)]
    assert sum(0.5 * length**2 for length in lengths) == part.pairs(TOKENS)
    chunked = WholeAttention(part, RankShard(), TOKENS - 1, LIKE)
    inputs = [x[: TOKENS - 1] for x in random_inputs(RankShard())]
    attend = functional.scaled_dot_product_attention

    def count(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        nonlocal pairs
        assert (more["attn_mask"], more["is_causal"]) == (None, True)
        assert [x.untyped_storage().data_ptr() for x in (q, k, v)] == [x.data_ptr() for x in inputs]
        pairs += 0.5 * q.shape[0] * q.shape[1] * q.shape[2] ** 2
        return attend(q, k, v, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    chunked(*inputs)
    assert pairs == SAMPLES * PART.heads * part.pairs(TOKENS - 1)


@pytest.mark.parametrize("sees", [{}, {"window": 2}, {"window": 2, "chunked": True}])
@pytest.mark.parametrize("heads", [None, (3, 1)])
def test_documents_of_any_length_are_those_of_a_mask(
    sees: dict[str, Any], heads: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a document sees nothing of another one."""
    part, shard = replace(PART, **sees), RankShard(0, len(heads or (0,)), heads or ())
    borders = torch.tensor([0, 2, 3, 7, 14, 15, 21], dtype=torch.int32)
    masked = WholeAttention(part, shard, TOKENS, LIKE)
    give_flash_attention(monkeypatch)
    monkeypatch.setattr(attention, "varlen_attn", varlen_double)
    flash = WholeAttention(part, shard, TOKENS, LIKE)
    inputs = random_inputs(shard)
    output, expected = (attend(*inputs, documents=attend.documents(borders, SAMPLES)) for attend in (flash, masked))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    for gradient, other in zip(*(torch.autograd.grad(x, inputs, weight) for x in (output, expected)), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    (of_values,) = torch.autograd.grad(
        masked(*inputs, documents=masked.documents(borders, SAMPLES))[4, 0].sum(), inputs[2]
    )
    assert of_values[:3].count_nonzero() == of_values[5:].count_nonzero() == of_values[:, 1:].count_nonzero() == 0


def test_nothing_slower_runs_in_the_place_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device is said to have it, what its kernels cannot do is an error of torch."""
    give_flash_attention(monkeypatch)
    attend = WholeAttention(replace(PART, kv_heads=4), RankShard(), 7, LIKE)
    with torch.no_grad():
        q = random_inputs(RankShard())[0]
        assert attend(q, q, q).shape == (TOKENS, SAMPLES, PART.heads * PART.v_dim)
        with warnings.catch_warnings(action="ignore"), pytest.raises(RuntimeError, match="No available kernel"):
            attend(q.to(torch.int32), q.to(torch.int32), q.to(torch.int32))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((8, 0), torch.float16, 64, True),
        ((7, 5), torch.float16, 64, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 512, False),
        ((9, 0), torch.bfloat16, 36, False),
    ],
)
def test_who_has_flash_attention(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.has_flash_attention(torch.device("cuda", 0), dtype, head_dim) == expected
    assert not devices.has_flash_attention(CPU, dtype, head_dim)

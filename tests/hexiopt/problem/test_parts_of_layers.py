"""Layers of several kinds: their parameters, FLOPs and shares, and what no layer can be."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.model import ModelSpec
from tests.hexiopt.problem.test_model import TINY, specs
from tests.hexiopt.shapes_of_kinds import ATTENTION, DENSE_LAYER, EXPERT_LAYER, EXPERTS, KINDS, LATENT, MIXED, model_of


def test_params() -> None:
    """Counted by hand: matrices of attention, norms, MLP or router and experts."""
    hidden, attention = 512, 512 * (8 * 64 + 2 * 4 * 64) + 8 * 64 * 512 + 2 * 64
    dense = attention + 2 * hidden + 3 * hidden * 1536
    experts = attention + 2 * hidden + hidden * 16 + 3 * hidden * (16 * 512 + 256)
    assert MIXED.num_params == dense + 5 * experts + 2 * 1000 * hidden + hidden
    assert MIXED.num_params - MIXED.active_params == 5 * 14 * 3 * hidden * 512 + 1000 * hidden


def test_latent_params() -> None:
    """DeepSeek-V2, table of section 2.1: products to latent vectors and from them to heads."""
    layer = model_of(LayerKind((LATENT,), (EXPERTS,))).layer
    products = 512 * 192 + 192 * 8 * 96 + 512 * (128 + 32) + 128 * 8 * (64 + 64) + 8 * 64 * 512
    attention = layer.num_params - model_of(EXPERT_LAYER).layer.num_params
    usual = 512 * (8 * 64 + 2 * 4 * 64) + 8 * 64 * 512 + 2 * 64
    assert attention == products + 192 + 128 - usual


@given(specs())
def test_flat_fields_are_a_kind(spec: ModelSpec) -> None:
    """Equal layers by the model's fields are layers of one kind."""
    (kind,) = spec.kinds
    assert kind.attention is not None
    assert kind.dense is not None
    flat = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_size)
    assert (kind.attention.heads, kind.attention.kv_heads, kind.attention.v_dim, kind.dense.ffn_size) == flat
    assert spec.depth == (0,) * spec.num_layers
    assert spec.equal_layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shares_add_up(kind: LayerKind, tp: int) -> None:
    """What a TP group divides is a share of the whole; what it does not is whole on every rank."""
    layer = model_of(kind, DENSE_LAYER).layer_of(kind)
    shard, whole = layer.shard(tp, 0), layer.shard(1, 0)
    assert layer.params.on(shard) * tp >= layer.params.on(whole) >= layer.params.on(shard)
    divided = layer.params._replace(whole=0)
    groups = kind.recurrent.groups if kind.recurrent else tp
    if tp <= min(4, groups):  # all counts are multiples
        assert divided.on(shard) * tp == divided.on(whole)


@given(st.integers(1, 4096), st.integers(1, 4096), st.booleans())
def test_pairs_of_windows(seq_len: int, window: int, chunked: bool) -> None:
    """Against the mask: a token attends to those of its window or chunk up to itself, which counts half."""
    part = replace(ATTENTION, window=window, chunked=chunked)
    first = [max(0, t // window * window if chunked else t - window + 1) for t in range(seq_len)]
    exact = sum(t - start + 0.5 for t, start in enumerate(first))
    # The formula is that of a continuous mask: of a window, half a pair a token more or less.
    assert part.pairs(seq_len) == pytest.approx(exact, abs=0.5 * seq_len + 0.5)
    assert part.pairs(seq_len) <= 0.5 * seq_len**2


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: replace(ATTENTION, kv_heads=3), "8 heads are not a multiple of 3"),
        (lambda: replace(ATTENTION, rope_dim=8), "latent attention"),
        (lambda: replace(ATTENTION, chunked=True), "needs a window"),
        (lambda: replace(ATTENTION, heads=0), "heads: 0 is not a whole number from 1"),
        (lambda: replace(LATENT, kv_heads=4), "latent keys and values"),
        (lambda: replace(EXPERTS, top_k=17), "more than all 16 experts"),
        (lambda: replace(EXPERTS, bias=1), "bias"),
        (lambda: Recurrent(heads=6, groups=4, key_dim=8, value_dim=8), "not a multiple"),
        (lambda: Dense(ffn_size=0), "ffn_size: 0"),
        (lambda: LayerKind(), "at least one part"),
        (lambda: LayerKind((ATTENTION, ATTENTION)), "at most an attention and a recurrence"),
        (lambda: replace(MIXED, num_layers=5), "6 kinds for 5 layers"),
        (lambda: replace(MIXED, num_heads=4), "first attention"),
        (lambda: replace(TINY, layers=(DENSE_LAYER,) * 2), "equal layers"),
        (lambda: model_of(DENSE_LAYER, LayerKind((), (EXPERTS,)), hidden_size=0), "hidden_size"),
    ],
)
def test_refused(make: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        make()


@given(st.integers(1, 4), st.lists(st.sampled_from(KINDS[:3]), min_size=1, max_size=3), st.integers(1, 40))
def test_more_layers_repeat_the_last_ones(dense: int, period: list[LayerKind], num_layers: int) -> None:
    """However many layers: the first are those of the model, and behind a few dense ones a period goes on."""
    repeats = period * 8
    model = model_of(*[DENSE_LAYER] * dense, *repeats)
    other = model.with_num_layers(num_layers)
    assert other.layers == (*[DENSE_LAYER] * dense, *repeats, *period * 40)[:num_layers]
    assert other.num_layers == num_layers


def test_equal_layers_are_any_number() -> None:
    assert TINY.with_num_layers(7) == replace(TINY, num_layers=7)


def test_no_attention() -> None:
    mamba = next(kind for kind in KINDS if kind.attention is None and kind.recurrent)
    with pytest.raises(InputError, match="no layer attends"):
        replace(MIXED, num_layers=1, layers=(mamba,))


def test_parts_are_data() -> None:
    """Only what differs from defaults is written."""
    assert EXPERT_LAYER.to_dict() == {
        "parts": [
            {"part": "attention", "heads": 8, "kv_heads": 4, "qk_dim": 64, "v_dim": 64, "qk_norm": "head"},
            {"part": "experts", "count": 16, "top_k": 2, "ffn_size": 512, "shared": 256},
        ],
        "norms": 2,
    }
    assert isinstance(ATTENTION, Attention)
    assert isinstance(EXPERTS, Experts)

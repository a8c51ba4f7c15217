"""Shapes of models with experts that measured runs name, as layers of kinds.

They are the `config.json` of each model on the Hugging Face Hub, by the name in the rows; Mamba-2 layers, latent
attention and further predicted tokens as in the classes of transformers 5.23. A reader of these files makes this table
superfluous.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hexiopt.problem.form import LLAMA
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.model import DECODER, ModelSpec

_POSITIONS = 2**20  # no table of positions is trained


def expert_model(name: str, num_layers: int | None = None, *, predicts_further: bool = True) -> ModelSpec | None:
    """The model `name`, in lower case; None where it is not known. With `num_layers` its first layers alone; without
    `predicts_further` without the layers that predict further tokens."""
    if name not in _SHAPES:
        return None
    hidden, vocab, layers, further = _SHAPES[name]()
    layers = layers[: num_layers or len(layers)]
    attention = next(kind.attention for kind in layers if kind.attention is not None)
    widths = [part.ffn_size for kind in layers for part in kind.channels]
    return ModelSpec(
        name=name,
        architecture=DECODER,
        num_layers=len(layers),
        hidden_size=hidden,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.qk_dim,
        ffn_size=max(widths),
        vocab_size=vocab,
        max_positions=_POSITIONS,
        form=LLAMA,
        layers=tuple(layers),
        extra_layers=tuple(further) if predicts_further else (),
    )


_Shape = tuple[int, int, Sequence[LayerKind], Sequence[LayerKind]]
"""Hidden size, vocabulary, layers, layers that predict further tokens."""


def _heads(heads: int, kv_heads: int, dim: int = 128, **more: Any) -> Attention:
    return Attention(heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, **more)


def _latent(heads: int, q_rank: int) -> Attention:
    return Attention(heads=heads, kv_heads=heads, qk_dim=192, v_dim=128, q_rank=q_rank, kv_rank=512, rope_dim=64)


def _layer(mixer: Attention | Recurrent, mlp: Dense | Experts) -> LayerKind:
    return LayerKind((mixer,), (mlp,))


def _behind_dense(attention: Attention, dense: int, number: int, experts: Experts, layers: int) -> list[LayerKind]:
    """`number` layers with an MLP of `dense` columns, then those with experts."""
    first = _layer(attention, Dense(ffn_size=dense))
    return [first] * number + [_layer(attention, experts)] * (layers - number)


def _qwen3(hidden: int, heads: int, ffn: int, layers: int) -> _Shape:
    attention = _heads(heads, 4, qk_norm="head")
    return hidden, 151936, [_layer(attention, Experts(count=128, top_k=8, ffn_size=ffn))] * layers, ()


def _qwen3_next() -> _Shape:
    delta = Recurrent(heads=32, groups=16, key_dim=128, value_dim=128, chunk=64, delta=True, conv_bias=False)
    full = _heads(16, 2, 256, qk_norm="head", gated=True)
    experts = Experts(count=512, top_k=10, ffn_size=512, shared=512, shared_gate=True)
    return 2048, 151936, [_layer(full if n % 4 == 3 else delta, experts) for n in range(48)], ()


def _gpt_oss(layers: int, count: int) -> _Shape:
    experts = Experts(count=count, top_k=4, ffn_size=2880, bias=True, router_bias=True)

    def layer(n: int) -> LayerKind:
        window = None if n % 2 else 128
        return _layer(_heads(64, 8, 64, window=window, bias=True, output_bias=True, sinks=True), experts)

    return 2880, 201088, [layer(n) for n in range(layers)], ()


def _deepseek_v3() -> _Shape:
    experts, attention = Experts(count=256, top_k=8, ffn_size=2048, shared=2048), _latent(128, 1536)
    layers = _behind_dense(attention, 18432, 3, experts, 61)
    return 7168, 129280, layers, layers[-1:]


def _deepseek_v2() -> _Shape:
    experts = Experts(count=160, top_k=6, ffn_size=1536, shared=3072)
    return 5120, 102400, _behind_dense(_latent(128, 1536), 12288, 1, experts, 60), ()


def _moonlight() -> _Shape:
    experts = Experts(count=64, top_k=6, ffn_size=1408, shared=2816)
    return 2048, 163840, _behind_dense(_latent(16, 0), 11264, 1, experts, 27), ()


def _glm_air() -> _Shape:
    experts = Experts(count=128, top_k=8, ffn_size=1408, shared=1408)
    layers = _behind_dense(_heads(96, 8, bias=True), 10944, 1, experts, 46)
    return 4096, 151552, layers, layers[-1:]


def _mixtral() -> _Shape:
    return 6144, 32768, [_layer(_heads(48, 8), Experts(count=8, top_k=2, ffn_size=16384))] * 56, ()


def _nemotron(hidden: int, pattern: str, state_heads: int, experts: Experts, further: bool) -> _Shape:
    """Layers of one part each: M a Mamba-2 recurrence, * attention, E experts."""
    mamba = Recurrent(heads=state_heads, groups=8, key_dim=128, value_dim=64)
    of = {
        "M": LayerKind((mamba,), (), 1),
        "*": LayerKind((_heads(32, 2),), (), 1),
        "E": LayerKind((), (experts,), 1),
    }
    return hidden, 131072, [of[letter] for letter in pattern], (of["*"], of["E"]) if further else ()


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_EXPERTS = Experts(count=128, top_k=6, ffn_size=1856, shared=3712, gated=False)
_SUPER_EXPERTS = Experts(count=512, top_k=22, ffn_size=2688, shared=5376, gated=False, latent=1024)
_SHAPES: dict[str, Callable[[], _Shape]] = {
    "qwen3-30b-a3b": lambda: _qwen3(2048, 32, 768, 48),
    "qwen3-235b-a22b": lambda: _qwen3(4096, 64, 1536, 94),
    "qwen3-next-80b-a3b": _qwen3_next,
    "gpt-oss-20b": lambda: _gpt_oss(24, 32),
    "gpt-oss-120b": lambda: _gpt_oss(36, 128),
    "deepseek-v2": _deepseek_v2,
    "deepseek-v3": _deepseek_v3,
    "moonlight-16b-a3b": _moonlight,
    "glm-4.5-air": _glm_air,
    "mixtral-8x22b": _mixtral,
    "nemotron-3-nano-30b-a3b": lambda: _nemotron(2688, _NANO, 64, _NANO_EXPERTS, False),
    "nemotron-3-super-120b-a12b": lambda: _nemotron(4096, _SUPER, 128, _SUPER_EXPERTS, True),
}

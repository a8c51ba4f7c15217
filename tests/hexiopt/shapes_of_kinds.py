"""Small models whose layers are of several kinds."""

from dataclasses import replace

from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.model import ModelSpec

ATTENTION = Attention(heads=8, kv_heads=4, qk_dim=64, v_dim=64, qk_norm="head")
LATENT = Attention(heads=8, kv_heads=8, qk_dim=96, v_dim=64, q_rank=192, kv_rank=128, rope_dim=32)
WINDOW = replace(ATTENTION, window=256)
MAMBA = Recurrent(heads=16, groups=2, key_dim=32, value_dim=64)
DELTA = Recurrent(heads=8, groups=4, key_dim=64, value_dim=64, conv_bias=False, delta=True)
DENSE = Dense(ffn_size=1536)
EXPERTS = Experts(count=16, top_k=2, ffn_size=512, shared=256)

EXPERT_LAYER = LayerKind((ATTENTION,), (EXPERTS,))
DENSE_LAYER = LayerKind((ATTENTION,), (DENSE,))
KINDS = (
    EXPERT_LAYER,
    DENSE_LAYER,
    LayerKind((LATENT,), (EXPERTS,)),
    LayerKind((WINDOW,), (DENSE,), norms=4),
    LayerKind((MAMBA,), (EXPERTS,)),
    LayerKind((DELTA,), (DENSE,)),
    LayerKind((MAMBA,), (), norms=1),
    LayerKind((), (replace(EXPERTS, gated=False, latent=256),), norms=1),
    LayerKind((ATTENTION, MAMBA), (DENSE,)),
)


def model_of(*layers: LayerKind, hidden_size: int = 512, vocab_size: int = 1000) -> ModelSpec:
    """A decoder of these layers, of which one attends."""
    attention = next(kind.attention for kind in layers if kind.attention is not None)
    return ModelSpec(
        name="kinds",
        architecture="decoder",
        num_layers=len(layers),
        hidden_size=hidden_size,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.qk_dim,
        ffn_size=512,
        vocab_size=vocab_size,
        max_positions=8192,
        form=Form(),
        layers=layers,
    )


MIXED = model_of(DENSE_LAYER, *[EXPERT_LAYER] * 5)
EQUAL = model_of(*[EXPERT_LAYER] * 6)

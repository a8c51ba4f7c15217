"""The composition of a decoder's layers, apart from their sizes: the differences between families of models."""

from dataclasses import dataclass, fields
from typing import Any

from hexiopt.checks import flag_in, is_whole
from hexiopt.errors import InputError, quoted

QK_NORMS = ("none", "plain", "head", "heads", "whole")
_WORDS = {"norm": ("rms", "layer"), "qk_norm": QK_NORMS, "positions": ("rope", "learned", "none")}
_COUNTS = {
    "norm_vectors": (0, 2),
    "norms": (1, 8),
    "qk_norm_vectors": (1, 2),
    "activation_params": (0, 16),
    "extra_positions": (0, 1024),
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of all layers of a decoder, and of embedding and head.

    The defaults are Llama's. Raises InputError where a value is not one that a model can have.
    """

    gated_mlp: bool = True
    """The MLP multiplies an activated projection by a plain one: three matrices instead of two."""
    norm: str = "rms"
    """`rms` or `layer`: one or two statistics a vector."""
    norm_vectors: int = 1
    """Vectors of parameters of a norm: 0 (no weights), 1 (weight) or 2 (weight and bias)."""
    norms: int = 2
    """Norms of hidden_size values in a layer: 1 where attention and MLP read the same, 4 with those of both outputs,
    7 with those of experts beside the MLP (Gemma 4)."""
    qk_norm: str = "none"
    """Norm of queries and keys: `plain` without weights, `head` with head_dim weights for all heads, `heads` with such
    for each head, `whole` of all heads together."""
    qk_norm_vectors: int = 1
    """Vectors of parameters of that norm, unless plain: weight, or weight and bias."""
    inner_norms: bool = False
    """Norms of what attention's output projection and the MLP's last one read (BitNet)."""
    output_bias: bool | None = None
    """Bias of attention's output projection; None: where query, key and value have one."""
    activation_params: int = 0
    """Trained scalars of the activation of a layer (xIELU)."""
    positions: str = "rope"
    """`rope`, `learned`, or `none` with parameters: sinusoidal, or biases of the scores (ALiBi)."""
    extra_positions: int = 0
    """Rows of a learned position embedding beyond max_positions."""
    embedding_norm: bool = False
    """A norm behind the token embedding (BLOOM)."""
    head_bias: bool = False
    """The LM head has a bias of vocab_size values."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, words, span = getattr(self, field.name), _WORDS.get(field.name), _COUNTS.get(field.name)
            if words is not None and value not in words:
                raise InputError(f"{field.name}: {quoted(value)} is not known; take one of {', '.join(words)}")
            if span is not None and not (is_whole(value) and span[0] <= value <= span[1]):
                rule = f"is not a whole number from {span[0]} to {span[1]}; state one"
                raise InputError(f"{field.name}: {quoted(value)} {rule}")
            may_be_none = field.name == "output_bias" and value is None
            if words is None and span is None and not may_be_none:
                flag_in(value, field.name)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def in_words(self) -> str:
        """The form in one line."""
        norm = {"rms": "RMSNorm", "layer": "LayerNorm"}[self.norm] + "s" * (self.norms > 1)
        usual = {"rms": 1, "layer": 2}[self.norm]
        if self.norm_vectors != usual:
            norm += (" without weights", " without bias", " with bias")[self.norm_vectors]
        queries = {
            "plain": "queries and keys normed without weights",
            "head": "queries and keys normed by head",
            "heads": "queries and keys normed by head, each with its weights",
            "whole": "queries and keys normed over all heads",
        }
        positions = {"rope": "rotary", "learned": "learned", "none": "unlearned"}[self.positions]
        words = (
            f"{'gated' if self.gated_mlp else 'plain'} MLP",
            f"{self.norms} {norm} a layer",
            queries.get(self.qk_norm),
            "norms inside attention and MLP" if self.inner_norms else None,
            f"{positions} positions",
            "a norm of the embedding" if self.embedding_norm else None,
            "a bias of the LM head" if self.head_bias else None,
        )
        return ", ".join(filter(None, words))


LLAMA = Form()
GPT = Form(gated_mlp=False, norm="layer", norm_vectors=2)
"""A plain MLP and LayerNorm."""

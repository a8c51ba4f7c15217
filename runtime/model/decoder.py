"""A Llama-style decoder, or the part of it that one rank holds. Parameter names are Hugging Face's.

Grouped-query attention with any split of heads, gated MLP, RoPE, RMSNorm; optional biases, norms of queries and keys,
and a window of attention. Adapters and frozen parameters are out of scope. Shapes: T tokens and t a rank's own, B
samples, H hidden, N heads, D head size, V rows of the vocabulary. Under a sequence layout a rank holds the parameters
whole and its tokens alone: there, T is t.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.plan.token_layout import Range
from hexiopt.problem.model import ModelSpec
from runtime.mapping.layout import Chunk
from runtime.mapping.parts import EMBEDDING, FINAL_NORM, ParameterPart, RankShard, head_name
from runtime.model.attention import Attention
from runtime.model.functions import gated_silu, recomputed, rms_norm
from runtime.model.tensor_parallel import RankTpGroup

Weights = Mapping[str, nn.Parameter]


class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of runs of tokens, halves rotated as in Llama."""

    def __init__(self, model: ModelSpec, tokens: Sequence[Range], dtype: torch.dtype, device: torch.device) -> None:
        steps = torch.arange(0, model.head_dim, 2, dtype=torch.int64).to(torch.float32)
        frequency = 1.0 / (model.rope_theta ** (steps / model.head_dim))
        positions = torch.cat([torch.arange(*run, dtype=torch.float32) for run in tokens])
        angle = positions[:, None] * frequency
        both = torch.cat([angle, angle], dim=-1)
        self._cos, self._sin = both.cos().to(device, dtype), both.sin().to(device, dtype)

    def tensors(self) -> list[Tensor]:
        """What lasts: it is the same for every layer."""
        return [self._cos, self._sin]

    def __call__(self, x_tbnd: Tensor) -> Tensor:
        """Queries or keys, rotated by their positions."""
        cos, sin = self._cos[:, None, None], self._sin[:, None, None]
        left, right = x_tbnd.chunk(2, dim=-1)
        return x_tbnd * cos + torch.cat([-right, left], dim=-1) * sin


class Layer:
    """One decoder layer on one rank: what it computes with which of the rank's parameters."""

    def __init__(self, model: ModelSpec, number: int, attention: Attention, policy: str, weights: Weights) -> None:
        self._model, self._policy, self._attend = model, policy, attention
        self._at, self._weights = f"model.layers.{number}.", weights

    def __call__(self, x_tbh: Tensor, tp: RankTpGroup, rope: Rope) -> Tensor:
        """Hidden states after the layer, from those before it: the rank's own tokens."""
        run = partial(self._run, tp=tp, rope=rope)
        return recomputed(run, x_tbh) if self._policy == "full" else run(x_tbh)

    def _run(self, x_tbh: Tensor, tp: RankTpGroup, rope: Rope) -> Tensor:
        eps = self._model.norm_eps
        normed = rms_norm(x_tbh, self._weight("input_layernorm"), eps)
        q, k, v = self._columns(normed, tp, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        x_tbh = x_tbh + self._row("self_attn.o_proj", self._attention(q, k, v, rope), tp)
        normed = rms_norm(x_tbh, self._weight("post_attention_layernorm"), eps)
        inner = gated_silu(*self._columns(normed, tp, "mlp.gate_proj", "mlp.up_proj"))
        return x_tbh + self._row("mlp.down_proj", inner, tp)

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"{self._at}{name}.weight"]

    def _bias(self, name: str) -> Tensor | None:
        return self._weights.get(f"{self._at}{name}.bias")

    def _columns(self, x: Tensor, tp: RankTpGroup, *names: str) -> tuple[Tensor, ...]:
        return tp.columns(x, [self._weight(name) for name in names], [self._bias(name) for name in names])

    def _row(self, name: str, x: Tensor, tp: RankTpGroup) -> Tensor:
        """A projection whose input is cut: summed over ranks before the bias, which all of them hold."""
        found, bias = tp.rows(x, self._weight(name)), self._bias(name)
        return found if bias is None else found + bias

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        model = self._model
        q, k, v = (x.view(*x.shape[:2], x.shape[-1] // model.head_dim, model.head_dim) for x in (q, k, v))
        if model.qk_norm:
            q = rms_norm(q, self._weight("self_attn.q_norm"), model.norm_eps)
            k = rms_norm(k, self._weight("self_attn.k_norm"), model.norm_eps)
        q, k = rope(q), rope(k)
        return recomputed(self._attend, q, k, v) if self._policy == "selective" else self._attend(q, k, v)


class DecoderChunk:
    """A range of layers on one rank; the first one embeds tokens, the last one ends with the loss."""

    def __init__(
        self,
        model: ModelSpec,
        chunk: Chunk,
        shard: RankShard,
        tp: RankTpGroup,
        rope: Rope,
        attention: Attention,
        weights: Weights,
    ) -> None:
        self.chunk = chunk
        self._model, self._shard, self._tp, self._rope, self._weights = model, shard, tp, rope, weights
        self._layers = [
            Layer(model, number, attention, policy, weights)
            for number, policy in zip(range(*chunk.layers), chunk.recompute, strict=True)
        ]

    def parts(self, labels_tb: Tensor | None, num_tokens: int) -> list[Callable[[Tensor], Tensor]]:
        """What it computes, one after another: of a first chunk the embedding, each layer, of a last one the sum of the
        cross entropies of all labels over `num_tokens`. Between them are hidden states [t, B, H]."""
        found = self._to_hidden()
        if self.chunk.last:
            assert labels_tb is not None
            found.append(lambda x_tbh: self.loss(x_tbh, labels_tb) / num_tokens)
        return found

    def _to_hidden(self) -> list[Callable[[Tensor], Tensor]]:
        layers: list[Callable[[Tensor], Tensor]] = [
            partial(layer, tp=self._tp, rope=self._rope) for layer in self._layers
        ]
        return [self._embedded, *layers] if self.chunk.first else layers

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states of the rank's own tokens [t, B, H] after the layers; from those before them, or, of a first
        chunk, from tokens [T, B]."""
        for part in self._to_hidden():
            x = part(x)
        return x

    def _embedded(self, tokens_tb: Tensor) -> Tensor:
        low, high = self._shard.vocab
        mine = (tokens_tb >= low) & (tokens_tb < high)
        if self._tp.group is None:
            return functional.embedding(tokens_tb, self._weights[EMBEDDING])
        if low == high:
            return self._tp.scatter(self._weights[EMBEDDING].new_zeros(*tokens_tb.shape, self._model.hidden_size))
        rows = functional.embedding((tokens_tb - low).masked_fill(~mine, 0), self._weights[EMBEDDING])
        return self._tp.scatter(rows * mine.unsqueeze(-1))

    def logits(self, x_tbh: Tensor) -> Tensor:
        """Logits of the rank's rows of the vocabulary for all tokens [T, B, V], of a last chunk's hidden states."""
        normed = rms_norm(x_tbh, self._weights[FINAL_NORM], self._model.norm_eps)
        return self._tp.columns(normed, [self._weights[head_name(self._model)]], [None])[0]

    def loss(self, x_tbh: Tensor, labels_tb: Tensor) -> Tensor:
        """Sum of the cross entropies of all labels, of a last chunk's hidden states."""
        return self._tp.loss(self.logits(x_tbh), labels_tb, self._shard.vocab)


def empty_weights(parts: Sequence[ParameterPart], dtype: torch.dtype, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the parts that a rank holds, not yet filled."""
    return {part.name: nn.Parameter(torch.empty(part.local_shape, dtype=dtype, device=device)) for part in parts}

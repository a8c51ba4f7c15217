"""A Llama-style decoder, or the part of it that one rank holds. Parameter names are Hugging Face's.

Grouped-query attention with any split of heads, gated MLP, RoPE, RMSNorm; optional biases, norms of queries and keys,
and a window of attention. Adapters and frozen parameters are out of scope. Shapes: T tokens and t a rank's own, B
samples, H hidden, N heads, D head size, V rows of the vocabulary. Under a sequence layout a rank holds the parameters
whole and its tokens alone: there, T is t.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.plan.token_layout import Range
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import JOINED
from runtime.mapping.adapters import DOWN, UP
from runtime.mapping.layout import Chunk
from runtime.mapping.parts import EMBEDDING, FINAL_NORM, ParameterPart, RankShard, head_name
from runtime.model.attention import AttentionCall
from runtime.model.functions import gated_silu, recomputed, rms_norm, rotated
from runtime.model.loss import chunked_cross_entropy, cross_entropy
from runtime.model.tensor_parallel import AdapterMatrices, RankTpGroup

Weights = Mapping[str, nn.Parameter]


class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of runs of tokens, halves rotated as in Llama."""

    def __init__(self, model: ModelSpec, tokens: Sequence[Range], dtype: torch.dtype, device: torch.device) -> None:
        steps = torch.arange(0, model.head_dim, 2, dtype=torch.int64).to(torch.float32)
        frequency = 1.0 / (model.rope_theta ** (steps / model.head_dim))
        positions = torch.cat([torch.arange(*run, dtype=torch.float32) for run in tokens])
        angle = positions[:, None] * frequency
        both = torch.cat([angle, angle], dim=-1)
        # Of the halves swapped, the first one is the second one, negated.
        sin = torch.cat([-angle.sin(), angle.sin()], dim=-1)
        self._cos, self._sin = (one.to(device, dtype)[:, None, None] for one in (both.cos(), sin))

    def tensors(self) -> list[Tensor]:
        """What lasts: it is the same for every layer."""
        return [self._cos, self._sin]

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated by their positions."""
        return rotated(self._cos, self._sin, q_tbnd, k_tbnd)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What all layers of a rank have in common beside their weights: one graph, compiled once, serves them all."""

    model: ModelSpec
    tp: RankTpGroup
    rope: Rope
    attend: AttentionCall
    is_selective: bool


class Layers:
    """Decoder layers on one rank, one or several that are recomputed together: what they compute with which of the
    rank's parameters. Compiled, those with full recompute are compiled twice, without their backward and with it."""

    def __init__(self, numbers: Range, call: LayerCall, policy: str, weights: Weights, run: "LayerRun") -> None:
        self._runs = []
        for number in range(*numbers):
            at = f"model.layers.{number}."
            mine = {name.removeprefix(at): own for name, own in weights.items() if name.startswith(at)}
            self._runs.append(partial(run, mine, call))
        self._is_full = policy == "full"

    def __call__(self, x_tbh: Tensor, documents: Tensor | None = None) -> Tensor:
        """Hidden states after the layers, from those before them: the rank's own tokens."""
        given = (x_tbh,) if documents is None else (x_tbh, documents)
        return recomputed(self._run, *given) if self._is_full else self._run(*given)

    def _run(self, x_tbh: Tensor, *documents: Tensor) -> Tensor:
        for run in self._runs:
            x_tbh = run(x_tbh, *documents)
        return x_tbh


LayerRun = Callable[..., Tensor]


def layer_run(own: Weights, call: LayerCall, x_tbh: Tensor, documents: Tensor | None = None) -> Tensor:
    """A layer, of the weights `own` by their names in it; `documents` as attention takes them."""
    eps, tp = call.model.norm_eps, call.tp
    normed = rms_norm(x_tbh, own["input_layernorm.weight"], eps)
    q, k, v = _columns(own, tp, normed, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    x_tbh = x_tbh + _row(own, tp, _attended(own, call, documents, q, k, v), "self_attn.o_proj")
    normed = rms_norm(x_tbh, own["post_attention_layernorm.weight"], eps)
    inner = gated_silu(*_columns(own, tp, normed, "mlp.gate_proj", "mlp.up_proj"))
    return x_tbh + _row(own, tp, inner, "mlp.down_proj")


def compiled_layer_run(tp: RankTpGroup) -> LayerRun:
    """`layer_run`, compiled for the shapes that it meets: whole, or, of a `tp` group, what is between collectives."""
    run: LayerRun = torch.compile(layer_run, fullgraph=tp.group is None, dynamic=False)
    return run


def _columns(own: Weights, tp: RankTpGroup, x: Tensor, *names: str) -> tuple[Tensor, ...]:
    weights, biases = [own[f"{name}.weight"] for name in names], [own.get(f"{name}.bias") for name in names]
    return tp.columns(x, weights, biases, [_adapter(own, name) for name in names])


def _row(own: Weights, tp: RankTpGroup, x: Tensor, name: str) -> Tensor:
    """A projection whose input is cut: summed over ranks before the bias, which all of them hold."""
    found, bias = tp.rows(x, own[f"{name}.weight"], _adapter(own, name)), own.get(f"{name}.bias")
    return found if bias is None else found + bias


def _adapter(own: Weights, name: str) -> AdapterMatrices | None:
    down = own.get(f"{name}.{DOWN}.weight")
    return None if down is None else (down, own[f"{name}.{UP}.weight"])


def _attended(own: Weights, call: LayerCall, documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    model = call.model
    q, k, v = (x.view(*x.shape[:2], x.shape[-1] // model.head_dim, model.head_dim) for x in (q, k, v))
    if model.qk_norm:
        q = rms_norm(q, own["self_attn.q_norm.weight"], model.norm_eps)
        k = rms_norm(k, own["self_attn.k_norm.weight"], model.norm_eps)
    q, k = call.rope(q, k)
    given = (q, k, v) if documents is None else (q, k, v, documents)
    return recomputed(call.attend, *given) if call.is_selective else call.attend(*given)


class DecoderChunk:
    """A range of layers on one rank; the first one embeds tokens, the last one ends with the loss, for which it has the
    logits of `loss_chunk_tokens` at once (None: of all)."""

    def __init__(
        self,
        model: ModelSpec,
        chunk: Chunk,
        shard: RankShard,
        tp: RankTpGroup,
        rope: Rope,
        attention: AttentionCall,
        weights: Weights,
        loss_chunk_tokens: int | None = None,
        run: LayerRun = layer_run,
    ) -> None:
        self.chunk, self._loss_chunk_tokens = chunk, loss_chunk_tokens
        self._model, self._shard, self._tp, self._weights = model, shard, tp, weights
        self._attention = attention
        calls = {
            policy: LayerCall(model, tp, rope, attention, policy == "selective") for policy in set(chunk.recompute)
        }
        policies = [policy for policy in chunk.recompute if policy != JOINED]
        self._layers = [
            Layers(numbers, calls[policy], policy, weights, run)
            for numbers, policy in zip(chunk.groups, policies, strict=True)
        ]

    def puts_off(self, micro_batch: int, count: int) -> AbstractContextManager[None]:
        """A backward of a micro-batch, in here, puts the gradients of the weights of its last `count` layers off."""
        assert self._tp.late is not None
        last = self.chunk.layers[1]
        return self._tp.late.puts_off(
            micro_batch, {layer: self._of_layer(layer) for layer in range(last - count, last)}
        )

    def add_late_gradients(self, micro_batch: int, number: int) -> None:
        """Compute what was put off of a layer, counted from the last one."""
        assert self._tp.late is not None
        self._tp.late.run(micro_batch, self.chunk.layers[1] - 1 - number)

    def _of_layer(self, layer: int) -> list[Tensor]:
        return [weight for name, weight in self._weights.items() if name.startswith(f"model.layers.{layer}.")]

    def parts(
        self, labels_tb: Tensor | None, num_tokens: int, borders: Tensor | None = None, num_samples: int = 1
    ) -> list[Callable[[Tensor], Tensor]]:
        """What it computes, one after another: of a first chunk the embedding, each layer (those that are recomputed
        together are one), of a last one the sum of the cross entropies of all labels over `num_tokens`. Between them
        are hidden states [t, B, H]. Attention keeps to the documents between `borders`, if any."""
        found = self._to_hidden(None if borders is None else self._attention.documents(borders, num_samples))
        if self.chunk.last:
            assert labels_tb is not None
            found.append(lambda x_tbh: self.loss(x_tbh, labels_tb) / num_tokens)
        return found

    def _to_hidden(self, documents: Tensor | None = None) -> list[Callable[[Tensor], Tensor]]:
        layers: list[Callable[[Tensor], Tensor]] = [*self._layers]
        if documents is not None:
            layers = [partial(layer, documents=documents) for layer in self._layers]
        return [self._embedded, *layers] if self.chunk.first else layers

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states of the rank's own tokens [t, B, H] after the layers; from those before them, or, of a first
        chunk, from tokens [T, B]."""
        for part in self._to_hidden():
            x = part(x)
        return x

    def _embedded(self, tokens_tb: Tensor) -> Tensor:
        """Hidden states of tokens. Of a frozen embedding too they require a gradient, though nothing reads it: else
        layers that are recomputed would get none."""
        embedded = self._looked_up(tokens_tb)
        return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded

    def _looked_up(self, tokens_tb: Tensor) -> Tensor:
        if self._tp.group is None:
            return functional.embedding(tokens_tb, self._weights[EMBEDDING])
        low, high = self._shard.vocab
        mine = (tokens_tb >= low) & (tokens_tb < high)
        if low == high:
            return self._tp.scatter(self._weights[EMBEDDING].new_zeros(*tokens_tb.shape, self._model.hidden_size))
        rows = functional.embedding((tokens_tb - low).masked_fill(~mine, 0), self._weights[EMBEDDING])
        return self._tp.scatter(rows * mine.unsqueeze(-1))

    def logits(self, x_tbh: Tensor) -> Tensor:
        """Logits of the rank's rows of the vocabulary for all tokens [T, B, V], of a last chunk's hidden states."""
        return self._tp.columns(self._normed(x_tbh), [self._weights[head_name(self._model)]], [None])[0]

    def loss(self, x_tbh: Tensor, labels_tb: Tensor) -> Tensor:
        """Sum of the cross entropies of all labels, of a last chunk's hidden states."""
        if self._loss_chunk_tokens is None:
            return cross_entropy(self.logits(x_tbh), labels_tb, self._shard.vocab, self._tp.group)
        head, normed = self._weights[head_name(self._model)], self._normed(x_tbh)
        return chunked_cross_entropy(normed, head, labels_tb, self._shard.vocab, self._tp, self._loss_chunk_tokens)

    def _normed(self, x_tbh: Tensor) -> Tensor:
        return rms_norm(x_tbh, self._weights[FINAL_NORM], self._model.norm_eps)


def empty_weights(parts: Sequence[ParameterPart], dtype: torch.dtype, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the parts that a rank holds, not yet filled."""
    return {part.name: nn.Parameter(torch.empty(part.local_shape, dtype=dtype, device=device)) for part in parts}

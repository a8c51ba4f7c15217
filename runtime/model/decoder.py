"""A decoder, or the part of it that one rank holds: embedding, layers (`layer.py`), LM head and loss.

Frozen parameters are out of scope. Shapes: T tokens and t a rank's own, B samples, H hidden, V rows of the vocabulary.
Under a sequence layout a rank holds the parameters whole and its tokens alone: there, T is t.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.problem.kinds import Part
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import JOINED
from runtime.mapping.layout import Chunk
from runtime.mapping.model_parts import EMBEDDING, FINAL_NORM, execution_of, head_name, layer_kinds, layer_prefix
from runtime.mapping.parts import ParameterPart, RankShard
from runtime.model.attention_part import AttentionPart
from runtime.model.functions import rms_norm
from runtime.model.layer import LayerCall, LayerRun, Layers, PartCall, hosted_layer_run, layer_run
from runtime.model.loss import Logits, chunked_cross_entropy, cross_entropy
from runtime.model.projections import Weights
from runtime.model.tensor_parallel import RankTpGroup


class DecoderChunk:
    """A range of layers on one rank; the first one embeds tokens, the last one ends with the loss, for which it has the
    logits of `loss_chunk_tokens` at once (None: of all)."""

    def __init__(
        self,
        model: ModelSpec,
        chunk: Chunk,
        shard: RankShard,
        tp: RankTpGroup,
        calls: Mapping[Part, PartCall],
        weights: Weights,
        loss_chunk_tokens: int | None = None,
        run: LayerRun = layer_run,
    ) -> None:
        self.chunk, self._loss_chunk_tokens = chunk, loss_chunk_tokens
        self._model, self._tp, self._weights = model, tp, weights
        self._execution = execution_of(model)
        self._logits = Logits(self._execution.logit_scale, self._execution.logit_cap)
        self._rows = shard.even(model.vocab_size)
        self._calls, kinds = calls, layer_kinds(model)
        of_kinds = {
            (kind, policy): LayerCall.of(model, kind, calls, policy)
            for kind in dict.fromkeys(kinds[slice(*chunk.layers)])
            for policy in set(chunk.recompute) - {JOINED}
        }
        policies = [policy for policy in chunk.recompute if policy != JOINED]
        self._layers = [
            Layers(first, kinds[first:end], of_kinds, policy, weights, run)
            for (first, end), policy in zip(chunk.groups, policies, strict=True)
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
        return [weight for name, weight in self._weights.items() if name.startswith(layer_prefix(layer))]

    def parts(
        self, labels_tb: Tensor | None, num_tokens: int, borders: Tensor | None = None, num_samples: int = 1
    ) -> list[Callable[[Tensor], Tensor]]:
        """What it computes, one after another: of a first chunk the embedding, each layer (those that are recomputed
        together are one), of a last one the sum of the cross entropies of all labels over `num_tokens`. Between them
        are hidden states [t, B, H]. Attention keeps to the documents between `borders`, if any."""
        parts = self._to_hidden(None if borders is None else self._documents(borders, num_samples))
        if self.chunk.last:
            assert labels_tb is not None
            parts.append(lambda x_tbh: self.loss(x_tbh, labels_tb) / num_tokens)
        return parts

    def _documents(self, borders: Tensor, num_samples: int) -> dict[Part, Tensor]:
        """As each attention takes them."""
        attentions = {part: call for part, call in self._calls.items() if isinstance(call, AttentionPart)}
        return {part: call.attend.documents(borders, num_samples) for part, call in attentions.items()}

    def _to_hidden(self, documents: Mapping[Part, Tensor] | None = None) -> list[Callable[[Tensor], Tensor]]:
        layers: list[Callable[[Tensor], Tensor]] = [*self._layers]
        if documents is not None:
            layers = [partial(layer, documents=documents) for layer in self._layers]
        return [self._embedding, *layers] if self.chunk.first else layers

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states of the rank's own tokens [t, B, H] after the layers; from those before them, or, of a first
        chunk, from tokens [T, B]."""
        for part in self._to_hidden():
            x = part(x)
        return x

    def _embedding(self, tokens_tb: Tensor) -> Tensor:
        """Hidden states of tokens. Of a frozen embedding too they require a gradient, though nothing reads it: else
        layers that are recomputed would get none."""
        embedded = self._look_up(tokens_tb)
        return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded

    def _look_up(self, tokens_tb: Tensor) -> Tensor:
        if self._tp.group is None:
            return self._scale(functional.embedding(tokens_tb, self._weights[EMBEDDING]))
        low, high = self._rows
        mine = (tokens_tb >= low) & (tokens_tb < high)
        if low == high:
            return self._tp.scatter(self._weights[EMBEDDING].new_zeros(*tokens_tb.shape, self._model.hidden_size))
        rows = functional.embedding((tokens_tb - low).masked_fill(~mine, 0), self._weights[EMBEDDING])
        return self._tp.scatter(self._scale(rows * mine.unsqueeze(-1)))

    def _scale(self, rows: Tensor) -> Tensor:
        """Rows of the embedding times its scale, which has their type, as in transformers."""
        scale = self._execution.embedding_scale
        return rows if scale == 1.0 else rows * rows.new_tensor(scale)

    def logits(self, x_tbh: Tensor) -> Tensor:
        """Logits of the rank's rows of the vocabulary for all tokens [T, B, V], of a last chunk's hidden states."""
        (products,) = self._tp.columns(self._norm(x_tbh), [self._weights[head_name(self._model)]], [None])
        return self._logits.of(products)

    def loss(self, x_tbh: Tensor, labels_tb: Tensor) -> Tensor:
        """Sum of the cross entropies of all labels, of a last chunk's hidden states."""
        if self._loss_chunk_tokens is None:
            return cross_entropy(self.logits(x_tbh), labels_tb, self._rows, self._tp.group)
        head, normed = self._weights[head_name(self._model)], self._norm(x_tbh)
        chunk, logits = self._loss_chunk_tokens, self._logits
        return chunked_cross_entropy(normed, head, labels_tb, self._rows, self._tp, chunk, logits)

    def _norm(self, x_tbh: Tensor) -> Tensor:
        return rms_norm(x_tbh, self._weights[FINAL_NORM], self._model.norm_eps, self._execution.unit_norms)


class HostChunk(DecoderChunk):
    """That of a rank that hosts experts alone: hidden states of no samples go through it, so that its forwards and
    backwards join the exchanges of the ranks whose tokens come to its experts. `like` has their type and device."""

    def __init__(
        self,
        model: ModelSpec,
        chunk: Chunk,
        shard: RankShard,
        tp: RankTpGroup,
        calls: Mapping[Part, PartCall],
        weights: Weights,
        like: Tensor,
    ) -> None:
        super().__init__(model, chunk, shard, tp, calls, weights, run=hosted_layer_run)
        self._like = like

    def _embedding(self, tokens_tb: Tensor) -> Tensor:
        return self._like.new_zeros(*tokens_tb.shape, self._model.hidden_size, requires_grad=True)

    def loss(self, x_tbh: Tensor, labels_tb: Tensor) -> Tensor:
        """The sum of none."""
        return x_tbh.sum()


def empty_weights(parts: Sequence[ParameterPart], dtype: torch.dtype, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the parts that a rank holds, not yet filled."""
    return {part.name: nn.Parameter(torch.empty(part.local_shape, dtype=dtype, device=device)) for part in parts}

"""Bytes of activations, logits and buffers, from what devices hold of a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from hexiopt.cost.executors.compute import Amount, at_least
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import QUANTIZED_BYTES
from hexiopt.numbers.messages import TRAINING
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.operators import Shard
from hexiopt.problem.workload import JOINED, Workload


@dataclass(frozen=True)
class Held(Generic[Amount]):
    """What a device holds of a micro-batch; numbers, or arrays [devices].

    `between`: tokens between blocks; `tokens`: those that projections, MLP and head run on, of `positions` of the
    sequence; `attended`: those that its attention runs on, for `heads` and `kv_heads`, of which `copied_kv_heads` more
    are made where query heads share them unevenly. `gathered`: 1 where a TP group gathers `tokens` from the `between`
    of its ranks, else 0. `scores`: (query, key) pairs of a head whose probabilities are kept, where attention is not
    `fused` (1, else 0). `parted`: 1 where an all-to-all takes heads to other devices, else 0. `travelling`: bytes of
    buffers for all-to-all and rings.
    """

    between: Amount
    tokens: Amount
    positions: Amount
    attended: Amount
    heads: Amount
    kv_heads: Amount
    copied_kv_heads: Amount
    gathered: Amount
    scores: Amount
    fused: Amount
    parted: Amount
    travelling: Amount


@dataclass(frozen=True)
class Activations(Generic[Amount]):
    """Bytes for one micro-batch: of a layer without recompute beside attention's internals, of these, of a layer's
    input; of what the final norm, the embedding and the loss keep, of logits; and of buffers."""

    layer: Amount
    internals: Amount
    layer_input: Amount
    final_norm: Amount
    token_ids: Amount
    loss: Amount
    logits: Amount
    buffers: Amount

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, shard: Shard, held: Held[Amount]) -> "Activations[Amount]":
        """Per-token bytes follow Korthikanti et al. (arXiv 2205.05198, section 4), without dropout, with true shapes;
        `shard` of the weights."""
        width, hidden, dim = workload.element_bytes, model.hidden_size, model.head_dim
        q, kv = held.heads * dim, held.kv_heads * dim
        # What products in FP8 read is kept in FP8; the head's is not.
        quantized = workload.precision in QUANTIZED_BYTES
        read = QUANTIZED_BYTES.get(workload.precision, width)
        final_norm = c.NORM_STATISTIC_BYTES * (2 if model.layer_norm else 1)
        final_norm += hidden * (width + (width if workload.loss_chunk_tokens is None else 0))
        # Attention stores queries, keys, values and its output, in FP8 also what the projection reads of it. The output
        # over other tokens than the device's own is one of attention's internals; its own come back.
        own_output = (1.0 if quantized else held.parted) * float(read * shard.heads * dim)
        layer = held.tokens * own_output + held.attended * width * ((2.0 - held.parted) * q + 2.0 * kv)
        for row in model.layer.on(shard).elementwise:
            stored = width * row.stores + read * row.stores_cast + c.NORM_STATISTIC_BYTES * row.statistics
            layer = layer + (held.between if row.divided else held.tokens) * float(stored)
        # Fused attention keeps its log-sum-exp, unfused its probabilities; keys and values are copied for each query
        # head where a device's heads do not share them evenly.
        copies = held.attended * width * 2.0 * dim * held.copied_kv_heads
        log_sum_exp = held.attended * held.heads * c.ACCUMULATOR_BYTES * held.fused
        internals = copies + held.scores * held.heads * width + log_sum_exp + held.parted * held.attended * width * q
        # One gathered input and one gathered gradient of a TP group, and two boundary messages each way, in 8 bits
        # beside what one is made of and what another becomes; sines and cosines of all positions.
        message_bytes = 4.0 * workload.message_bytes(hidden)
        if workload.message_precision != TRAINING:
            message_bytes += 2.0 * width * hidden
        buffers = held.tokens * width * 2.0 * hidden * held.gathered + held.between * message_bytes
        if model.rope:
            buffers = buffers + held.positions * (width * 2.0 * dim)
        # The loss keeps probabilities, in FP32; or, in chunks, the gradients of what the head reads and of the head.
        loss = held.tokens * (float(shard.vocab) * c.LOSS_BYTES + c.TOKEN_ID_BYTES)
        logits = held.tokens * float(shard.vocab * width)
        if workload.loss_chunk_tokens is not None:
            chunk = -at_least(-float(workload.loss_chunk_tokens), -held.tokens)
            loss = (held.between + float(shard.vocab)) * float(hidden * width)
            logits = chunk * float(shard.vocab * (2 * width + c.LOSS_BYTES))
        return cls(
            layer=layer,
            internals=internals,
            layer_input=held.between * (width * float(hidden)),
            final_norm=held.between * float(final_norm),
            # Which rows of the matrix a token needs, and, where it is cut, whether they are the rank's.
            token_ids=held.tokens * float(c.TOKEN_ID_BYTES + (shard.tp > 1)),
            loss=loss,
            # Until the loss has read them, and then their gradient, of one micro-batch or chunk at a time; of a chunk
            # also both at once, and the scores between.
            logits=logits,
            buffers=buffers + held.travelling,
        )

    def stored(self, policy: str) -> Amount:
        """What a layer stores."""
        if policy == JOINED:
            return 0.0 * self.layer_input
        if policy == "full":
            return self.layer_input
        return self.layer + self.internals if policy == "none" else self.layer

    def working_set(self, policy: str, last: bool = False, together: int = 1) -> Amount:
        """What a layer being recomputed, or so many of them `together`, holds beside what is stored; on the last stage
        the head's backward has let go of what the final norm kept before."""
        working = 0.0 * self.internals
        if policy == "full":
            working = together * (self.layer + self.internals) - self.layer_input
        elif policy == "selective":
            working = self.internals
        return at_least(0.0, working - self.final_norm) if last else working

    def of_range(self, layers: Mapping[str, int], first: bool, last: bool) -> Amount:
        """Bytes that a range of layers, so many of each policy, stores of one micro-batch; `first` begins with the
        embedding, `last` ends with the LM head."""
        found = first * self.token_ids + last * (self.final_norm + self.loss)
        for policy, n in layers.items():
            found = found + n * self.stored(policy)
        return found

    def of_stage(
        self,
        ranges: Sequence[Mapping[str, int]],
        first: bool,
        last: bool,
        held: Sequence[int],
        together: int = 1,
    ) -> Amount:
        """All but what the head holds, of layer ranges with so many layers of each policy, of which up to so many are
        recomputed `together`; `held[c]` micro-batches of range c."""
        found = 0.0 * self.internals
        for at, (n, layers) in enumerate(zip(held, ranges, strict=True)):
            found = found + n * self.of_range(layers, first and at == 0, False)
        working = 0.0 * self.internals
        for policy in {policy for layers in ranges for policy in layers}:
            working = at_least(working, self.working_set(policy, last, together))
        return found + working

"""Bytes of activations, logits and buffers, from the share of a micro-batch that a device holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter, mul
from typing import Generic

from hexiopt.cost.executors.adapters import dequantised_bytes, stored_elements
from hexiopt.cost.executors.compute import Amount, at_least
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import QUANTIZED_BYTES
from hexiopt.numbers.messages import TRAINING
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.operators import ElementwiseShare, Layer, Shard
from hexiopt.problem.workload import JOINED, Workload
from hexiopt.schedules.depth import MESSAGE_BUFFERS


@dataclass(frozen=True)
class MicroBatchShare(Generic[Amount]):
    """A device's share of a micro-batch; numbers, or arrays [devices].

    `between`: tokens between blocks; `tokens`: those of projections, MLP and head, at `positions` of the sequence;
    `attended`: those of attention, for `heads` and `kv_heads`, of which attention makes `copied_kv_heads` more where
    query heads share them unevenly. `gathered`: 1 where a TP group gathers `tokens` from the `between` of its ranks,
    else 0. `fused`: 1 where attention is fused, else 0; `scores`: where it is not, the (query, key) pairs of a head
    whose probabilities are stored. `parted`: 1 where an all-to-all takes heads to other devices, else 0. `travelling`:
    bytes of buffers for all-to-all and rings. `routed`: copies of tokens that come to the device's experts; `combined`:
    tokens over whose copies it sums.
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
    routed: Amount
    combined: Amount


@dataclass(frozen=True)
class Activations(Generic[Amount]):
    """Bytes for one micro-batch: what a layer without recompute stores outside attention's internals, these internals,
    what the backward of a recurrence makes anew beyond what it has let go of; a layer's input; what final norm,
    embedding (`token_ids`) and loss store; logits; buffers; and a message between stages."""

    layer: Amount
    internals: Amount
    remade: Amount
    layer_input: Amount
    final_norm: Amount
    token_ids: Amount
    loss: Amount
    logits: Amount
    buffers: Amount
    message: Amount

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        workload: Workload,
        shard: Shard,
        share: MicroBatchShare[Amount],
        of_layer: Layer | None = None,
    ) -> "Activations[Amount]":
        """The bytes of a device that holds `share` of a micro-batch and `shard` of the weights, of `of_layer`; of any
        layer where all are equal.

        Per-token bytes follow Korthikanti et al. (arXiv 2205.05198, section 4), without dropout, with true shapes.
        """
        width, hidden, rows = workload.element_bytes, model.hidden_size, of_layer or model.layer
        attention = rows.kind.attention
        dim, v_dim = (attention.qk_dim, attention.v_dim) if attention else (0, 0)
        out, q, kv = share.heads * v_dim, share.heads * dim, share.kv_heads * (dim + v_dim)
        # Inputs of FP8 products are stored in FP8; that of the head is not.
        quantized = workload.precision in QUANTIZED_BYTES
        read = QUANTIZED_BYTES.get(workload.precision, width)
        final_norm = c.NORM_STATISTIC_BYTES * (2 if model.layer_norm else 1)
        head_reads = workload.loss_chunk_tokens is None and workload.adapters is None
        final_norm += hidden * (width + (width if head_reads else 0))
        # Attention stores queries, keys, values and its output, with FP8 also the projection's copy of it. After an
        # all-to-all a device stores its tokens' output; the output for tokens of others is an internal of attention.
        own_output = (1.0 if quantized else share.parted) * float(read * shard.heads * v_dim)
        layer = share.tokens * own_output + share.attended * width * ((1.0 - share.parted) * out + q + kv)

        def stored_bytes(row: ElementwiseShare) -> float:
            return float(width * row.stores + read * row.stores_cast + c.NORM_STATISTIC_BYTES * row.statistics)

        on_rank = rows.on(shard)
        for row in on_rank.elementwise:
            layer = layer + (share.between if row.divided else share.tokens) * stored_bytes(row)
        of_copies = share.routed * stored_bytes(on_rank.routed) + share.combined * stored_bytes(on_rank.combined)
        layer = layer + of_copies
        remade = moment = 0.0 * layer
        if recurrent := rows.kind.recurrent:
            scanned = share.tokens * (ceil(workload.seq_len / recurrent.chunk) * recurrent.chunk / workload.seq_len)
            moment = scanned * float(c.ACCUMULATOR_BYTES * shard.state_heads * recurrent.moment_elements)
            remade = scanned * float(width * on_rank.remakes + c.ACCUMULATOR_BYTES * on_rank.remakes_exact)
            # Of what follows, the backward has let go by then.
            remade = remade - of_copies
            for row in on_rank.following:
                remade = remade - (share.between if row.divided else share.tokens) * stored_bytes(row)
        if (lora := workload.adapters) is not None:
            beyond = stored_elements(model, rows.kind, lora, shard)
            layer = layer + width * (share.between * beyond.hidden + share.tokens * beyond.inner)
            layer = layer + width * (share.routed * beyond.routed)
        # Fused attention stores its log-sum-exp, unfused its probabilities; keys and values are copied for each query
        # head where a device's heads do not share them evenly.
        copies = share.attended * width * float(dim + v_dim) * share.copied_kv_heads
        log_sum_exp = share.attended * share.heads * c.ACCUMULATOR_BYTES * share.fused
        internals = (
            copies + share.scores * share.heads * width + log_sum_exp + share.parted * share.attended * width * out
        )
        if lora is not None and "o" not in lora.matrices:  # only attention's own backward reads its output
            layer, internals = layer - share.attended * width * out, internals + share.attended * width * out
        # A gathered input and a gathered gradient of a TP group, and boundary messages, in 8 bits beside what is
        # converted; and the sines and cosines of all positions.
        message_bytes = float(MESSAGE_BUFFERS * workload.message_bytes(hidden))
        if workload.message_precision != TRAINING:
            message_bytes += 2.0 * width * hidden
        buffers = share.tokens * width * 2.0 * hidden * share.gathered + share.between * message_bytes
        if model.rope:
            buffers = buffers + share.positions * (width * 2.0 * dim)
        if rows.kind.experts:  # copies of tokens on their way to experts, and as they come
            buffers = buffers + share.routed * float(2 * width * rows.kind.experts.width(hidden))
        if lora is not None:
            buffers = buffers + dequantised_bytes(model, rows.kind, lora, shard, width)
        # The loss stores FP32 probabilities; in chunks, the gradients of the head's input and of the head instead.
        loss = share.tokens * (float(shard.vocab) * c.LOSS_BYTES + c.TOKEN_ID_BYTES)
        logits = share.tokens * float(shard.vocab * width)
        if workload.loss_chunk_tokens is not None:
            chunk = -at_least(-float(workload.loss_chunk_tokens), -share.tokens)
            loss = (share.between + float(shard.vocab if lora is None else 0)) * float(hidden * width)
            logits = chunk * float(shard.vocab * (2 * width + c.LOSS_BYTES))
        return cls(
            layer=layer,
            internals=internals,
            remade=at_least(0.0, remade),
            layer_input=share.between * (width * float(hidden)),
            final_norm=share.between * float(final_norm),
            # The row of the matrix that a token reads, and, where TP divides the matrix, whether the rank holds it.
            token_ids=share.tokens * float(c.TOKEN_ID_BYTES + (shard.tp > 1)),
            loss=loss,
            # Logits until the loss has read them, then their gradient, of a micro-batch or chunk at a time; of a chunk
            # both at once, with the FP32 scores between them.
            logits=logits,
            buffers=buffers + share.travelling + moment,
            message=share.between * workload.message_bytes(hidden),
        )

    def layer_bytes(self, policy: str) -> Amount:
        """Bytes that a layer stores under a recompute policy."""
        if policy == JOINED:
            return 0.0 * self.layer_input
        if policy == "full":
            return self.layer_input
        return self.layer + self.internals if policy == "none" else self.layer

    def working_set(self, policy: str, last: bool = False, together: int = 1) -> Amount:
        """Bytes that a layer, or so many layers `together`, holds in its backward besides what is stored. On the last
        stage the head's backward has freed what the final norm stored by then."""
        working = self.remade
        if policy == "full":
            working = together * (self.layer + self.internals) - self.layer_input + self.remade
        elif policy == "selective":
            working = at_least(self.remade, self.internals)
        return at_least(0.0, working - self.final_norm) if last else working

    def of_range(self, layers: Mapping[str, int], first: bool, last: bool) -> Amount:
        """Bytes that a layer range, with so many `layers` of each policy, stores for one micro-batch; a `first` range
        begins with the embedding, a `last` one ends with the LM head."""
        total = first * self.token_ids + last * (self.final_norm + self.loss)
        for policy, n in layers.items():
            total = total + n * self.layer_bytes(policy)
        return total

    def of_stage(
        self,
        ranges: Sequence[Mapping[str, int]],
        first: bool,
        last: bool,
        held: Sequence[int],
        together: int = 1,
    ) -> Amount:
        """Bytes of a stage without those of final norm, head and loss: layer ranges with so many layers of each policy,
        up to so many of them recomputed `together`, that hold `held[c]` micro-batches of range c."""
        total = 0.0 * self.internals
        for at, (n, layers) in enumerate(zip(held, ranges, strict=True)):
            total = total + n * self.of_range(layers, first and at == 0, False)
        working = 0.0 * self.internals
        for policy in {policy for layers in ranges for policy in layers}:
            working = at_least(working, self.working_set(policy, last, together))
        return total + working


def mean(kinds: Sequence[Activations[float]], shares: Sequence[float]) -> Activations[float]:
    """Bytes of the mean layer, where `shares` of the layers are of each of `kinds`; buffers, and what a backward makes
    anew, of the kind with most."""
    layer, internals = (sum(map(mul, shares, map(attrgetter(name), kinds))) for name in ("layer", "internals"))
    remade, buffers = (max(map(attrgetter(name), kinds)) for name in ("remade", "buffers"))
    return replace(kinds[0], layer=layer, internals=internals, remade=remade, buffers=buffers)

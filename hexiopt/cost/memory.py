"""Bytes on the fullest device of a stage: model states, activations by schedule position, logits, buffers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from hexiopt.cost import coefficients as c
from hexiopt.cost.compute import Shard, largest_shard
from hexiopt.cost.schedule import forward_chunk, num_warm_up
from hexiopt.gpus import Gpu
from hexiopt.model import ModelSpec
from hexiopt.workload import Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on a device, by what they hold."""

    weights: float
    gradients: float
    master: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserve: float

    @cached_property
    def total(self) -> float:
        """Bytes of all parts."""
        states = self.weights + self.gradients + self.master + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.reserve


MEMORY_PARTS = tuple(field.name for field in fields(Memory))


class Shards(NamedTuple):
    """How the states of a stage are spread: by which ZeRO stage, and over how many devices.

    ZeRO-1 spreads master weights and moments, ZeRO-2 gradients too, ZeRO-3 weights too (Rajbhandari et al., arXiv
    1910.02054, section 5), which it gathers unit by unit. `num_devices` is a mean where parameters differ in it.
    """

    stage: int = 0
    num_devices: float = 1


WHOLE = Shards()


def in_flight(schedule: str, position: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> int:
    """Micro-batches whose activations stage `position` holds at its peak.

    Of a stage with several equal layer ranges, whole micro-batches that are as much: at least what it holds.
    """
    if num_chunks > 1:
        begun = num_warm_up(schedule, position, num_stages, num_chunks, num_micro_batches) + 1
        return -(-min(begun, num_micro_batches * num_chunks) // num_chunks)
    if schedule == "gpipe":
        return num_micro_batches
    return min(num_micro_batches, num_stages - position)


def chunks_in_flight(
    position: int, num_stages: int, num_micro_batches: int, chunk_bytes: tuple[float, ...]
) -> tuple[int, ...]:
    """Micro-batches of each layer range that interleaved stage `position` holds when Σ count · bytes is largest."""
    # From the first backward on, what it holds repeats after every `num_stages` micro-batches.
    return _chunks_in_flight(position, num_stages, min(num_micro_batches, 3 * num_stages), chunk_bytes)


@lru_cache(maxsize=4096)
def _chunks_in_flight(
    position: int, num_stages: int, num_micro_batches: int, chunk_bytes: tuple[float, ...]
) -> tuple[int, ...]:
    chunks = len(chunk_bytes)
    total, period = num_micro_batches * chunks, num_stages * chunks
    warm_up = num_warm_up("interleaved", position, num_stages, chunks, num_micro_batches)
    held = [0] * chunks
    for k in range(warm_up):
        held[forward_chunk(k, num_stages, chunks)] += 1
    best, most = tuple(held), sum(n * b for n, b in zip(held, chunk_bytes, strict=True))
    for k in range(min(total - warm_up, period)):
        held[forward_chunk(warm_up + k, num_stages, chunks)] += 1
        if (now := sum(n * b for n, b in zip(held, chunk_bytes, strict=True))) > most:
            best, most = tuple(held), now
        held[chunks - 1 - forward_chunk(k, num_stages, chunks)] -= 1
    return best


class MemoryModel:
    """Bytes for one TP degree, micro-batch size and model; stages of any length and position from it.

    Per-token activations follow Korthikanti et al. (arXiv 2205.05198, section 4), with sequence parallelism,
    without dropout, with true shapes.
    """

    def __init__(self, model: ModelSpec, workload: Workload, gpu: Gpu, tp: int, micro_batch_size: int) -> None:
        shard = largest_shard(model, tp)
        self._workload = workload
        width, hidden = workload.element_bytes, model.hidden_size
        tokens = micro_batch_size * workload.seq_len
        self.layer_params = layer_params(model, shard)
        self.embedding_params = model.embedding_params * shard.vocab / model.vocab_size
        # With tied embeddings the last stage holds its own copy of the matrix, unless it is also the first.
        untied_head = model.head_params * shard.vocab / model.vocab_size
        tied_copy = model.vocabulary_params * shard.vocab / model.vocab_size if model.tied_embeddings else 0.0
        self._head_params_alone, self._head_params_beside_embedding = untied_head + tied_copy, untied_head
        q, kv = shard.heads * model.head_dim, shard.kv_heads * model.head_dim
        # A layer stores: input and norm output of both blocks (sharded along the sequence), q, k, v, attention
        # output, and the MLP's inner activations; unfused attention also its probabilities.
        inner = (3 if model.gated_mlp else 2) * shard.ffn
        kept = 4.0 * hidden / tp + 2 * q + 2 * kv + inner
        self._none = tokens * width * kept
        probabilities = 0.0 if gpu.flash_attention else float(tokens) * workload.seq_len * shard.heads * width
        log_sum_exp = float(tokens) * shard.heads * 4 if gpu.flash_attention else 0.0
        self._internals = probabilities + log_sum_exp
        self._full = tokens * width * hidden / tp
        self._final_norm = 2.0 * tokens * width * hidden / tp
        self._logits = float(tokens) * shard.vocab * (width + c.LOSS_BYTES)
        # One gathered input and one gathered gradient of a TP group, and two boundary messages each way.
        self._buffers = tokens * width * (2.0 * hidden * (tp > 1) + 4.0 * hidden / tp)

    def layer_activation_bytes(self, policy: str) -> float:
        """Stored activations of one layer and one micro-batch."""
        if policy == "full":
            return self._full
        return self._none + (self._internals if policy == "none" else 0.0)

    def recompute_working_set_bytes(self, policy: str) -> float:
        """What the layer being recomputed holds beside the stored activations."""
        if policy == "full":
            return self._none + self._internals - self._full
        return self._internals if policy == "selective" else 0.0

    def num_params(self, num_layers: int, first: bool, last: bool) -> float:
        """Parameters on the fullest rank of a stage."""
        params = num_layers * self.layer_params
        if first:
            params += self.embedding_params
        if last:
            params += self._head_params_beside_embedding if first else self._head_params_alone
        return params

    def gathered_params(self, num_layers: int, first: bool, last: bool) -> tuple[float, float]:
        """Parameters that a device of a ZeRO-3 stage holds whole beside its shards: of weights, and of gradients.

        Weights of the unit that runs and of the one gathered for what comes next, a gradient of the unit that runs,
        at the worst moment; units are layers, the embedding and the LM head, which gathers a tied matrix too.
        """
        units = [self.layer_params] * min(num_layers, 2)
        units = [self.embedding_params] * first + units + [self._head_params_alone] * last
        return max(map(sum, pairwise([*units, 0.0])), default=0.0), max(units, default=0.0)

    def stage(self, num_layers: int, first: bool, last: bool, policy: str, held: int, shards: Shards = WHOLE) -> Memory:
        """Bytes on the fullest device of a stage that holds `held` micro-batches in flight."""
        activations = (
            held * num_layers * self.layer_activation_bytes(policy)
            + self.recompute_working_set_bytes(policy)
            + (held * self._final_norm if last else 0.0)
        )
        logits = held * self._logits if last else 0.0
        return self._memory(num_layers, first, last, activations, logits, shards)

    def chunk_bytes(self, policies: Sequence[str], last: bool) -> float:
        """What a range of layers, each with its policy, stores of one micro-batch; `last` ends with the LM head."""
        kept = sum(n * self.layer_activation_bytes(policy) for policy, n in Counter(policies).items())
        return kept + (self._final_norm + self._logits if last else 0.0)

    def mixed_stage(
        self, chunks: Sequence[Sequence[str]], first: bool, last: bool, held: Sequence[int], shards: Shards = WHOLE
    ) -> Memory:
        """As `stage`, of layer ranges whose layers have `chunks` as policies; `held[c]` micro-batches of range c."""
        logits = held[-1] * self._logits if last else 0.0
        stored = sum(
            n * self.chunk_bytes(policies, last and c == len(chunks) - 1)
            for c, (n, policies) in enumerate(zip(held, chunks, strict=True))
        )
        repeated = max(self.recompute_working_set_bytes(policy) for policies in chunks for policy in policies)
        return self._memory(sum(map(len, chunks)), first, last, stored - logits + repeated, logits, shards)

    def _memory(
        self, num_layers: int, first: bool, last: bool, activations: float, logits: float, shards: Shards
    ) -> Memory:
        workload, (stage, count) = self._workload, shards
        transient = activations + logits + self._buffers
        params = weights = gradients = self.num_params(num_layers, first, last)
        if stage >= 2:
            gradients = params / count
        if stage == 3 and count > 1:
            gathered = self.gathered_params(num_layers, first, last)
            weights, gradients = params / count + gathered[0], gradients + gathered[1]
        return Memory(
            weights=weights * workload.element_bytes,
            gradients=gradients * workload.stored_gradient_bytes,
            master=params * workload.master_bytes / (count if stage else 1),
            optimizer=params * workload.optimizer_bytes / (count if stage else 1),
            activations=activations,
            logits=logits,
            buffers=self._buffers,
            reserve=c.COMMUNICATOR_BYTES + c.FRAGMENTATION * transient,
        )

    def max_layers(
        self, limit_bytes: float, first: bool, last: bool, policy: str, held: int, shards: Shards = WHOLE
    ) -> int:
        """The most layers that fit `limit_bytes`, possibly negative where not even none fits. Linear, so exact."""
        few = 2 if shards.stage == 3 else 0  # from here on linear: the units gathered whole stay the same
        low = self.stage(few, first, last, policy, held, shards).total
        high = self.stage(few + 1, first, last, policy, held, shards).total
        count = few + int((limit_bytes - low) // (high - low))
        # Rounding may put the last layer on either side of the limit; the check decides.
        while count >= 0 and self.stage(count, first, last, policy, held, shards).total > limit_bytes:
            count -= 1
        while self.stage(count + 1, first, last, policy, held, shards).total <= limit_bytes:
            count += 1
        return count


def layer_params(model: ModelSpec, shard: Shard) -> float:
    """Parameters of one layer on the fullest rank; norms and output biases are whole on every rank."""
    heads = shard.heads / model.num_heads
    return (
        (model.attention_q_params + model.attention_out_params) * heads
        + model.attention_kv_params * shard.kv_heads / model.num_kv_heads
        + model.mlp_params * shard.ffn / model.ffn_size
        + model.replicated_layer_params
    )

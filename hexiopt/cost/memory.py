"""Bytes on the fullest device of a stage: model states, activations by schedule position, logits, buffers."""

from dataclasses import dataclass, fields
from functools import cached_property

from hexiopt.cost import coefficients as c
from hexiopt.cost.compute import Shard, largest_shard
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


def in_flight(schedule: str, position: int, num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches whose activations stage `position` holds at its peak."""
    if schedule == "gpipe":
        return num_micro_batches
    return min(num_micro_batches, num_stages - position)


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

    def stage(self, num_layers: int, first: bool, last: bool, policy: str, held: int, shards: int = 1) -> Memory:
        """Bytes on the fullest device of a stage that holds `held` micro-batches in flight.

        `shards`: over how many devices ZeRO-1 spreads master weights and moments (1: not sharded).
        """
        workload = self._workload
        params = self.num_params(num_layers, first, last)
        activations = (
            held * num_layers * self.layer_activation_bytes(policy)
            + self.recompute_working_set_bytes(policy)
            + (held * self._final_norm if last else 0.0)
        )
        logits = held * self._logits if last else 0.0
        transient = activations + logits + self._buffers
        return Memory(
            weights=params * workload.element_bytes,
            gradients=params * workload.stored_gradient_bytes,
            master=params * workload.master_bytes / shards,
            optimizer=params * workload.optimizer_bytes / shards,
            activations=activations,
            logits=logits,
            buffers=self._buffers,
            reserve=c.COMMUNICATOR_BYTES + c.FRAGMENTATION * transient,
        )

    def max_layers(self, limit_bytes: float, first: bool, last: bool, policy: str, held: int, shards: int = 1) -> int:
        """The most layers that fit `limit_bytes`, possibly negative where not even none fits. Linear, so exact."""
        zero = self.stage(0, first, last, policy, held, shards).total
        one = self.stage(1, first, last, policy, held, shards).total
        count = int((limit_bytes - zero) // (one - zero))
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

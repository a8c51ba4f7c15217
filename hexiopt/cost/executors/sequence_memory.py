"""Bytes on every device of a sequence stage.

Each holds the whole weights and gradients of its layers, the activations of its own tokens, and for attention those of
its group's tokens and its own heads. Buffers beside those of any stage: the gradients of queries, keys and values on
both sides of an all-to-all; for the rings two blocks of keys and values and two of their gradients, of the largest
group, and an FP32 sum of the results, or of the gradients of the queries.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hexiopt.cost.executors.activations import Activations, Held
from hexiopt.cost.executors.memory import UNSHARDED, Memory, MemoryModel, StateSharding, most_together, transient
from hexiopt.numbers import coefficients as c
from hexiopt.plan.token_layout import Floats, Ints, Members, RingHolders, uneven_kv_copies
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.workload import Workload


class SequenceMemory:
    """Bytes for one layout and micro-batch size; stages of any length and position from it.

    `alone` is the memory model of one device that holds everything, `fused` [devices] whether attention is,
    `kv_heads` [devices] the key-value heads that each reads, `communicator_bytes` [devices].
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        alone: MemoryModel,
        own: Members,
        rings: RingHolders,
        kv_heads: Ints,
        fused: Floats,
        communicator_bytes: Floats,
        micro_batch_size: int,
    ) -> None:
        self._alone, self._communicator_bytes = alone, communicator_bytes
        size, dim, width = float(micro_batch_size), model.head_dim, workload.element_bytes
        group_tokens = own.group_tokens
        tokens, attended = size * own.tokens, size * group_tokens[own.group]
        parted = (np.bincount(own.group)[own.group] > 1).astype(float)
        all_heads = model.num_heads + 2 * model.num_kv_heads
        travelling = parted * dim * width * (tokens * all_heads + attended * (own.heads + 2 * kv_heads))
        if len(group_tokens) > 1:
            ringed = np.add.reduceat(np.tile(rings.kv_heads, len(group_tokens)), rings.starts)
            travelling += 4.0 * size * group_tokens.max() * 2 * dim * width * ringed
            travelling += attended * own.heads * float(dim * c.ACCUMULATOR_BYTES)
        held = Held(
            between=tokens,
            tokens=tokens,
            positions=own.tokens.astype(float),
            attended=attended,
            heads=own.heads.astype(float),
            kv_heads=kv_heads.astype(float),
            copied_kv_heads=uneven_kv_copies(own, kv_heads, model.num_heads, model.num_kv_heads).astype(float),
            gathered=np.zeros_like(tokens),
            scores=(1.0 - fused) * attended * workload.seq_len,
            fused=fused,
            parted=parted,
            travelling=travelling,
        )
        self.activations = Activations.of(model, workload, largest_shard(model, 1), held)

    def stage(
        self,
        ranges: Sequence[Sequence[str]],
        first: bool,
        last: bool,
        held: Sequence[int],
        shards: StateSharding = UNSHARDED,
    ) -> Floats:
        """The parts of `Memory` [parts, devices], of layer ranges with a policy for each layer; `held[c]` micro-batches
        of range c in flight."""
        states = self._alone.states(sum(map(len, ranges)), first, last, shards)
        counts, together = list(map(Counter, ranges)), most_together(ranges)
        kept = self.activations.of_stage(counts, first, last, held, together)
        beside = transient(self.activations, kept, last, held[-1], self._communicator_bytes)
        return np.array([*(np.full_like(kept, part) for part in states), *beside])

    @staticmethod
    def each(parts: Floats) -> tuple[Memory, ...]:
        """The memory of every device of `stage`."""
        return tuple(Memory(*column) for column in parts.T.tolist())

"""Bytes on every device of a sequence stage.

A device holds the whole weights and gradients of the stage's layers, the activations of its tokens, and for attention
those of its group's tokens and its heads. It has buffers beyond those of any stage: the gradients of queries, keys and
values on both sides of an all-to-all; for the rings two blocks of keys and values and two of their gradients, of the
largest group, and an FP32 sum of the results, or of the gradients of the queries.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hexiopt.cost.executors.activations import Activations, MicroBatchShare
from hexiopt.cost.executors.memory import UNSHARDED, Memory, MemoryModel, StateSharding, most_together, transient
from hexiopt.numbers import coefficients as c
from hexiopt.plan.token_layout import Floats, Ints, Members, RingHolders, uneven_kv_copies
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.workload import Workload


class SequenceMemory:
    """Bytes of stages of any length and position, for one layout and micro-batch size.

    `alone` is the memory model of a single device that holds everything; `fused` [devices] is 1 where attention is
    fused, else 0; `kv_heads` [devices] are the key-value heads that a device reads; `communicator_bytes` [devices].
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        alone: MemoryModel,
        members: Members,
        rings: RingHolders,
        kv_heads: Ints,
        fused: Floats,
        communicator_bytes: Floats,
        micro_batch_size: int,
    ) -> None:
        self._alone, self._communicator_bytes = alone, communicator_bytes
        size, dim, width = float(micro_batch_size), model.head_dim, workload.element_bytes
        group_tokens = members.group_tokens
        tokens, attended = size * members.tokens, size * group_tokens[members.group]
        parted = (np.bincount(members.group)[members.group] > 1).astype(float)
        all_heads = model.num_heads + 2 * model.num_kv_heads
        travelling = parted * dim * width * (tokens * all_heads + attended * (members.heads + 2 * kv_heads))
        if len(group_tokens) > 1:
            ringed = np.add.reduceat(np.tile(rings.kv_heads, len(group_tokens)), rings.starts)
            travelling += 4.0 * size * group_tokens.max() * 2 * dim * width * ringed
            travelling += attended * members.heads * float(dim * c.ACCUMULATOR_BYTES)
        share = MicroBatchShare(
            between=tokens,
            tokens=tokens,
            positions=members.tokens.astype(float),
            attended=attended,
            heads=members.heads.astype(float),
            kv_heads=kv_heads.astype(float),
            copied_kv_heads=uneven_kv_copies(members, kv_heads, model.num_heads, model.num_kv_heads).astype(float),
            gathered=np.zeros_like(tokens),
            scores=(1.0 - fused) * attended * workload.seq_len,
            fused=fused,
            parted=parted,
            travelling=travelling,
            routed=np.zeros_like(tokens),
            combined=np.zeros_like(tokens),
        )
        self.activations = Activations.of(model, workload, largest_shard(model, 1), share)

    def stage(
        self,
        ranges: Sequence[Sequence[str]],
        first: bool,
        last: bool,
        held: Sequence[int],
        shards: StateSharding = UNSHARDED,
    ) -> Floats:
        """The parts of `Memory` [parts, devices] of a stage with `ranges` [ranges][layers] of recompute policies and
        `held[c]` micro-batches of range c in flight."""
        states = self._alone.states(sum(map(len, ranges)), first, last, shards)
        counts, together = list(map(Counter, ranges)), most_together(ranges)
        activations = self.activations.of_stage(counts, first, last, held, together)
        others = transient(self.activations, activations, last, held[-1], self._communicator_bytes)
        return np.array([*(np.full_like(activations, part) for part in states), *others])

    @staticmethod
    def per_device(parts: Floats) -> tuple[Memory, ...]:
        """The memory of every device [devices], from `parts` of `stage`."""
        return tuple(Memory(*column) for column in parts.T.tolist())

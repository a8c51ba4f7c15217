"""Seconds and bytes of a stage with any range of layers of a model, at once: sums over the layers of each kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.numbers import coefficients as c
from hexiopt.problem.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def counts_by_kind(model: ModelSpec) -> Ints:
    """The number of layers of each kind in each range [kinds, first, end]; negative where it ends before its start."""
    depth = np.array(model.depth)
    before = np.zeros((len(model.kinds), len(depth) + 1), np.int64)
    for kind, row in enumerate(before):
        np.cumsum(depth == kind, out=row[1:])
    return before[:, None, :] - before[:, :, None]


@dataclass(frozen=True)
class RangeBytes:
    """Bytes on the fullest device of a stage by its range of layers: those of states, and of what micro-batches in
    flight store under each policy."""

    limit_bytes: float
    fixed_bytes: float  # without layers
    state_bytes: Floats  # of a layer [kinds]
    stored_bytes: Floats  # of a layer under each policy [policies, kinds]
    working_bytes: Floats  # of the layer that is recomputed [policies, kinds]
    buffer_bytes: Floats  # [kinds]

    @classmethod
    def of(
        cls,
        model: MemoryModel,
        limit_bytes: float,
        policies: Sequence[str],
        ends: tuple[bool, bool],
        in_flight: int,
        shards: StateSharding,
    ) -> "RangeBytes":
        """Of a stage with one layer range; `ends`: whether it is first, and last. Under ZeRO-2 and 3, what is whole for
        two layers at a time counts for any range."""
        (first, last), sizes, kinds = ends, model.activations, len(model.of_kind)
        transient = 1.0 + c.FRAGMENTATION

        def states(count: int, kind: int) -> float:
            layers = tuple([count * (k == kind) for k in range(kinds)])
            return sum(model.states(layers, first, last, shards))

        state_bytes = np.array([states(3, k) - states(2, k) for k in range(kinds)])
        fixed = states(2, 0) - 2.0 * float(state_bytes[0]) + model.communicator_bytes
        fixed += transient * in_flight * (first * sizes.token_ids + last * (sizes.final_norm + sizes.loss))
        fixed += transient * last * sizes.logits
        stored = [[kind.layer_bytes(policy) for kind in model.of_kind] for policy in policies]
        working = [[kind.working_set(policy, last) for kind in model.of_kind] for policy in policies]
        return cls(
            limit_bytes=limit_bytes,
            fixed_bytes=fixed,
            state_bytes=state_bytes,
            stored_bytes=transient * in_flight * np.array(stored),
            working_bytes=transient * np.array(working),
            buffer_bytes=transient * np.array([kind.buffers for kind in model.of_kind]),
        )

    def excess_bytes(self, counts: Ints) -> Floats:
        """Bytes beyond the limit of ranges with so many layers of each kind [kinds, ...], under each policy
        [policies, ...]."""
        present = counts > 0
        buffers = np.where(present, self.buffer_bytes.reshape(-1, *[1] * (counts.ndim - 1)), 0.0).max(axis=0)
        states = np.tensordot(self.state_bytes, counts, 1)
        stored = np.tensordot(self.stored_bytes, counts, 1)
        shape = (*self.working_bytes.shape, *[1] * (counts.ndim - 1))
        working = np.where(present, self.working_bytes.reshape(shape), 0.0).max(axis=1)
        excess: Floats = stored + working + (states + buffers + self.fixed_bytes - self.limit_bytes)
        return excess


@dataclass(frozen=True)
class LayerRanges:
    """A stage with any range of layers under each of `policies`: `layer_s` [policies, kinds] is a layer's forward and
    backward, `ends_s` what the stage takes beside layers, `bytes_of` what its parameter copies hold."""

    policies: tuple[str, ...]
    counts: Ints
    layer_s: Floats
    ends_s: float
    bytes_of: tuple[RangeBytes, ...]

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of a forward and a backward [policies, first, end]; infinite for what is no range."""
        seconds = np.tensordot(self.layer_s, self.counts, 1) + self.ends_s
        return np.where(self.counts.sum(axis=0) > 0, seconds, np.inf)

    @cached_property
    def excess(self) -> Floats:
        """The most bytes beyond the limit of a copy [policies, first, end]."""
        excess: Floats = np.max([copy.excess_bytes(self.counts) for copy in self.bytes_of], axis=0)
        return excess

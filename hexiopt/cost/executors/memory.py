"""Bytes on the fullest device of a stage: model states, activations by schedule position, logits, buffers,
communicators."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.activations import Activations, Held
from hexiopt.cost.executors.compute import Amount
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.operators import HOLDERS
from hexiopt.problem.space import range_lengths, recompute_groups
from hexiopt.problem.workload import JOINED, Workload
from hexiopt.schedules.in_flight import Counts, InFlight, largest


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
    communicators: float
    reserve: float

    @cached_property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.tensors + self.communicators + self.reserve

    @property
    def tensors(self) -> float:
        """Bytes of all tensors: what is neither held by communicators nor lost to fragmentation."""
        return self.states + self.activations + self.logits + self.buffers

    @property
    def states(self) -> float:
        """Bytes of weights, gradients, master weights and moments."""
        return self.weights + self.gradients + self.master + self.optimizer


_ROUNDING = 1e-12  # share of a memory limit left free, for rounding
_CLOSE = 1e-9  # share of a memory limit within which rounding may decide what fits
_ALMOST_NONE = 1e-9  # micro-batches in flight, to divide by, where there are none

MEMORY_PARTS = tuple(field.name for field in fields(Memory))


class StateSharding(NamedTuple):
    """How the states of a stage are spread: by which ZeRO stage, and over how many devices.

    ZeRO-1 spreads master weights and moments, ZeRO-2 gradients too, ZeRO-3 weights too (Rajbhandari et al., arXiv
    1910.02054, section 5), which it gathers unit by unit. Of norms and biases ZeRO-2 and 3 spread no more than ZeRO-1
    does, as DeepSpeed does of what is below `stage3_param_persistence_threshold`. `num_devices` is a mean where
    parameters differ in it.
    """

    stage: int = 0
    num_devices: float = 1

    @property
    def spread(self) -> float:
        """Over how many devices master weights and moments are spread."""
        return self.num_devices if self.stage else 1


UNSHARDED = StateSharding()


class MemoryModel:
    """Bytes for one TP degree, micro-batch size and model; stages of any length and position from it.

    What our runtime allocates (`tests/runtime/test_memory_use.py`). Of a processor, whose attention is fused,
    `flash_attention` is true. Of the ranks of a TP group, the most that any has of each kind: one
    has all of it, except where heads share key-value heads unevenly or tokens do not divide. `communicator_bytes` are
    those of any plan (`hexiopt/cost/executors/communicators.py`). Tokens between blocks are divided along the
    sequence; without sequence parallelism, every rank holds all of them.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        gpu: Gpu,
        tp: int,
        micro_batch_size: int,
        communicator_bytes: float = 0.0,
    ) -> None:
        shard = largest_shard(model, tp)
        self._workload = workload
        self.communicator_bytes = communicator_bytes
        tokens = micro_batch_size * workload.seq_len
        params, vectors = dict.fromkeys(HOLDERS, 0), dict.fromkeys(HOLDERS, 0)
        for group in model.parameter_groups:
            params[group.holder] += group.split.on(shard)
            vectors[group.holder] += group.vectors.on(shard)
        # With tied embeddings the last stage holds its own copy of the matrix, unless it is also the first.
        tied = params["ends"]
        self.layer_params, self._layer_vector_params = float(params["layer"]), float(vectors["layer"])
        self.embedding_params, self._head_params_alone = float(params["first"] + tied), float(params["last"] + tied)
        self._head_params_beside_embedding, self._final_norm_params = float(params["last"]), float(vectors["last"])
        between = float(
            micro_batch_size * (ceil(workload.seq_len / tp) if workload.sequence_parallel else workload.seq_len)
        )
        held = Held(
            between=between,
            tokens=float(tokens),
            positions=float(workload.seq_len),
            attended=float(tokens),
            heads=float(shard.heads),
            kv_heads=float(shard.kv_heads),
            copied_kv_heads=float(_copied_kv_heads(model, tp)),
            gathered=float(workload.sequence_parallel and tp > 1),
            scores=0.0 if gpu.flash_attention else float(tokens) * workload.seq_len,
            fused=float(gpu.flash_attention),
            parted=0.0,
            travelling=0.0,
        )
        self.activations = Activations.of(model, workload, shard, held)
        # Products alternate: the first of two reads hidden states and makes what a TP group divides, the second reads
        # that and makes hidden states, whose gradients are gathered. What is put off of a layer holds what its products
        # read, and the gradients of what they made.
        width, hidden, products = workload.element_bytes, model.hidden_size, model.layer.on(shard).products
        pairs, divided = len(products) // 2, sum([weights for _, weights in products]) / hidden
        read = sum([weights for _, weights in products[1::2]]) / hidden
        self.product_input_bytes = width * (pairs * hidden * between + read * tokens)
        self.late_bytes = width * (pairs * hidden * (between + tokens) + divided * tokens)
        self._rooms: Memo[tuple[float, bool, bool, tuple[str, ...], StateSharding], Callable[[int], float]] = Memo(
            lambda key: self._room_of(*key), 1024
        )

    def layer_activation_bytes(self, policy: str) -> float:
        """Stored activations of one layer and one micro-batch."""
        return self.activations.stored(policy)

    def recompute_working_set_bytes(self, policy: str, last: bool = False) -> float:
        """What the layer being recomputed holds beside the stored activations: see `Activations.working_set`."""
        return self.activations.working_set(policy, last)

    def num_params(self, num_layers: int, first: bool, last: bool) -> float:
        """Parameters on the fullest rank of a stage."""
        params = num_layers * self.layer_params
        if first:
            params += self.embedding_params
        if last:
            params += self._head_params_beside_embedding if first else self._head_params_alone
        return params

    def mean_holders(self, holders: Sequence[float], first: bool, last: bool) -> float:
        """Over how many devices the states of a stage are spread, `holders` those of each layer."""
        if len(set(holders)) == 1:
            return holders[0]
        sharded = (
            self.layer_params * sum(1 / n for n in holders)
            + (self.num_params(0, True, False) / holders[0] if first else 0.0)
            + (self.num_params(0, first, True) - self.num_params(0, first, False)) / holders[-1] * last
        )
        return self.num_params(len(holders), first, last) / sharded

    def whole_params(self, num_layers: int, first: bool, last: bool) -> float:
        """Parameters of units that a device of a ZeRO-3 stage holds whole beside its shards, at the worst moment: of
        weights, of the unit that runs and the next one, which is being gathered; of gradients, under ZeRO-2 too, of the
        unit that runs and the one before it, which is being scattered.

        Units are layers, the embedding and the LM head, which gathers a tied matrix too; without norms and biases.
        """
        units = [self.layer_params - self._layer_vector_params] * min(num_layers, 2)
        head = self._head_params_alone - self._final_norm_params
        units = [self.embedding_params] * first + units + [head] * last
        return max(map(sum, pairwise([*units, 0.0])), default=0.0)

    def stage(
        self, num_layers: int, first: bool, last: bool, policy: str, held: InFlight, shards: StateSharding = UNSHARDED
    ) -> Memory:
        """Bytes on the fullest device of a stage with one recompute policy that has `held` in flight.

        Its layers are divided among as many ranges as `hexiopt.problem.space.range_lengths` does.
        """
        lengths = range_lengths(num_layers, len(held[0]))
        ranges = [{policy: count} if count or len(lengths) == 1 else {} for count in lengths]
        return self.stage_of_ranges(ranges, first, last, held, shards)

    def layered(
        self, policies: Sequence[str], first: bool, last: bool, held: InFlight, shards: StateSharding = UNSHARDED
    ) -> Memory:
        """As `stage`, with a policy for each layer."""
        ends = [0, *accumulate(range_lengths(len(policies), len(held[0])))]
        parts = [policies[start:end] for start, end in pairwise(ends)]
        return self.stage_of_ranges(list(map(Counter, parts)), first, last, held, shards, most_together(parts))

    def stage_of_ranges(
        self,
        ranges: Sequence[Mapping[str, int]],
        first: bool,
        last: bool,
        held: InFlight,
        shards: StateSharding = UNSHARDED,
        together: int = 1,
    ) -> Memory:
        """As `stage`, of layer ranges with so many layers of each recompute policy, up to so many recomputed
        `together`."""
        final = len(ranges) - 1
        counts = held[0]
        if len(held) > 1:
            stored = [
                self.activations.of_range(own, first and at == 0, last and at == final) for at, own in enumerate(ranges)
            ]
            counts = largest(held, stored)
        activations = self.activations.of_stage(ranges, first, last, counts, together)
        states = self.states(sum([sum(own.values()) for own in ranges]), first, last, shards)
        return Memory(*states, *transient(self.activations, activations, last, counts[-1], self.communicator_bytes))

    def states(
        self, num_layers: int, first: bool, last: bool, shards: StateSharding
    ) -> tuple[float, float, float, float]:
        """Bytes of weights, gradients, master weights and optimiser."""
        stage, count = shards
        params = weights = gradients = self.num_params(num_layers, first, last)
        if stage >= 2 and count > 1:
            vectors = num_layers * self._layer_vector_params + last * self._final_norm_params
            gradients = (params - vectors) / count + vectors + self.whole_params(num_layers, first, last)
            if stage == 3:
                weights = gradients
        each, spread = self._workload.states, shards.spread
        return (
            weights * each.weight,
            gradients * each.gradient,
            params * each.master / spread,
            params * each.moment / spread,
        )

    def max_layers(
        self,
        limit_bytes: float,
        first: bool,
        last: bool,
        policy: str,
        held: InFlight,
        shards: StateSharding = UNSHARDED,
    ) -> int:
        """The most layers that fit `limit_bytes`, negative where not even none fits."""
        room = self._rooms[limit_bytes, first, last, (policy,), shards]
        stored, moments = self.activations.stored(policy), self.moments(held, first, last)
        chunks, close = len(held[0]), _CLOSE * limit_bytes

        def left_bytes(num_layers: int) -> float:
            lengths = range_lengths(num_layers, chunks)
            taken: float = max([stored * sum(map(mul, counts, lengths)) + ends for counts, ends in moments])
            return room(num_layers) - taken

        def fits(num_layers: int) -> bool:
            left = left_bytes(num_layers)
            if abs(left) > close:
                return left > 0
            # Rounding may put it on either side of the limit; the whole price decides.
            return self.stage(num_layers, first, last, policy, held, shards).total <= limit_bytes

        # From so many layers on, as many more in each range take as much each.
        few = 2 * chunks
        layer_bytes = (left_bytes(few) - left_bytes(2 * few)) / few
        count = max(-1, few + floor(left_bytes(few) / layer_bytes))
        while count >= 0 and not fits(count):
            count -= 1
        while fits(count + 1):
            count += 1
        return count

    def least_recomputed(
        self,
        limit_bytes: float,
        counts: range,
        first: bool,
        last: bool,
        smaller: str,
        faster: str,
        held: InFlight,
        shards: StateSharding = UNSHARDED,
    ) -> list[int]:
        """Per layer count, how many leading layers at least must use `smaller` for the stage to fit `limit_bytes`
        while the others use `faster` [counts]; at least 1, and count + 1 if no number suffices."""
        kept = self.activations
        stored, saved = kept.stored(faster), kept.stored(faster) - kept.stored(smaller)
        if saved <= 0 or not counts:
            return [n + 1 for n in counts]
        room = self._rooms[limit_bytes, first, last, (smaller, faster), shards]
        moments = self.moments(held, first, last)
        in_flight, ends_bytes = (np.array(column, dtype=float) for column in zip(*moments, strict=True))
        lengths = _lengths(counts, in_flight.shape[1])
        rooms = np.array([[room(n)] for n in counts])
        # By number of layers and moment: how many micro-batches, each of a layer, must be lean for the stage to fit.
        missing = (stored * (lengths @ in_flight.T) + ends_bytes - rooms) / saved
        if in_flight.size == 1:  # the usual case
            needed = np.minimum(np.ceil(missing / np.maximum(in_flight, _ALMOST_NONE)), lengths + 1)
            alone: list[int] = np.maximum(1, needed[:, 0]).astype(int).tolist()
            return alone
        # By range too: how many there are, and how many of its layers it takes after the ranges before.
        there = lengths[:, None, :] * in_flight
        up_to = np.cumsum(there, axis=2)
        left = missing[:, :, None] - (up_to - there)
        layers = np.clip(np.ceil(left / np.maximum(in_flight, _ALMOST_NONE)), 0, lengths[:, None, :]).sum(axis=2)
        needed = layers + (missing > up_to[:, :, -1])
        found: list[int] = np.maximum(1, needed.max(axis=1)).astype(int).tolist()
        return found

    def room(
        self,
        limit_bytes: float,
        num_layers: int,
        first: bool,
        last: bool,
        policies: Sequence[str],
        shards: StateSharding,
    ) -> float:
        """Bytes left of `limit_bytes` for what micro-batches in flight store, where layers have any of `policies`."""
        kept, states = self.activations, sum(self.states(num_layers, first, last, shards))
        # What `transient` adds, solved for the activations.
        left = (limit_bytes * (1 - _ROUNDING) - states - self.communicator_bytes) / (1 + c.FRAGMENTATION)
        return left - kept.buffers - last * kept.logits - max(kept.working_set(policy, last) for policy in policies)

    def _room_of(
        self, limit_bytes: float, first: bool, last: bool, policies: tuple[str, ...], shards: StateSharding
    ) -> Callable[[int], float]:
        """`room` by the number of layers."""

        def room(num_layers: int) -> float:
            return self.room(limit_bytes, num_layers, first, last, policies, shards)

        if shards.stage >= 2:
            return room  # not linear: few layers are whole, or none
        none = room(0)
        layer = none - room(1)
        return lambda num_layers: none - num_layers * layer

    def moments(self, held: InFlight, first: bool, last: bool) -> list[tuple[Counts, float]]:
        """When a stage may hold most: the micro-batches of each of its layer ranges (`held`), and the bytes that
        embedding and head store then."""
        kept = self.activations
        embedding, head = first * kept.token_ids, last * (kept.final_norm + kept.loss)
        return [(counts, counts[0] * embedding + counts[-1] * head) for counts in held]


def most_together(ranges: Iterable[Sequence[str]]) -> int:
    """The most layers that are recomputed together, of ranges with a policy for each layer, or one for all."""
    return max([max(recompute_groups(policies)) for policies in ranges if JOINED in policies], default=1)


@lru_cache(maxsize=4096)
def _lengths(counts: range, chunks: int) -> NDArray[np.float64]:
    """`range_lengths` of each of `counts`."""
    return np.array([range_lengths(n, chunks) for n in counts], dtype=float).reshape(len(counts), chunks)


def transient(
    kept: Activations[Amount], activations: Amount, last: bool, held: int, communicators: Amount
) -> tuple[Amount, Amount, Amount, Amount, Amount]:
    """Bytes of activations (those of tokens and layers given), logits, buffers, communicators (given) and reserve,
    where the head of a `last` stage holds `held` micro-batches."""
    logits = 0.0 * activations
    if last:
        activations = activations + held * kept.final_norm
        logits = held * kept.loss + kept.logits
    reserve = c.FRAGMENTATION * (activations + logits + kept.buffers)
    return activations, logits, kept.buffers, communicators, reserve


def _copied_kv_heads(model: ModelSpec, tp: int) -> int:
    """By how many the query heads of a rank exceed the key-value heads that they meet, unless each serves equally many
    of them: then attention reads them in place."""
    group = model.num_heads // model.num_kv_heads
    low, extra = divmod(model.num_heads, tp)
    most = start = 0
    for rank in range(tp):
        end = start + low + (rank < extra)
        served = Counter(head // group for head in range(start, end))
        if len(set(served.values())) > 1:
            most = max(most, end - start - len(served))
        start = end
    return most

"""Bytes on the fullest device of a stage: model states, activations by schedule position, logits, buffers,
communicators."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.activations import Activations, MicroBatchShare, mean
from hexiopt.cost.executors.compute import Amount
from hexiopt.cost.executors.experts.times import ExpertSharing
from hexiopt.cost.executors.states import ByUnit, Layers, RankStates
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.kinds import Attention
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.operators import Layer, LayerShare, Shard
from hexiopt.problem.parameters import Parameters
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
        """All bytes."""
        return self.tensors + self.communicators + self.reserve

    @property
    def tensors(self) -> float:
        """Bytes of all tensors: all but communicators and the reserve for fragmentation."""
        return self.states + self.activations + self.logits + self.buffers

    def with_buffers(self, more: float) -> "Memory":
        """The memory with `more` bytes of buffers, and what is lost to fragmentation with them."""
        if not more:
            return self
        return replace(self, buffers=self.buffers + more, reserve=self.reserve + c.FRAGMENTATION * more)

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
    1910.02054, section 5), which it gathers unit by unit. Of norms and biases ZeRO-2 and ZeRO-3 spread no more than
    ZeRO-1, as DeepSpeed with parameters below `stage3_param_persistence_threshold`. `num_devices` is a mean where
    parameters differ in it. ZeRO-1 spreads a matrix that first and last stages hold together over `tied_devices`, those
    of both (None: over as many as all else).
    """

    stage: int = 0
    num_devices: float = 1
    tied_devices: float | None = None

    def with_more(self, count: int) -> "StateSharding":
        """Over so many more devices."""
        tied = self.tied_devices
        return StateSharding(self.stage, self.num_devices + count, None if tied is None else tied + count)

    def share(self, amounts: ByUnit, num_layers: Layers, first: bool, last: bool) -> float:
        """What a device has of the `amounts` of master weights or moments of a stage, as of `ByUnit.stage`."""
        devices = self.num_devices if self.stage else 1
        return amounts.spread(num_layers, first, last, devices, self.tied_devices or devices)


UNSHARDED = StateSharding()


class Holders(NamedTuple):
    """Over how many devices the states of a copy of a stage are spread: one number for all layers, or one a layer; and
    those of a tied matrix, as of `StateSharding`."""

    layers: tuple[float, ...]
    tied: float | None = None


class MemoryModel:
    """Bytes of stages of any length and position, for one model, GPU type, TP degree and micro-batch size.

    They are what our runtime allocates (`tests/runtime/test_memory_use.py`), where attention on a processor counts as
    fused. Each kind of bytes is the most of any rank of the TP group; a single rank has the most of all kinds, unless
    heads share key-value heads unevenly or tokens do not divide. `communicator_bytes` are those of any plan
    (`hexiopt/cost/executors/communicators.py`). With sequence parallelism the ranks divide the tokens between blocks;
    without it every rank holds all of them.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        gpu: Gpu,
        tp: int,
        micro_batch_size: int,
        communicator_bytes: float = 0.0,
        sharing: ExpertSharing | None = None,
    ) -> None:
        """`micro_batch_size` sequences come to the TP group, none to devices that hold experts alone; `sharing`: what
        the fullest device has of the experts, by default what equal ranks of the group have."""
        self._workload = workload
        self.communicator_bytes = communicator_bytes
        tokens, replicas = micro_batch_size * workload.seq_len, 1 if sharing is None else sharing.replicas
        parameters, sharing = Parameters(model, workload), sharing or ExpertSharing(tp, 1, micro_batch_size)
        layers = [model.layer_of(kind) for kind in model.kinds]
        shards = [_shard(layer, tp, model.vocab_size, sharing) for layer in layers]
        self.rank_states = RankStates.of(parameters, shards, 1, sharing.alone)
        self.sharded_states = self.rank_states
        if replicas > 1:
            self.sharded_states = RankStates.of(parameters, shards, replicas, sharing.alone)
        share = MicroBatchShare(
            between=float(micro_batch_size * tokens_between(workload, tp)),
            tokens=float(tokens),
            positions=0.0 if sharing.alone else float(workload.seq_len),
            attended=float(tokens),
            heads=0.0,
            kv_heads=0.0,
            copied_kv_heads=0.0,
            gathered=float(workload.sequence_parallel and tp > 1),
            scores=0.0 if gpu.flash_attention else float(tokens) * workload.seq_len,
            fused=float(gpu.flash_attention),
            parted=0.0,
            travelling=0.0,
            routed=0.0,
            combined=float(tokens if sharing.by_columns else micro_batch_size * tokens_between(workload, tp)),
        )
        of_kind = list[Activations[float]]()
        for layer, its_shard in zip(layers, shards, strict=True):
            attention, experts, rows = layer.kind.attention, layer.kind.experts, 0.0
            if experts is not None:
                computed, shared = sharing.on_device(experts)
                rows, layer = shared.rows(computed, workload), model.layer_of(layer.kind.with_experts(computed))
            its_share = replace(
                share,
                heads=float(its_shard.heads),
                kv_heads=float(its_shard.kv_heads),
                copied_kv_heads=0.0 if attention is None else float(_uneven_kv_copies(attention, tp)),
                routed=rows,
            )
            of_kind.append(Activations.of(model, workload, its_shard, its_share, layer))
        if model.extra_layers:  # each keeps what a layer does, and what the head does once more
            further = [of_kind[model.kinds.index(kind)] for kind in model.extra_layers]
            more = sum(sizes.layer + sizes.internals + sizes.final_norm + sizes.loss for sizes in further)
            of_kind = [replace(sizes, loss=sizes.loss + more) for sizes in of_kind]
        self.of_kind = tuple(of_kind)
        self.activations = of_kind[0] if len(layers) == 1 else mean(of_kind, model.weight_of_kinds)
        self._free_bytes: Memo[tuple[float, bool, bool, tuple[str, ...], StateSharding], Callable[[int], float]] = Memo(
            lambda key: self._free_bytes_of(*key), 1024
        )
        self.product_input_bytes = self.late_bytes = 0.0
        if not model.layers:
            self._late(layers[0].on(shards[0]), model.hidden_size, share)

    def _late(self, layer: LayerShare, hidden: int, share: MicroBatchShare[float]) -> None:
        # Products alternate: the first of two reads hidden states and makes what a TP group divides, the second reads
        # that and makes hidden states, whose gradients are gathered. What is put off of a layer holds what its products
        # read, and the gradients of what they made.
        weights = [product.weights for product in layer.products]
        width, tokens = self._workload.element_bytes, share.tokens
        pairs, divided, read = len(weights) // 2, sum(weights) / hidden, sum(weights[1::2]) / hidden
        self.product_input_bytes = width * (pairs * hidden * share.between + read * tokens)
        self.late_bytes = width * (pairs * hidden * (share.between + tokens) + divided * tokens)

    def layer_activation_bytes(self, policy: str) -> float:
        """Bytes of stored activations of one layer and one micro-batch."""
        return self.activations.layer_bytes(policy)

    def recompute_working_set_bytes(self, policy: str, last: bool = False) -> float:
        """Bytes of a layer during its recomputation beside the stored activations: see `Activations.working_set`."""
        return self.activations.working_set(policy, last)

    def num_params(self, num_layers: Layers, first: bool, last: bool) -> float:
        """Trained parameters on the fullest rank of a stage of so many mean layers, or layers of each kind."""
        return self.rank_states.params.stage(num_layers, first, last)

    def sharding(self, zero_stage: int, holders: Holders, first: bool, last: bool) -> StateSharding:
        """How the states of a stage are spread, over the mean number of devices."""
        layers, tied = holders
        if len(set(layers)) == 1:
            return StateSharding(zero_stage, layers[0], tied)
        apart = 0.0 if tied is None else self.rank_states.params.tied
        embedding = self.num_params(0, True, False) - apart if first else 0.0
        head = self.num_params(0, first, True) - self.num_params(0, first, False) if last else 0.0
        head -= apart if last and not first else 0.0
        whole = self.num_params(len(layers), False, False) + embedding + head
        sharded = self.rank_states.params.layer * sum(1 / n for n in layers) + embedding / layers[0] + head / layers[-1]
        return StateSharding(zero_stage, whole / sharded, tied)

    def whole_params(self, num_layers: int, first: bool, last: bool) -> float:
        """The most parameters, without norms and biases, of units that a device of a ZeRO-3 stage holds whole beside
        its shards. Weights: those of the unit that runs and of the next one, which is being gathered. Gradients, under
        ZeRO-2 too: those of the unit that runs and of the one before, which is being scattered.

        Units are layers, the embedding and the LM head, which gathers a tied matrix too.
        """
        params, vectors = self.rank_states.params, self.rank_states.vectors
        units = [params.layer - vectors.layer] * min(num_layers, 2)
        units = [params.embedding] * first + units + [params.head - vectors.head] * last
        return max(map(sum, pairwise([*units, 0.0])), default=0.0)

    def stage(
        self, num_layers: int, first: bool, last: bool, policy: str, held: InFlight, shards: StateSharding = UNSHARDED
    ) -> Memory:
        """Bytes on the fullest device of a stage that has `held` in flight, its layers under one recompute policy.

        `hexiopt.problem.space.range_lengths` divides the layers among the ranges of `held`.
        """
        lengths = range_lengths(num_layers, len(held[0]))
        ranges = [{policy: count} if count or len(lengths) == 1 else {} for count in lengths]
        return self.stage_of_ranges(ranges, first, last, held, shards)

    def stage_of_layers(
        self, policies: Sequence[str], first: bool, last: bool, held: InFlight, shards: StateSharding = UNSHARDED
    ) -> Memory:
        """As `stage`, with a policy for each layer [layers]."""
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
        """As `stage`, with the number of layers of each recompute policy for each layer range, up to so many of them
        recomputed `together`."""
        final = len(ranges) - 1
        counts = held[0]
        if len(held) > 1:
            stored = [
                self.activations.of_range(layers, first and at == 0, last and at == final)
                for at, layers in enumerate(ranges)
            ]
            counts = largest(held, stored)
        activations = self.activations.of_stage(ranges, first, last, counts, together)
        states = self.states(sum([sum(layers.values()) for layers in ranges]), first, last, shards)
        return Memory(*states, *transient(self.activations, activations, last, counts[-1], self.communicator_bytes))

    def stage_of_kinds(
        self,
        ranges: Sequence[Sequence[Mapping[str, int]]],
        first: bool,
        last: bool,
        held: InFlight,
        shards: StateSharding = UNSHARDED,
        together: int = 1,
    ) -> Memory:
        """As `stage_of_ranges`, with the number of layers of each kind and recompute policy [ranges][kinds]."""
        final, kinds = len(ranges) - 1, range(len(self.of_kind))
        stored = [
            self.activations.of_range({}, first and at == 0, False)
            + sum([self.of_kind[k].of_range(layers[k], False, False) for k in kinds])
            for at, layers in enumerate(ranges)
        ]
        ends = last * (self.activations.final_norm + self.activations.loss)
        counts = held[0] if len(held) == 1 else largest(held, [*stored[:final], stored[final] + ends])
        working = [
            self.of_kind[k].working_set(policy, last, together)
            for layers in ranges
            for k in kinds
            for policy in layers[k]
        ]
        activations = sum(map(mul, counts, stored)) + max(working, default=0.0)
        layers_of = tuple([sum([sum(layers[k].values()) for layers in ranges]) for k in kinds])
        states = self.states(layers_of, first, last, shards)
        buffers = max([self.of_kind[k].buffers for k in kinds if layers_of[k]], default=self.activations.buffers)
        sizes = replace(self.activations, buffers=buffers)
        return Memory(*states, *transient(sizes, activations, last, counts[-1], self.communicator_bytes))

    def states(
        self, num_layers: Layers, first: bool, last: bool, shards: StateSharding
    ) -> tuple[float, float, float, float]:
        """Bytes of weights, gradients, master weights and moments on the fullest device of a stage of so many mean
        layers, or layers of each kind."""
        (stage, count, _), at = shards, (num_layers, first, last)
        rank = self.sharded_states if stage else self.rank_states
        params = weights = gradients = self.num_params(*at)
        if stage >= 2 and count > 1:
            vectors = rank.vectors.stage(*at)
            layers = num_layers if isinstance(num_layers, int) else sum(num_layers)
            gradients = (params - vectors) / count + vectors + self.whole_params(layers, first, last)
            if stage == 3:
                weights = gradients
        sizes = self._workload.states
        return (
            weights * sizes.weight + rank.frozen_bytes.stage(*at),
            gradients * (sizes.gradient + self._workload.sum_buffer_bytes),
            shards.share(rank.spread, *at) * sizes.master,
            shards.share(rank.moment_bytes, *at),
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
        """The most layers that fit `limit_bytes`, negative where not even zero fit."""
        free_bytes = self._free_bytes[limit_bytes, first, last, (policy,), shards]
        stored, moments = self.activations.layer_bytes(policy), self.moments(held, first, last)
        chunks, close = len(held[0]), _CLOSE * limit_bytes

        def spare_bytes(num_layers: int) -> float:
            lengths = range_lengths(num_layers, chunks)
            used: float = max([stored * sum(map(mul, counts, lengths)) + ends for counts, ends in moments])
            return free_bytes(num_layers) - used

        def fits(num_layers: int) -> bool:
            spare = spare_bytes(num_layers)
            if abs(spare) > close:
                return spare > 0
            # Rounding decides the side of the limit; ask the formula of the price.
            return self.stage(num_layers, first, last, policy, held, shards).total <= limit_bytes

        # From two layers per range on, bytes grow linearly with as many more in each range.
        few = 2 * chunks
        layer_bytes = (spare_bytes(few) - spare_bytes(2 * few)) / few
        count = max(-1, few + floor(spare_bytes(few) / layer_bytes))
        while count >= 0 and not fits(count):
            count -= 1
        while fits(count + 1):
            count += 1
        return count

    def min_recompute_layers(
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
        """The fewest leading layers that must use the policy `smaller`, the others `faster`, for a stage of each of
        `counts` layers to fit `limit_bytes` [counts]: at least 1, and count + 1 where no number suffices."""
        sizes = self.activations
        stored, saved = sizes.layer_bytes(faster), sizes.layer_bytes(faster) - sizes.layer_bytes(smaller)
        if saved <= 0 or not counts:
            return [n + 1 for n in counts]
        free_bytes = self._free_bytes[limit_bytes, first, last, (smaller, faster), shards]
        moments = self.moments(held, first, last)
        in_flight, ends_bytes = (np.array(column, dtype=float) for column in zip(*moments, strict=True))
        lengths = _lengths(counts, in_flight.shape[1])
        free = np.array([[free_bytes(n)] for n in counts])
        # By layer count and moment: activations of one layer and micro-batch that must shrink for the stage to fit.
        missing = (stored * (lengths @ in_flight.T) + ends_bytes - free) / saved
        if in_flight.size == 1:  # the usual case
            needed = np.minimum(np.ceil(missing / np.maximum(in_flight, _ALMOST_NONE)), lengths + 1)
            single: list[int] = np.maximum(1, needed[:, 0]).astype(int).tolist()
            return single
        # By range too: the activations in it, and the layers that must shrink after all those of the ranges before.
        there = lengths[:, None, :] * in_flight
        up_to = np.cumsum(there, axis=2)
        left = missing[:, :, None] - (up_to - there)
        layers = np.clip(np.ceil(left / np.maximum(in_flight, _ALMOST_NONE)), 0, lengths[:, None, :]).sum(axis=2)
        needed = layers + (missing > up_to[:, :, -1])
        least: list[int] = np.maximum(1, needed.max(axis=1)).astype(int).tolist()
        return least

    def free_bytes(
        self,
        limit_bytes: float,
        num_layers: int,
        first: bool,
        last: bool,
        policies: Sequence[str],
        shards: StateSharding,
    ) -> float:
        """Bytes of `limit_bytes` that are free for what micro-batches in flight store, under any of `policies`."""
        sizes, states = self.activations, sum(self.states(num_layers, first, last, shards))
        # What `transient` adds, solved for the activations.
        free = (limit_bytes * (1 - _ROUNDING) - states - self.communicator_bytes) / (1 + c.FRAGMENTATION)
        return free - sizes.buffers - last * sizes.logits - max(sizes.working_set(policy, last) for policy in policies)

    def _free_bytes_of(
        self, limit_bytes: float, first: bool, last: bool, policies: tuple[str, ...], shards: StateSharding
    ) -> Callable[[int], float]:
        """`free_bytes` by the number of layers."""

        def free_bytes(num_layers: int) -> float:
            return self.free_bytes(limit_bytes, num_layers, first, last, policies, shards)

        if shards.stage >= 2:
            return free_bytes  # not linear: up to two layers are held whole
        empty_bytes = free_bytes(0)
        layer_bytes = empty_bytes - free_bytes(1)
        return lambda num_layers: empty_bytes - num_layers * layer_bytes

    def moments(self, held: InFlight, first: bool, last: bool) -> list[tuple[Counts, float]]:
        """The moments of `held` at which a stage may hold most: the micro-batches of each layer range, and the bytes
        that embedding and head store then."""
        sizes = self.activations
        embedding, head = first * sizes.token_ids, last * (sizes.final_norm + sizes.loss)
        return [(counts, counts[0] * embedding + counts[-1] * head) for counts in held]


def tokens_between(workload: Workload, tp: int) -> int:
    """Tokens of a sequence that the fullest rank of a TP group has between blocks."""
    return ceil(workload.seq_len / tp) if workload.sequence_parallel else workload.seq_len


def most_together(ranges: Iterable[Sequence[str]]) -> int:
    """The most layers that are recomputed together, in layer ranges with a policy for each layer or one for all."""
    return max([max(recompute_groups(policies)) for policies in ranges if JOINED in policies], default=1)


@lru_cache(maxsize=4096)
def _lengths(counts: range, chunks: int) -> NDArray[np.float64]:
    """`range_lengths` of each of `counts` [counts, chunks]."""
    return np.array([range_lengths(n, chunks) for n in counts], dtype=float).reshape(len(counts), chunks)


def transient(
    sizes: Activations[Amount], activations: Amount, last: bool, held: int, communicators: Amount
) -> tuple[Amount, Amount, Amount, Amount, Amount]:
    """Bytes of activations, logits, buffers, communicators and reserve, from the `activations` of embedding and layers;
    the head of a `last` stage holds `held` micro-batches."""
    logits = 0.0 * activations
    if last:
        activations = activations + held * sizes.final_norm
        logits = held * sizes.loss + sizes.logits
    reserve = c.FRAGMENTATION * (activations + logits + sizes.buffers)
    return activations, logits, sizes.buffers, communicators, reserve


def _shard(layer: Layer, tp: int, vocab_size: int, sharing: ExpertSharing) -> Shard:
    """The share of a layer on the fullest rank."""
    shard = Shard(0, 0, 0, 0, 1) if sharing.alone else layer.shard(tp, vocab_size)
    return shard if layer.kind.experts is None else shard._replace(experts=sharing.count(layer.kind.experts))


def _uneven_kv_copies(attention: Attention, tp: int) -> int:
    """The number by which a rank's query heads exceed its key-value heads, where these do not serve equally many of
    them; elsewhere attention reads key-value heads in place, and it is 0. The most of any rank of a TP group."""
    group = attention.heads // attention.kv_heads
    low, extra = divmod(attention.heads, tp)
    most = start = 0
    for rank in range(tp):
        end = start + low + (rank < extra)
        served = Counter(head // group for head in range(start, end))
        if len(set(served.values())) > 1:
            most = max(most, end - start - len(served))
        start = end
    return most

"""Galvatron's stages: planned as if every GPU were the slowest of those used, with the least memory of any.

Within a stage of our plan format all layers have one TP and one DP degree, so that they are alike, and its layer-wise
dynamic programming over strategies under a memory budget (Miao et al., arXiv 2211.13878, section 3.3) comes to one
number: how many layers recompute, as few as fit. Layers per stage start balanced by memory and move one by one from
the slowest stage until they are balanced by time (Wang et al., arXiv 2307.02031, section 4.3).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.problem.space import recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import InFlight
from solvers.baselines._plans import divides_model, dividing_sizes, in_flight_of_1f1b
from solvers.completion.allocation import least_bottleneck
from solvers.core.partition import devices_by_machine
from solvers.frame.starts import cut

Ranks = tuple[int, ...]  # devices in the order of ranks
ZEROS = (3, 2, 0)  # SDP, and the two kinds of its plain data parallelism
_ROUNDING = 1e-9  # share of the memory left free, for rounding


@dataclass(frozen=True, slots=True)
class GalvatronChoice:
    """What is planned: TP degree per stage, number of pipelines, ZeRO stage, and micro-batches.

    `policies` are those of layers that need not recompute and of layers that must.
    """

    tps: tuple[int, ...]
    pipelines: int
    zero: int
    micro_batch_size: int
    num_micro_batches: int
    policies: tuple[str, str]

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch in all pipelines."""
        return self.pipelines * self.micro_batch_size

    def differs_in_one(self, other: "GalvatronChoice") -> bool:
        """Whether at most one of degrees, sharding, size and policies differs; the rest follows from these."""
        mine = (self.tps, self.zero, self.sequences, self.policies)
        theirs = (other.tps, other.zero, other.sequences, other.policies)
        return sum(a != b for a, b in zip(mine, theirs, strict=True)) <= 1


@dataclass(frozen=True, slots=True)
class RecomputeOption:
    """Seconds of each direction of a stage of `num_layers`, the first `recomputed` of which recompute.

    `num_bytes` is its memory without recompute, by which stages are balanced.
    """

    num_layers: int
    recomputed: int
    forward_s: float
    backward_s: float
    num_bytes: float = field(compare=False)  # two GPU types may need unequal memory for the same plan

    @property
    def seconds(self) -> float:
        """Seconds of both directions."""
        return self.forward_s + self.backward_s

    def recompute(self, choice: GalvatronChoice) -> tuple[str, ...]:
        """The policies of the layers, one for all where they are alike."""
        fast, smaller = choice.policies
        each = (smaller,) * self.recomputed + (fast,) * (self.num_layers - self.recomputed)
        return each[:1] if len(set(each)) == 1 else each


StageSplit = tuple[RecomputeOption, ...]  # per stage
RecomputeOptions = list[RecomputeOption]  # of a stage: of 1, 2, ... layers, as many as fit


class StagePlanner:
    """Choices and layers for ranks of any machines, computed once each: the order of ranks changes neither."""

    def __init__(self, model: PlanPricer) -> None:
        self._model, self._problem = model, model.problem
        self._options: Memo[tuple[Any, ...], RecomputeOptions] = Memo(lambda key: self._all_options(*key))
        self._splits: Memo[tuple[frozenset[int], GalvatronChoice], list[StageSplit]] = Memo(
            lambda key: self._all_splits(*key), limit=20_000
        )
        self._choices: Memo[frozenset[int], list[GalvatronChoice]] = Memo(self._all_choices)
        self._tp_groups: Memo[tuple[frozenset[int], int], frozenset[TpGroup]] = Memo(
            lambda key: self._all_tp_groups(*key)
        )

    def policies(self) -> list[tuple[str, str]]:
        """Pairs of (policy of most layers, policy of layers that must save memory)."""
        allowed = recompute_policies(self._problem.workload)
        if len(allowed) == 1:
            return [(allowed[0], allowed[0])]
        if self._problem.space.recompute_per_stage:
            return [("none", "full")]
        return [("none", "none"), ("full", "full")]

    def tp_degrees(self, order: Collection[int], block: int) -> list[int]:
        """Powers of two that divide the ranks of every machine and the blocks of ranks into whole TP groups."""
        problem = self._problem
        used = Counter(problem.cluster.machine_of[list(order)].tolist())

        def fits(tp: int) -> bool:
            return all(
                n % tp == 0 and tp in problem.space.allowed_tp(problem.cluster.machines[m].num_gpus)
                for m, n in used.items()
            )

        powers = (1 << k for k in range(block.bit_length()))
        return [tp for tp in powers if block % tp == 0 and fits(tp) and divides_model(problem, tp)]

    def choices(self, order: Ranks) -> list[GalvatronChoice]:
        """All degrees, shardings and micro-batches for ranks in any order of machines, with one TP degree for all
        stages."""
        return self._choices[frozenset(order)]

    def _all_choices(self, order: frozenset[int]) -> list[GalvatronChoice]:
        problem, space, batch = self._problem, self._problem.space, self._problem.workload.global_batch
        choices = []
        zeros = [zero for zero in ZEROS if zero in sharding_stages(problem.workload)]
        for stages in (1 << k for k in range(min(len(order), problem.model.num_layers).bit_length())):
            block, rest = divmod(len(order), stages)
            if rest or stages > problem.model.num_layers or space.num_stages not in (None, stages):
                continue
            degrees = self.tp_degrees(order, block)
            for widest in degrees:
                pipelines = block // widest
                if space.num_pipelines not in (None, pipelines):
                    continue
                for size, zero, policies in product(dividing_sizes(problem, pipelines), zeros, self.policies()):
                    count = batch // (pipelines * size)
                    choices.append(GalvatronChoice((widest,) * stages, pipelines, zero, size, count, policies))
        return choices

    def mixed(self, order: Ranks, uniform: GalvatronChoice) -> list[GalvatronChoice]:
        """The choice in which every stage has its fastest TP degree up to that of `uniform`, if it is another one."""
        space, layers, stages = self._problem.space, self._problem.model.num_layers, len(uniform.tps)
        widest, tps = uniform.tps[0], []
        if not space.replicas or not space.uneven_tp or stages == 1:
            return []
        degrees = self.tp_degrees(order, len(order) // stages)
        for s in range(stages):
            fastest = (float("inf"), widest)
            for tp in degrees:
                if widest % tp == 0 == uniform.micro_batch_size % (widest // tp):  # replicas share samples equally
                    options = self._stage_options(frozenset(order), uniform, s, tp)
                    mean = -(-layers // stages)
                    if len(options) >= mean:
                        fastest = min(fastest, (options[mean - 1].seconds, tp))
            tps.append(fastest[1])
        if widest not in tps or len(set(tps)) == 1:
            return []
        return [replace(uniform, tps=tuple(tps))]

    def _all_tp_groups(self, devices: frozenset[int], tp: int) -> frozenset[TpGroup]:
        """The TP groups of a degree, those that cost the same once."""
        by_machine = devices_by_machine(self._problem.cluster, sorted(devices))
        return frozenset(self._model.tp_group(group) for ranks in by_machine.values() for group in cut(ranks, tp))

    def _stage_options(self, devices: frozenset[int], choice: GalvatronChoice, s: int, tp: int) -> RecomputeOptions:
        """The options of stage `s` with TP degree `tp`."""
        num_stages = len(choice.tps)
        holders = len(devices) // num_stages // tp
        spread, samples = StateSharding(choice.zero, holders), choice.sequences // holders
        tp_groups, held = self._tp_groups[devices, tp], in_flight_of_1f1b(s, num_stages, choice.num_micro_batches)
        return self._options[tp_groups, s == 0, s == num_stages - 1, samples, held, spread, choice.policies]

    def _all_options(
        self,
        tp_groups: frozenset[TpGroup],
        first: bool,
        last: bool,
        samples: int,
        held: InFlight,
        spread: StateSharding,
        policies: tuple[str, str],
    ) -> RecomputeOptions:
        """The options of a stage, whose memory and seconds are linear in the layers (from the third on, which ZeRO-3 no
        longer holds whole)."""
        model, (fast, smaller) = self._model, policies
        limit = min(tp_group.gpu.usable_memory_bytes for tp_group in tp_groups) * (1 - _ROUNDING)
        n = np.arange(1, self._problem.model.num_layers + 1)
        recomputed, num_bytes = np.zeros(len(n), np.int64), np.zeros(len(n))
        for memory in {
            id(m): m for m in (model.stages.memory_model(tp_group, samples) for tp_group in tp_groups)
        }.values():
            few = [memory.stage(k, first, last, fast, held, spread).total for k in (1, 2, 3, 4)]
            plain = np.where(n < 3, np.take(few, n - 1, mode="clip"), few[2] + (n - 3) * (few[3] - few[2]))
            after_1, after_2 = (
                memory.stage_of_ranges(({smaller: k, fast: 3 - k},), first, last, held, spread).total for k in (1, 2)
            )
            # By each layer that recomputes; by the first of them.
            saved, working = after_1 - after_2, 2 * after_1 - after_2 - few[2]
            over = plain - limit
            if saved > 0:
                needed = np.where(over > 0, np.ceil((over + working) / saved), 0)
            else:
                needed = np.where(over > 0, len(n) + 1, 0)
            recomputed = np.maximum(recomputed, np.clip(needed, 0, len(n) + 1).astype(np.int64))
            num_bytes = np.maximum(num_bytes, plain)
        if not self._problem.space.recompute_per_layer:
            recomputed = np.where((recomputed > 0) & (recomputed <= n), n, recomputed)
        room = int(np.argmax(recomputed > n)) if (recomputed > n).any() else len(n)
        n, recomputed = n[:room], recomputed[:room]
        forward_s, backward_s = np.zeros(room), np.zeros(room)
        for tp_group in tp_groups:
            ends, each, again = (
                model.stage_s(tp_group, 0, first, last, samples, fast),
                model.stages.layer_s(tp_group, samples, fast),
                model.stages.layer_s(tp_group, samples, smaller),
            )
            forward_s = np.maximum(forward_s, ends[0] + n * each[0] + recomputed * (again[0] - each[0]))
            backward_s = np.maximum(backward_s, ends[1] + n * each[1] + recomputed * (again[1] - each[1]))
        columns = (n, recomputed, forward_s, backward_s, num_bytes[:room])
        return [RecomputeOption(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def splits(self, order: Ranks, choice: GalvatronChoice) -> list[StageSplit]:
        """Splits of the layers from balanced by memory to balanced by time; none if nothing fits."""
        return self._splits[frozenset(order), choice]

    def _all_splits(self, devices: frozenset[int], choice: GalvatronChoice) -> list[StageSplit]:
        layers = self._problem.model.num_layers
        tables = [self._stage_options(devices, choice, s, tp) for s, tp in enumerate(choice.tps)]
        times = [[option.seconds for option in table] for table in tables]
        if not all(times) or sum(map(len, times)) < layers:
            return []
        by_time = tuple(least_bottleneck(times, layers))
        splits = [tuple(least_bottleneck([[option.num_bytes for option in table] for table in tables], layers))]
        while (next_split := _move_a_layer(splits[-1], times)) is not None:
            splits.append(next_split)
        splits.append(by_time)
        if not self._problem.space.uneven_layers:
            splits = [counts for counts in splits if max(counts) - min(counts) <= 1]
        return [
            tuple(table[n - 1] for table, n in zip(tables, counts, strict=True)) for counts in dict.fromkeys(splits)
        ]


def _move_a_layer(counts: tuple[int, ...], times: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
    """`counts` with a layer moved from the slowest stage to the one then fastest; None if that does not help."""
    now = [stage_s[n - 1] for stage_s, n in zip(times, counts, strict=True)]
    slowest = max(range(len(now)), key=now.__getitem__)
    takers = [s for s in range(len(now)) if s != slowest and counts[s] < len(times[s])]
    if counts[slowest] == 1 or not takers:
        return None
    taker = min(takers, key=lambda s: times[s][counts[s]])
    if times[taker][counts[taker]] >= now[slowest]:
        return None
    return tuple(n - (s == slowest) + (s == taker) for s, n in enumerate(counts))

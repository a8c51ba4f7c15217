"""Layers and recompute policies for stages in a given order: the slowest stage is as fast as memory allows.

For each stage, t(n) is the least time of n layers over the recompute policies that fit. Where every layer may have its
own policy, it also covers pairs of policies, with as few layers as memory requires under the one that needs less
memory. t never decreases with n, so the smallest bottleneck T with Σ max{n : t(n) ≤ T} ≥ L is exact; bisection over the
times themselves finds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.memo import Memo
from hexiopt.problem.space import Recompute, recompute_first
from hexiopt.schedules.in_flight import InFlight, in_flight
from hexiopt.schedules.schedule import Schedule, StagePosition
from hexiopt.solving import Pricer
from solvers.completion.allocation import even, least_bottleneck
from solvers.completion.waiting import least_period

StageLayers = tuple[int, Recompute]  # of a stage: its number of layers, and their recompute policies


class ReplicaShare(NamedTuple):
    """One replica of a stage: a TP group, and the samples of each micro-batch that it processes."""

    tp_group: Any
    samples: int


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of a stage: `times[n-1]` is the least time of n layers, `recompute[n-1]` the policies that achieve
    it.
    """

    times: list[float]
    recompute: list[Recompute]


class LayerSplitter:
    """Splits a model's layers over stages, and caches what it computes; one for a search."""

    def __init__(self, pricer: Pricer, policies: tuple[str, ...], even: bool, per_layer: bool = False) -> None:
        """`even`: all stages get equally many layers. `per_layer`: a stage may mix two policies, which only our cost
        model prices.
        """
        self.policies = policies
        self._pricer, self._even = pricer, even
        self._stages = pricer.features.stages if per_layer else None
        self._num_layers = pricer.problem.model.num_layers
        self._times: Memo[tuple[frozenset[Any], bool, bool, int], list[tuple[str, list[float]]]] = Memo(
            lambda key: self._by_speed(*key)
        )
        self._options: Memo[tuple[frozenset[Any], bool, bool, int, InFlight, StateSharding], StageOptions] = Memo(
            lambda key: self._stage_options(*key)
        )
        self._splits: Memo[tuple[Any, ...], tuple[StageLayers, ...] | int] = Memo(lambda key: self._split(*key))

    def options(
        self,
        tp_groups: frozenset[Any],
        first: bool,
        last: bool,
        micro_batch_size: int,
        held: InFlight,
        shards: StateSharding,
    ) -> StageOptions:
        """The options of a stage that must work on every one of `tp_groups` (the slowest and the fullest decide).

        A TP group gets whole micro-batches, unless it is given as a `ReplicaShare`.
        """
        return self._options[tp_groups, first, last, micro_batch_size, held, shards]

    def _stage_options(
        self,
        tp_groups: frozenset[Any],
        first: bool,
        last: bool,
        micro_batch_size: int,
        held: InFlight,
        shards: StateSharding,
    ) -> StageOptions:
        shares = _shares(tp_groups, micro_batch_size)
        tables = self._times[tp_groups, first, last, micro_batch_size]
        layer_limits = [
            min(self._pricer.max_layers(tp_group, first, last, n, policy, held, shards) for tp_group, n in shares)
            for policy, _ in tables
        ]
        times: list[float] = []
        recompute: list[Recompute] = []
        # Fastest policy first: each one serves the numbers of layers that no faster one can fit.
        for layer_limit, (policy, seconds) in zip(layer_limits, tables, strict=True):
            more = seconds[len(times) : max(len(times), layer_limit)]
            times += more
            recompute += [(policy,)] * len(more)
        found = StageOptions(times, recompute)
        if self._stages is not None:
            for (layer_limit, (faster, _)), (_, (smaller, _)) in combinations(
                zip(layer_limits, tables, strict=True), 2
            ):
                self._mix(found, max(0, layer_limit), smaller, faster, shares, first, last, held, shards)
        return found

    def _mix(
        self,
        found: StageOptions,
        layer_limit: int,
        smaller: str,
        faster: str,
        shares: Sequence[ReplicaShare],
        first: bool,
        last: bool,
        held: InFlight,
        shards: StateSharding,
    ) -> None:
        """Improve the options `found` for more than `layer_limit` layers by mixing two policies.

        As few layers as memory requires recompute under `smaller`, the others under `faster`.
        """
        stages = self._stages
        assert stages is not None
        rates = []  # per share: seconds of no layer, of a layer of either
        for tp_group, samples in shares:
            none_s = sum(stages.stage_s(tp_group, 0, first, last, samples, (smaller,)))
            rates.append((none_s, *(sum(stages.layer_s(tp_group, samples, policy)) for policy in (smaller, faster))))
        counts = range(layer_limit + 1, len(found.times) + 1)
        each = [
            stages.least_recomputed(tp_group, counts, first, last, samples, smaller, faster, held, shards)
            for tp_group, samples in shares
        ]
        needed = each[0] if len(each) == 1 else list(map(max, *each))
        by_share = [
            [none_s + k * smaller_s + (n - k) * faster_s for n, k in zip(counts, needed, strict=True)]
            for none_s, smaller_s, faster_s in rates
        ]
        times = by_share[0] if len(by_share) == 1 else map(max, *by_share)
        for n, num_smaller, seconds in zip(counts, needed, times, strict=True):
            if num_smaller < n and seconds < found.times[n - 1]:
                found.times[n - 1], found.recompute[n - 1] = seconds, recompute_first(smaller, num_smaller, faster, n)

    def _by_speed(
        self, tp_groups: frozenset[Any], first: bool, last: bool, micro_batch_size: int
    ) -> list[tuple[str, list[float]]]:
        """For each policy, fastest first, the times of 1, 2, ... layers on the slowest of `tp_groups`."""
        shares = _shares(tp_groups, micro_batch_size)
        tables = [
            (
                policy,
                [
                    max(
                        sum(self._pricer.stage_s(tp_group, n, first, last, samples, policy))
                        for tp_group, samples in shares
                    )
                    for n in range(1, self._num_layers + 1)
                ],
            )
            for policy in self.policies
        ]
        return sorted(tables, key=lambda table: table[1][-1])

    def split(
        self,
        tp_groups: Sequence[frozenset[Any]],
        micro_batch_size: int,
        schedule: Schedule,
        num_micro_batches: int,
        shards: StateSharding,
        added_s: tuple[float, ...] = (),
        chunks: int = 1,
        more_holders: tuple[int, ...] = (),
        round_trip_s: tuple[float, ...] = (),
    ) -> tuple[StageLayers, ...] | int:
        """Layers and policies of each stage, or the number of layers that do not fit.

        `added_s`: seconds that each stage spends on other work. `chunks`: layer ranges per stage, of at least one layer
        each. `more_holders`: for each stage, how many more devices share its states than `shards` says. `round_trip_s`:
        of messages between each stage and the next, with which layers minimise the period (`waiting.py`); without,
        the slowest stage.
        """
        p = len(tp_groups)
        batches = schedule.distinct_micro_batches(num_micro_batches, p, chunks)
        batches += -batches % schedule.micro_batch_multiple(p, chunks)
        return self._splits[
            tuple(tp_groups), micro_batch_size, schedule, batches, shards, added_s, chunks, more_holders, round_trip_s
        ]

    def _split(
        self,
        tp_groups: tuple[frozenset[Any], ...],
        micro_batch_size: int,
        schedule: Schedule,
        batches: int,
        shards: StateSharding,
        added_s: tuple[float, ...],
        chunks: int,
        more_holders: tuple[int, ...],
        round_trip_s: tuple[float, ...],
    ) -> tuple[StageLayers, ...] | int:
        p = len(tp_groups)
        spread = [shards._replace(num_devices=shards.num_devices + more) for more in more_holders] or [shards] * p
        positions = [StagePosition(s, p, batches, chunks) for s in range(p)]
        options = [
            self.options(tp_group, at.first, at.last, micro_batch_size, in_flight(schedule, at), spread[at.stage])
            for tp_group, at in zip(tp_groups, positions, strict=True)
        ]
        return self._solve(options, added_s or (0.0,) * p, chunks, round_trip_s)

    def _solve(
        self, options: list[StageOptions], added_s: Sequence[float], least: int, round_trip_s: Sequence[float]
    ) -> tuple[StageLayers, ...] | int:
        layers, p = self._num_layers, len(options)
        empty = sum(max(0, least - len(o.times)) for o in options)
        layer_limit = sum(len(o.times) for o in options)
        if p * least > layers or empty or layer_limit < layers:
            return max(layers - layer_limit, empty, p * least - layers, 1)
        if self._even:
            counts = self._even_counts(options)
            if counts is None:
                return 1
        else:
            times = [o.times for o in options]
            counts = least_bottleneck(times, layers, added_s, least)
            if round_trip_s:
                counts = least_period(times, round_trip_s, counts)
        return tuple((n, o.recompute[n - 1]) for n, o in zip(counts, options, strict=True))

    def _even_counts(self, options: list[StageOptions]) -> list[int] | None:
        """Equally many layers everywhere; the remainder goes to the stages where it costs least."""
        layers, p = self._num_layers, len(options)
        low, more = divmod(layers, p)
        able = sorted((s for s, o in enumerate(options) if len(o.times) > low), key=lambda s: options[s].times[low])
        if len(able) < more or any(len(o.times) < low for o in options):
            return None
        return even(layers, p, able)


def _shares(tp_groups: Iterable[Any], micro_batch_size: int) -> list[ReplicaShare]:
    """All TP groups with their samples of a micro-batch."""
    return [
        tp_group if isinstance(tp_group, ReplicaShare) else ReplicaShare(tp_group, micro_batch_size)
        for tp_group in tp_groups
    ]

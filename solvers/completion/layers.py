"""Layers and recompute policies for stages in a given order: the slowest stage is as fast as memory allows.

For each stage, t(n) is the least time of n layers over what fits (`executors.py`). t never decreases with n, so the
smallest bottleneck T with Σ max{n : t(n) ≤ T} ≥ L is exact; bisection over the times themselves finds it.
"""

from collections.abc import Sequence
from typing import Any

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.memo import Memo
from hexiopt.problem.space import Recompute
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.schedule import Schedule, positions
from hexiopt.solving import Pricer
from solvers.completion.allocation import even, least_bottleneck
from solvers.completion.executors import ExecutorTables, StageOptions, Works
from solvers.completion.waiting import least_period

StageLayers = tuple[int, Recompute]  # of a stage: its number of layers, and their recompute policies


class LayerSplitter:
    """Splits a model's layers over stages, and caches what it computes; one for a search."""

    def __init__(self, pricer: Pricer, policies: tuple[str, ...], even: bool, per_layer: bool = False) -> None:
        """`even`: all stages get equally many layers. `per_layer`: a stage may mix two policies, which only our cost
        model prices.
        """
        self.policies, self._even = policies, even
        self._num_layers = pricer.problem.model.num_layers
        self.options = ExecutorTables(pricer, policies, per_layer).options
        self._splits: Memo[tuple[Any, ...], tuple[StageLayers, ...] | int] = Memo(lambda key: self._split(*key))

    def split(
        self,
        works: Sequence[Works],
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

        `works`: of each stage. `added_s`: seconds that each stage spends on other work. `chunks`: layer ranges per
        stage, of at least one layer each. `more_holders`: for each stage, how many more devices share its states than
        `shards` says. `round_trip_s`: of messages between each stage and the next, with which layers minimise the
        period (`waiting.py`); without, the slowest stage.
        """
        p = len(works)
        batches = schedule.distinct_micro_batches(num_micro_batches, p, chunks)
        batches += -batches % schedule.micro_batch_multiple(p, chunks)
        return self._splits[
            tuple(works), micro_batch_size, schedule, batches, shards, added_s, chunks, more_holders, round_trip_s
        ]

    def _split(
        self,
        works: tuple[Works, ...],
        micro_batch_size: int,
        schedule: Schedule,
        batches: int,
        shards: StateSharding,
        added_s: tuple[float, ...],
        chunks: int,
        more_holders: tuple[int, ...],
        round_trip_s: tuple[float, ...],
    ) -> tuple[StageLayers, ...] | int:
        p = len(works)
        spread = [shards.with_more(more) for more in more_holders] or [shards] * p
        options = [
            self.options[own, at.first, at.last, micro_batch_size, in_flight(schedule, at), spread[at.stage]]
            for own, at in zip(works, positions(p, batches, chunks), strict=True)
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
        return tuple((n, o.recompute(n)) for n, o in zip(counts, options, strict=True))

    def _even_counts(self, options: list[StageOptions]) -> list[int] | None:
        """Equally many layers everywhere; the remainder goes to the stages where it costs least."""
        layers, p = self._num_layers, len(options)
        low, more = divmod(layers, p)
        able = sorted((s for s, o in enumerate(options) if len(o.times) > low), key=lambda s: options[s].times[low])
        if len(able) < more or any(len(o.times) < low for o in options):
            return None
        return even(layers, p, able)

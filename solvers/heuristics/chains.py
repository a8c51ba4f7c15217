"""Chains: a pipeline group through several machines, its TP groups and replicas chosen by dynamic programming.

For an upper limit on the time of a stage, `fewest_stages.py` finds the fewest stages that hold all layers, each with as
many layers as time and memory allow; a stage next to another machine also waits for half of each round trip to it. A
step then takes about the limit times the `num_rounds` of the schedule. The chain of the least limit under which all
layers fit is tried, and those of two longer ones, with fewer stages.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Floats
from hexiopt.schedules.in_flight import holding, room
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from solvers.completion import allocation
from solvers.completion.executors import Works, works_of
from solvers.completion.layers import LayerSplitter
from solvers.core.partition import DeviceGroup, PipelineGroup
from solvers.heuristics.fewest_stages import StageBlock, StageWay, Ways, fewest_stages

_APART = 1.06  # factor between limits on the time of a stage
_FACTORS = tuple(_APART**k for k in range(36))  # of the least possible time: limits
_CLOSER = tuple(_APART ** (k / 8) for k in range(7, 0, -1))  # by which the first that is long enough may be too long
_MORE, _TRIED = 3, 9  # chains wanted, and limits tried for them, from the first under which all layers fit
_SIDES = 3  # of a stage on which it waits: none, one, both
_KEPT = 20_000  # chains remembered


@dataclass(frozen=True, slots=True)
class ChainTerms:
    """The requirements on a chain."""

    size: int  # sequences of a micro-batch
    batches: int  # micro-batches of a pipeline, about
    shards: StateSharding
    schedule: Schedule  # one that is `plain`
    tp: int | None = None  # the TP degree of all stages, where they must be alike
    replicates: bool = False  # whether stages of a single pipeline may have replicas


@dataclass(frozen=True, slots=True)
class _Block:
    """The GPUs of a machine that one pipeline may use: for every way of a stage what works on a micro-batch, and the
    seconds of half a round trip to a neighbouring machine.
    """

    num_gpus: int
    ways: tuple[tuple[StageWay, Works], ...]
    wait_s: float


class ChainBuilder:
    """Builds the chains of one problem, whose plans recompute by the policies of one of `splitters`; caches what it
    computes.
    """

    def __init__(self, pricer: Pricer, splitters: Sequence[LayerSplitter]) -> None:
        self._pricer, self._splitters = pricer, splitters
        problem = pricer.problem
        self._layers, self._space = problem.model.num_layers, problem.space
        self._kinds = [machine.kind for machine in problem.cluster.machines]
        self._chains: Memo[tuple[tuple[_Block, ...], ChainTerms], list[Ways]] = Memo(
            lambda key: self._ways(*key), _KEPT
        )
        self._stages: Memo[tuple[LayerSplitter, Works, int, ChainTerms, int], _StageTimes] = Memo(
            lambda key: self._make_stages(*key)
        )

    def chain(
        self,
        machines: Sequence[int],
        devices: Mapping[int, Sequence[int]],
        width: int,
        terms: ChainTerms,
        rank: int = 0,
    ) -> PipelineGroup | None:
        """`width` pipelines through `machines` in order, on their `devices`; None where not all layers fit.

        `rank` 0 selects the chain with the best estimate, 1 the second best, as far as there are others.
        """
        if terms.replicates and (width > 1 or terms.size == 1):
            terms = replace(terms, replicates=False)
        units = self._units(machines, devices, width)
        ways = self._chains[tuple(self._blocks(units, width, terms)), terms]
        if not ways:
            return None
        stages: list[tuple[DeviceGroup, ...]] = []
        for (own, _), chosen in zip(units, ways[min(rank, len(ways) - 1)], strict=True):
            each, at = len(own) // width, 0
            for way in chosen:
                firsts = range(at, at + way.gpus, way.tp) if way.replicas > 1 else range(at, width * each, each)
                stages.append(tuple(own[first : first + way.tp] for first in firsts))
                at += way.gpus
        return PipelineGroup.pipeline(stages, terms.size) if width == 1 else PipelineGroup(tuple(stages), terms.size)

    def _blocks(self, units: Sequence[tuple[DeviceGroup, int]], width: int, terms: ChainTerms) -> Iterator[_Block]:
        for k, (own, most_tp) in enumerate(units):
            share = own[: len(own) // width]
            other = units[k + 1 if k + 1 < len(units) else k - 1][0]
            # The interfaces of a block between two others carry the messages from both, each way.
            sides = min(2, len(units) - 1)
            wait_s = sides * width * self._pricer.message_s(own[:1], other[:1], terms.size) if sides else 0.0
            allowed = self._space.allowed_tp(len(share)) if terms.tp is None else (terms.tp,)
            ways = [StageWay(t) for t in allowed if t <= min(most_tp, len(share))]
            if terms.replicates:
                ways += [StageWay(t, r) for t, _ in ways for r in range(2, min(terms.size, len(share) // t) + 1)]
            works = tuple((way, self._works(share[: way.tp], way.replicas, terms.size)) for way in ways)
            yield _Block(len(share), works, wait_s)

    def _works(self, devices: Sequence[int], replicas: int, size: int) -> Works:
        """What the layers of a stage must do well on, as `LayerSplitter.options` takes it."""
        tp_group = self._pricer.tp_group(tuple(devices))
        return works_of([tp_group] * replicas, allocation.even(size, replicas), size)

    def _units(
        self, machines: Sequence[int], devices: Mapping[int, Sequence[int]], width: int
    ) -> list[tuple[DeviceGroup, int]]:
        """Blocks of GPUs for the stages, each with its largest TP degree.

        A block is a machine with a GPU for every pipeline, or consecutive smaller machines of one kind that have so
        together; other machines stay unused.
        """
        found: list[tuple[DeviceGroup, int]] = []
        waiting: list[int] = []
        kind: object = None
        for m in machines:
            own = devices[m]
            if len(own) >= width:
                found.append((tuple(own), len(own)))
                continue
            if self._kinds[m] != kind:
                waiting, kind = [], self._kinds[m]
            waiting += own
            if len(waiting) >= width:
                found.append((tuple(waiting[:width]), 1))
                del waiting[:width]
        return found

    def _ways(self, blocks: Sequence[_Block], terms: ChainTerms) -> list[Ways]:
        """The ways of stages of chains through `blocks`, the best estimate first, over all splitters."""
        found: dict[Ways, float] = {}
        for splitter in self._splitters:
            for ways, seconds in self._timed_ways(blocks, terms, splitter):
                found[ways] = min(seconds, found.get(ways, seconds))
        return sorted(found, key=found.__getitem__)

    def _timed_ways(
        self, blocks: Sequence[_Block], terms: ChainTerms, splitter: LayerSplitter
    ) -> Iterator[tuple[Ways, float]]:
        """The ways of stages of chains through `blocks` that hold all layers, with the estimated seconds of a step."""
        from solvers.heuristics.kernel import most_layers  # only here, as numba takes a second to start

        most = min(self._layers, sum(block.num_gpus for block in blocks))
        kinds = list(dict.fromkeys(blocks))
        kind_of = [kinds.index(block) for block in blocks]
        tables = [
            {way: self._stages_of(splitter, works, way.replicas, terms, most) for way, works in block.ways}
            for block in kinds
        ]
        rates = [
            max((block.num_gpus // way.gpus * stages.rate for way, stages in own.items()), default=0.0)
            for block, own in zip(kinds, tables, strict=True)
        ]
        rate = sum(rates[kind] for kind in kind_of)
        if not rate:
            return
        times_s = [
            np.array([stages.by_stages_behind() for stages in own.values()]).reshape(len(own), 2, most, self._layers)
            for own in tables
        ]

        @cache
        def within(time_s: float) -> Ways | None:
            able = [
                StageBlock(
                    block.num_gpus,
                    tuple(own),
                    most_layers(each_s, time_s - block.wait_s * np.arange(_SIDES, dtype=np.float64)),
                )
                for block, own, each_s in zip(kinds, tables, times_s, strict=True)
            ]
            return fewest_stages([able[kind] for kind in kind_of], self._layers)

        def least(limits_s: Sequence[float]) -> int:
            return bisect_left(limits_s, True, key=lambda time_s: within(time_s) is not None)

        limits_s = [self._layers / rate * factor for factor in _FACTORS]
        if within(limits_s[-1]) is None:
            return
        limits_s = limits_s[least(limits_s) :]
        closer_s = [limits_s[0] / factor for factor in _CLOSER]
        limits_s = [*closer_s[least(closer_s) :][:1], *limits_s]
        tried: set[Ways] = set()
        for time_s in limits_s[:_TRIED]:
            ways = within(time_s)
            assert ways is not None, "what fits in less time fits in more"
            if ways not in tried:
                tried.add(ways)
                yield ways, terms.schedule.num_rounds(sum(map(len, ways)), terms.batches) * time_s
            if len(tried) == _MORE:
                return

    def _stages_of(
        self, splitter: LayerSplitter, works: Works, replicas: int, terms: ChainTerms, most: int
    ) -> "_StageTimes":
        batches = terms.schedule.distinct_micro_batches(terms.batches, most, 1)
        return self._stages[splitter, works, replicas, replace(terms, batches=batches, replicates=False), most]

    def _make_stages(
        self, splitter: LayerSplitter, works: Works, replicas: int, terms: ChainTerms, most: int
    ) -> "_StageTimes":
        shards = terms.shards._replace(num_devices=terms.shards.num_devices + replicas - 1)

        def times(after: int) -> _Times:
            held = min(terms.batches, _rounded_up(room(terms.schedule, after, terms.batches)))
            inner, first = (
                splitter.options(works, first, after == 0, terms.size, holding(held), shards).times
                for first in (False, True)
            )
            return inner, first

        return _StageTimes([times(after) for after in range(most)], self._layers)


_Times = tuple[list[float], list[float]]  # the seconds of 1, 2, ... layers of an inner stage, and of the first


def _rounded_up(held: int) -> int:
    """Micro-batches that a stage holds, beyond seven rounded up by at most a quarter: each number takes tables of its
    own, and what memory allows changes little.
    """
    step = 1 << max(0, held.bit_length() - 3)
    return -(-held // step) * step


class _StageTimes:
    """Stages that work alike: the seconds of 1, 2, ... layers, by the number of stages behind and whether it is the
    first.
    """

    def __init__(self, times: Sequence[_Times], layers: int) -> None:
        self.rate = max((len(own) / own[-1] for own, _ in times if own), default=0.0)
        distinct = {(id(inner), id(first)): (inner, first) for inner, first in times}
        numbers = {key: number for number, key in enumerate(distinct)}
        self._number_of = [numbers[id(inner), id(first)] for inner, first in times]
        self._times_s = np.full((2, len(distinct), layers), np.inf)
        for number, both in enumerate(distinct.values()):
            for first, own in enumerate(both):
                self._times_s[first, number, : len(own)] = own

    def by_stages_behind(self) -> Floats:
        """Seconds, infinite where they do not fit [inner or first, stages behind it, layers]."""
        return self._times_s[:, self._number_of]

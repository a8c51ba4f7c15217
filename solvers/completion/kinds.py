"""Ranges of layers where layers are of several kinds: searches split the mean layer, and their plans' layers are split
again here by what each layer takes and holds.

Seconds and bytes of a range grow with it, so that for a bottleneck each stage in turn takes the longest range within
it, and bisection finds the least bottleneck at which the last stage reaches the end (chains on chains; Pinar and
Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning", section 3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from weakref import WeakKeyDictionary

import numpy as np

from hexiopt.cost.context import PipelineContext, plan_context
from hexiopt.cost.executors.memory import Holders
from hexiopt.cost.executors.ranges import Floats, Ints, LayerRanges
from hexiopt.cost.executors.stage_model import RangesKey, StageModel, StagePlace
from hexiopt.plan.holdings import sharding_groups
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, recompute_policies
from hexiopt.schedules.in_flight import stages_in_flight
from solvers.core.zero import LOCKSTEP

_NO_TIME_S = 1e-12
_BISECTIONS = 40  # the bottleneck is known to the last digits
_ROUNDING = 1e-9  # share of a memory limit that is left free
_MEMO_SIZE = 1024  # stages whose ranges are known
_FEW_KINDS = 3  # of which layers recompute in any order

_KNOWN: WeakKeyDictionary[StageModel, dict[object, "_Choices"]] = WeakKeyDictionary()


def split_by_kind(plan: Plan, stages: StageModel) -> Plan | None:
    """`plan` with its layers split by their kinds; None where nothing would change, or no split fits memory, or where
    pipelines must have the same layers and would not."""
    problem = stages.problem
    if not problem.space.uneven_layers or any(pipeline.num_chunks > 1 for pipeline in plan.pipelines):
        return None
    contexts = plan_context(plan, sharding_groups(plan, problem.cluster), stages)
    pipelines = list[Pipeline]()
    for pipeline, context in zip(plan.pipelines, contexts, strict=True):
        split = _split(pipeline, plan, context, stages)
        if split is None:
            return None
        pipelines.append(split)
    together = plan.sharding.stage >= LOCKSTEP or not problem.space.uneven_structure
    if together and len({tuple([stage.layers for stage in pipeline.stages]) for pipeline in pipelines}) > 1:
        return None
    return None if tuple(pipelines) == plan.pipelines else replace(plan, pipelines=tuple(pipelines))


def _split(pipeline: Pipeline, plan: Plan, context: PipelineContext, stages: StageModel) -> Pipeline | None:
    """The pipeline with the least bottleneck; None where memory has no room for all layers."""
    count, space = len(pipeline.stages), stages.problem.space
    in_flight = stages_in_flight(plan.schedule, count, pipeline.num_micro_batches, 1, pipeline.depths)
    known, choices = _KNOWN.setdefault(stages, {}), list[_Choices]()
    for s, stage in enumerate(pipeline.stages):
        copies = len(stage.parallelism.parameter_copies)
        # By how many devices the states of each copy are spread at least.
        holders = tuple([Holders((min(layers),), tied) for layers, tied in context.sharding.holders(s, copies)])
        place = StagePlace(s == 0, s == count - 1, in_flight[s], plan.sharding.stage)
        policies = None if space.recompute_per_stage else stage.recompute
        key = stages.ranges_key(stage, pipeline.micro_batch_size), place, holders, policies
        if key not in known:
            if len(known) >= _MEMO_SIZE:
                known.clear()
            known[key] = _Choices.of(stages, *key)
        choices.append(known[key])
    ends = _least_bottleneck([each.seconds for each in choices])
    if ends is None:
        return None
    split = [
        replace(stage, layers=((first, end),), recompute=each.recompute(first, end))
        for stage, each, first, end in zip(pipeline.stages, choices, [0, *ends[:-1]], ends, strict=True)
    ]
    return replace(pipeline, stages=tuple(split))


def _least_bottleneck(seconds: Sequence[Floats]) -> list[int] | None:
    """Where the range of each stage ends so that the slowest, by `seconds` [stages][first, end], is as fast as can be;
    None where some layers fit nowhere."""
    best = _within(seconds, np.inf)
    if best is None:
        return None
    low_s, high_s = 0.0, _slowest_s(seconds, best)
    for _ in range(_BISECTIONS):
        middle_s = 0.5 * (low_s + high_s)
        ends = _within(seconds, middle_s)
        if ends is None:
            low_s = middle_s
        else:
            best, high_s = ends, _slowest_s(seconds, ends)
        if high_s - low_s <= _ROUNDING * high_s:
            break
    return best


def _within(seconds: Sequence[Floats], limit_s: float) -> list[int] | None:
    """The longest ranges within `limit_s`, each stage in turn; None where layers are left."""
    num_layers, count, end = seconds[0].shape[0] - 1, len(seconds), 0
    ends = []
    for s, table in enumerate(seconds):
        most = num_layers - (count - s - 1)  # every later stage has a layer
        ahead = table[end, end + 1 : most + 1]
        fitting = np.flatnonzero((ahead <= limit_s) & np.isfinite(ahead))
        if not len(fitting):
            return None
        end += int(fitting[-1]) + 1
        ends.append(end)
    return ends if end == num_layers else None


def _slowest_s(seconds: Sequence[Floats], ends: Sequence[int]) -> float:
    return max(float(table[first, end]) for table, first, end in zip(seconds, [0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class _Choices:
    """The fastest recompute policies that fit each range of layers: `seconds` [first, end], infinite where none does,
    and `way` [first, end], the number of a policy, or of a mixture."""

    problem: Problem
    ranges: LayerRanges
    seconds: Floats
    ways: Sequence["_Way"]
    way: Ints

    @classmethod
    def of(
        cls,
        stages: StageModel,
        key: RangesKey,
        place: StagePlace,
        holders: tuple[Holders, ...],
        policies: Recompute | None,
    ) -> "_Choices":
        """Of a stage; `policies`: those to which it is bound, if to any."""
        problem = stages.problem
        allowed = tuple(dict.fromkeys(policies or recompute_policies(problem.workload)))
        ranges = stages.ranges(key, place, holders, allowed)
        pairs = range(len(ranges.policies))
        ways = [_Way(p, p) for p in pairs]
        if problem.space.recompute_per_layer and problem.space.recompute_per_stage and len(ranges.bytes_of) == 1:
            ways += [way for a in pairs for b in pairs if a != b for way in _mixtures(ranges, a, b)]
        times = np.stack([way.seconds(ranges) for way in ways])
        best = times.argmin(axis=0)
        # A copy of the ranges, without the tables that it need not keep.
        return cls(problem, replace(ranges), np.take_along_axis(times, best[None], 0)[0], ways, best)

    def recompute(self, first: int, end: int) -> Recompute:
        """The policies of a range."""
        way = self.ways[int(self.way[first, end])]
        policies = self.ranges.policies
        if way.smaller == way.faster:
            return (policies[way.smaller],)
        left = way.recomputed(self.ranges, self.ranges.counts[:, first : first + 1, end : end + 1])[:, 0, 0]
        by_layer = []
        for kind in self.problem.model.depth[first:end]:
            by_layer.append(policies[way.smaller if left[kind] > 0 else way.faster])
            left[kind] -= 1
        return tuple(by_layer)


def _mixtures(ranges: LayerRanges, smaller: int, faster: int) -> Iterator["_Way"]:
    """The ways to mix two policies: orders of the kinds of which a layer under the smaller one frees bytes; where these
    are many, the order of bytes a second alone."""
    (copy,) = ranges.bytes_of
    freed = copy.stored_bytes[faster] - copy.stored_bytes[smaller]
    slower_s = np.maximum(ranges.layer_s[smaller] - ranges.layer_s[faster], _NO_TIME_S)
    kinds = [int(kind) for kind in np.argsort(-freed / slower_s, kind="stable") if freed[kind] > 0]
    if not kinds:
        return
    for order in permutations(kinds) if len(kinds) <= _FEW_KINDS else [tuple(kinds)]:
        yield _Way(smaller, faster, order)
        if len(order) > 1:
            yield _Way(smaller, faster, order, closely=True)


@dataclass(frozen=True)
class _Way:
    """Layers under the policy `smaller` as long as memory asks for it, the others under `faster` (numbers of policies):
    kind by kind in an `order`; `closely`: of each kind but the last no more than frees less than is asked. With one
    policy, all layers are under it."""

    smaller: int
    faster: int
    order: tuple[int, ...] = ()
    closely: bool = False

    def seconds(self, ranges: LayerRanges) -> Floats:
        """Seconds of each range, infinite where it does not fit."""
        limit = -_ROUNDING * max(copy.limit_bytes for copy in ranges.bytes_of)
        if self.smaller == self.faster:
            return np.where(ranges.excess[self.smaller] <= limit, ranges.seconds[self.smaller], np.inf)
        missing = self._missing(ranges, ranges.counts)
        recomputed = self.recomputed(ranges, ranges.counts, missing)
        slower_s, freed = self._changes(ranges)
        seconds = ranges.seconds[self.faster] + np.tensordot(slower_s, recomputed, 1)
        return np.where(missing - np.tensordot(freed, recomputed, 1) <= limit, seconds, np.inf)

    def recomputed(self, ranges: LayerRanges, counts: Ints, missing: Floats | None = None) -> Floats:
        """How many layers of each kind are under the smaller policy [kinds, ...], of so many that lack `missing`
        bytes."""
        if missing is None:
            missing = self._missing(ranges, counts)
        _, freed = self._changes(ranges)
        left = missing + _ROUNDING * max(copy.limit_bytes for copy in ranges.bytes_of)
        recomputed = np.zeros(counts.shape)
        for kind in self.order:
            whole = np.floor if self.closely and kind != self.order[-1] else np.ceil
            recomputed[kind] = np.clip(whole(left / freed[kind]), 0, counts[kind])
            left = left - recomputed[kind] * freed[kind]
        return recomputed

    def _changes(self, ranges: LayerRanges) -> tuple[Floats, Floats]:
        """By how much a layer of each kind takes longer under the smaller policy, and how many bytes it frees."""
        (copy,) = ranges.bytes_of
        slower_s = ranges.layer_s[self.smaller] - ranges.layer_s[self.faster]
        return slower_s, copy.stored_bytes[self.faster] - copy.stored_bytes[self.smaller]

    def _missing(self, ranges: LayerRanges, counts: Ints) -> Floats:
        """Bytes beyond the limit under the faster policy, with the working set of either."""
        (copy,) = ranges.bytes_of
        shape = (-1, *[1] * (counts.ndim - 1))
        working = [
            np.where(counts > 0, copy.working_bytes[policy].reshape(shape), 0.0).max(axis=0)
            for policy in (self.faster, self.smaller)
        ]
        missing: Floats = copy.excess_bytes(counts)[self.faster] + np.maximum(*working) - working[0]
        return missing

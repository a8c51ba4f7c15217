"""Metis's planner (see `metis_atc24.py`): cuts of all sequences of ranks, the best improved step by step."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hexiopt.cost.executors.routes import route
from hexiopt.memo import Memo
from hexiopt.plan.plan import Plan
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._estimates import GridEstimates, one_f_one_b_s
from solvers.baselines._frame import climb
from solvers.baselines._plans import neighbouring_layers, shift_layers
from solvers.baselines.metis_atc24.cutting import Cut
from solvers.baselines.metis_atc24.group_cuts import GroupCuts, max_layers, quick_s, sequences, split_layers
from solvers.baselines.metis_atc24.parallel_pipelines import boundaries_s, plan_of_cut
from solvers.baselines.metis_atc24.ranked_devices import Batching
from solvers.core.search import Search

_CUTTING, _IMPROVING = 0.4, 0.55  # shares of the time limit by which cuts are found, and improved
_LAYERED = 1000  # cuts whose layers are split
_REFINED = 600  # cuts whose messages are estimated too
_IMPROVED = 8  # of them, how many are improved
_PROMISING = 1.1  # changes whose quick estimate is this much above the present one are left out


@dataclass(frozen=True, slots=True)
class MetisChoice:
    """A whole plan: the number of its sequence of ranks, its batching, (ranks, TP degree) and layers of every
    stage, and the ZeRO stage."""

    sequence: int
    batching: Batching
    groups: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    sharding: int

    @property
    def holders(self) -> int:
        """Replicas of the stage that has most."""
        return max(size // tp for size, tp in self.groups)


class MetisPlanner:
    """The search for one problem; memory is that of the ZeRO stage `sharding`."""

    def __init__(self, run: Search, schedule: Schedule, sharding: int) -> None:
        self.run, self.schedule, self.sharding = run, schedule, sharding
        self.problem, self.estimates = run.problem, GridEstimates(run.pricer)
        self._group_cuts = GroupCuts(self.estimates, sequences(self.problem), sharded=bool(sharding))
        self.ranked, self.batchings = self._group_cuts.ranked, self._group_cuts.batchings
        self._hop_of = cache(partial(route, self.problem.cluster))
        self.seconds: Memo[MetisChoice, float] = Memo(lambda choice: self._seconds_of_layers(choice)(choice.layers))
        self._messages_s: Memo[MetisChoice, list[float]] = Memo(
            lambda choice: boundaries_s(self.plan(choice).pipelines, self._hop_of, self.estimates.sequence_bytes)
        )

    def choices(self, rng: random.Random) -> Iterator[tuple[float, MetisChoice]]:
        """The best cuts and improvements of some, each with its estimate."""
        quick: dict[MetisChoice, float] = {}
        cuts = self._group_cuts.cuts(rng, lambda share: self.run.should_continue(share * _CUTTING))
        for _, sequence, batching, cut in cuts[:_LAYERED]:
            groups = tuple((group.end_rank - group.first_rank, group.tp) for group in cut)
            for layers in split_layers(cut, self.problem.model.num_layers):
                choice = MetisChoice(sequence, batching, groups, layers, self.sharding)
                quick[choice] = quick_s(cut, layers, batching)
        estimated = []
        for choice in sorted(quick, key=quick.__getitem__)[:_REFINED]:
            for each in {choice: None, self._refine(choice): None}:
                estimated.append((self.seconds[each], each))
                yield estimated[-1]
            if not self.run.should_continue(0.5 * (_CUTTING + _IMPROVING)):
                break
        for _, choice in sorted(estimated, key=lambda pair: pair[0])[:_IMPROVED]:
            yield from self._improve(choice)

    def plan(self, choice: MetisChoice) -> Plan:
        """The plan of a choice."""
        cut = self._cut(choice)
        assert cut is not None, "a choice without devices"
        return plan_of_cut(self.problem, choice.batching, cut, choice.layers, self.schedule, choice.sharding)

    def _seconds_of_layers(self, choice: MetisChoice) -> Callable[[Sequence[int]], float]:
        """The estimate of a step of `choice` with other layers, messages as 1F1B lets them overlap."""
        cut = self._cut(choice)
        # Of the messages at each boundary, both ways; layers do not matter.
        message_s = self._messages_s[replace(choice, layers=tuple(range(1, len(choice.groups) + 1)))]
        assert cut is not None, "a choice without devices"

        def seconds(layers: Sequence[int]) -> float:
            stage_s = [group.stage_s(n) for group, n in zip(cut, layers, strict=True)]
            return one_f_one_b_s(stage_s, message_s, choice.batching.count)

        return seconds

    def _refine(self, choice: MetisChoice) -> MetisChoice:
        """`choice` with layers moved while its estimate falls."""
        cut = self._cut(choice)
        assert cut is not None, "a choice without devices"
        return replace(choice, layers=shift_layers(choice.layers, max_layers(cut), self._seconds_of_layers(choice))[0])

    def _cut(self, choice: MetisChoice) -> Cut | None:
        """The stages of a choice; None if one of them is impossible."""
        at, groups = 0, []
        for size, tp in choice.groups:
            group = self.ranked[choice.sequence].group(at, size, tp, choice.batching)
            if group is None:
                return None
            groups.append(group)
            at += size
        return tuple(groups)

    def _improve(self, choice: MetisChoice) -> Iterator[tuple[float, MetisChoice]]:
        """Changes `choice` step by step while its estimate falls."""
        best_s = self.seconds[choice]

        def is_faster(changed: MetisChoice) -> bool:
            nonlocal best_s
            before_s, best_s = best_s, min(best_s, self.seconds[changed])
            return best_s < before_s

        faster = climb(choice, self.neighbours, is_faster, lambda: self.run.should_continue(_IMPROVING))
        return ((self.seconds[better], better) for better in faster)

    def neighbours(self, choice: MetisChoice, promising: float = _PROMISING) -> Iterator[MetisChoice]:
        """Choices one change away whose quick estimate is at most `promising` times the present one."""
        present = self._cut(choice)
        assert present is not None, "a choice without devices"
        limit_s = promising * quick_s(present, choice.layers, choice.batching)
        space = self.problem.space
        for changed in _changes(choice, len(self.ranked), self.ranked[0].degrees, self.batchings):
            if space.num_stages not in (None, len(changed.groups)):
                continue
            if not space.uneven_tp and len({tp for _, tp in changed.groups}) > 1:
                continue
            cut = self._cut(changed)
            if cut is None or len(cut) > self.ranked[0].max_stages:
                continue
            for layers in split_layers(cut, self.problem.model.num_layers):
                if quick_s(cut, layers, changed.batching) <= limit_s:
                    yield replace(changed, layers=layers)
        for layers in neighbouring_layers(choice.layers, max_layers(present)):
            yield replace(choice, layers=layers)


def _changes(
    choice: MetisChoice, num_sequences: int, degrees: list[int], batchings: list[Batching]
) -> Iterator[MetisChoice]:
    """Choices in which a group has another TP degree, is halved, or is joined to or exchanged with the next, and
    choices of another batching or sequence."""
    groups = choice.groups
    for i, (size, tp) in enumerate(groups):
        before, after = groups[:i], groups[i + 1 :]
        for other in degrees:
            if other != tp and size % other == 0:
                yield replace(choice, groups=(*before, (size, other), *after))
        if size > 1:
            half = (size // 2, min(tp, size // 2))
            yield replace(choice, groups=(*before, half, half, *after))
        if after and after[0][0] == size:
            for joined in {tp, after[0][1]}:
                yield replace(choice, groups=(*before, (2 * size, joined), *after[1:]))
        if after and after[0] != groups[i]:
            yield replace(choice, groups=(*before, after[0], groups[i], *after[1:]))
    for batching in batchings:
        if (batching.size == choice.batching.size) != (batching.policy == choice.batching.policy):
            yield replace(choice, batching=batching)
    for k in range(num_sequences):
        if k != choice.sequence:
            yield replace(choice, sequence=k)

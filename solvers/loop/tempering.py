"""Walks at rungs of temperatures, which exchange places: parallel tempering (Swendsen and Wang, Phys. Rev. Lett. 57,
1986), its ladder closing as the budget is spent, so that at last all walks are cold around what the best have met."""

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from solvers.compiled.state import SearchState, SearchWork, copy_state, new_state, new_work
from solvers.compiled.tables import Tables
from solvers.core.operators import OperatorStatistics
from solvers.loop.dice import new_dice
from solvers.loop.settings import LoopSettings
from solvers.loop.walk import ACCEPTED, CHANGED, GAIN, IMPROVED, MOVES, PROPOSED, WORK, Kit, walk

_RESCUES = 4  # parts of the budget after each of which the walk whose best is worst goes on from the best of all
_MEMORY = 0.95  # share of what moves yielded that still counts a round later
_LEAST, _MOST = 0.3, 3.0  # factors of the first weight of a move, by what it yields
_FORGOTTEN = 1e-200  # a yield so far back that its ratios would be lost in rounding
_FIXED = 3  # pipelines' worth of a step that does not grow with their number


def new_kit(tables: Tables, state: SearchState, catalogue: Any, seed: int, number: int) -> Kit:
    """What a walk draws from, its moves as likely as at first."""
    pipelines, stages = state.stages.shape
    rows = max(pipelines, len(tables.kind_group)) + 1
    odds = np.cumsum([weight for _, weight in MOVES], dtype=float)
    tally, yields = np.zeros((len(MOVES), 4), np.int64), np.zeros((len(MOVES), 2))
    chain = np.zeros(2 + 2 * stages, np.int64)
    listed, others = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    return Kit(new_dice(seed, number), listed, others, chain, catalogue, odds, tally, yields)


@dataclass(frozen=True, slots=True)
class Walk:
    """Where it is, the candidate in hand and the best it met; `objectives`: of the first and the last."""

    states: tuple[SearchState, SearchState, SearchState]
    kit: Kit
    objectives: Any

    def begin_at(self, state: SearchState, objective: float) -> None:
        """Go on from a candidate, which becomes the best met."""
        for target in self.states:
            copy_state(state, target)
        self.objectives[:] = objective

    def go_to(self, other: "Walk") -> None:
        """Go on from the best that another has met."""
        for target in self.states:
            copy_state(other.states[2], target)
        self.objectives[:] = other.objectives[1]


class Tempering:
    """Walks of one search, hottest last, and the threads on which they run."""

    def __init__(
        self, tables: Tables, catalogue: Any, settings: LoopSettings, seed: int, num_threads: int, warmth: float = 1.0
    ) -> None:
        """`warmth`: factor of the hottest temperature; below 1 where a good plan is known."""
        self.tables, self.settings = tables, settings
        self._rng = random.Random(seed)
        self._hot = max(settings.cold, settings.hot * warmth)
        self.walks: list[Walk] = []
        for number in range(settings.walks):
            states = (new_state(tables), new_state(tables), new_state(tables))
            self.walks.append(Walk(states, new_kit(tables, states[0], catalogue, seed, number), np.full(2, np.inf)))
        self._works: list[SearchWork] = [new_work(tables) for _ in range(min(num_threads, settings.walks))]
        self._rescued = 0
        self._yields = np.zeros((len(MOVES), 2))

    @property
    def best(self) -> Walk:
        """The walk that has met the best candidate."""
        return min(self.walks, key=lambda each: each.objectives[1])

    def heats(self, spent: float) -> list[float]:
        """The temperatures of the walks, as shares of the step, after a share of the budget. A pipeline's part of a
        step falls with their number, and so does what a move changes."""
        settings, top = self.settings, max(1, self.settings.walks - 1)
        ratio = math.log(self._hot / settings.cold) * (1.0 - spent)
        parts = (_FIXED + int(each.states[0].plan[0]["num_pipelines"]) for each in self.walks)
        return [settings.cold * math.exp(ratio * rung / top) / part for rung, part in enumerate(parts)]

    def advance(self, spent: float, count: int, pool: ThreadPoolExecutor | None) -> None:
        """The first `count` walks try their candidates, and neighbours exchange places."""
        heats, size = self.heats(spent), self.settings.candidates

        def run(first: int) -> None:
            for rung in range(first, count, len(self._works)):
                this = self.walks[rung]
                walk(self.tables, self._works[first], this.states, this.kit, size, heats[rung], this.objectives)

        _on_each(run, len(self._works), pool)
        for rung in range(len(self.walks) - 2, -1, -1):
            cold, hot = self.walks[rung], self.walks[rung + 1]
            apart = math.log(cold.objectives[0]) - math.log(hot.objectives[0])
            odds = apart * (1.0 / heats[rung] - 1.0 / heats[rung + 1])
            if odds >= 0.0 or self._rng.random() < math.exp(odds):
                self.walks[rung], self.walks[rung + 1] = hot, cold
        if spent * _RESCUES >= self._rescued + 1:
            self._rescued += 1
            worst = max(self.walks, key=lambda each: each.objectives[1])
            if worst is not self.best:
                worst.go_to(self.best)
        self._learn()

    def _learn(self) -> None:
        """Draw moves more often that lowered objectives more for their work; by counts, not by the clock."""
        self._yields *= _MEMORY
        for each in self.walks:
            self._yields += each.kit.yields
            each.kit.yields[:] = 0.0
        gain, work = self._yields[:, GAIN], self._yields[:, WORK]
        mean = gain.sum() / max(1.0, work.sum())
        if mean < _FORGOTTEN:
            return
        # A move that has been tried little is taken to yield the mean.
        pull = work.sum() / len(MOVES)
        factor = (gain + pull * mean) / (work + pull) / mean
        weights = np.array([weight for _, weight in MOVES]) * np.clip(factor, _LEAST, _MOST)
        for each in self.walks:
            each.kit.odds[:] = np.cumsum(weights)

    def tell(self, statistics: OperatorStatistics, seconds: float) -> None:
        """Add what became of the moves to the counts of a search, as `walk.NAME`: those on partitions have the same
        names. `seconds` are shared by draws."""
        tally = sum(each.kit.tally for each in self.walks)
        total = max(1, int(tally[:, PROPOSED].sum()))
        for (name, _), row in zip(MOVES, tally.tolist(), strict=True):
            counts = statistics.of(f"walk.{name}")
            counts.proposed += row[PROPOSED]
            counts.valid += row[CHANGED]
            counts.accepted += row[ACCEPTED]
            counts.improved += row[IMPROVED]
            counts.seconds += seconds * row[PROPOSED] / total
        for each in self.walks:
            each.kit.tally[:] = 0


def _on_each(run: Callable[[int], None], count: int, pool: ThreadPoolExecutor | None) -> None:
    if pool is None or count == 1:
        for number in range(count):
            run(number)
    else:
        list(pool.map(run, range(count)))  # raises what one of them raised

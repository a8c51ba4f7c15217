"""Simulated annealing over structures, from starts that people would build by hand.

Kirkpatrick, Gelatt and Vecchi, Science 220 (1983). The energy is the logarithm of the step time; structures
that no plan follows weigh by how many layers find no place, so that the search can climb into feasibility.
"""

import math
import random
from collections.abc import Iterable, Iterator

from hexiopt.problem import Problem
from hexiopt.result import Result
from hexiopt.space import sharding_stages
from solvers.base import Budget, Listener, Pricer, Search
from solvers.moves import Neighbourhood
from solvers.reason import explain
from solvers.starts import chain_structures, first_choice, kinds, symmetric
from solvers.structure import Builder, Bundle, Misfit, Structure

_HOT, _COLD = 0.02, 0.0005  # temperatures: an accepted worsening of 2 % and of 0.05 %
_MISFIT = 100.0  # energy of a structure that no plan follows, far above any step time's logarithm
_ROUNDS = 4  # annealing rounds, each from another of the best structures


class Annealer:
    """Anneals structures of one search."""

    def __init__(self, search: Search, builder: Builder) -> None:
        self.search, self.builder = search, builder
        self._neighbourhood = Neighbourhood(search.problem)
        self._seen: dict[Structure, float] = {}

    def energy(self, structure: Structure, limit: float = math.inf) -> float:
        """Logarithm of the step time, or beyond `_MISFIT` where no plan follows the structure.

        Infinite, without pricing, where it is certainly beyond `limit`.
        """
        found = self._seen.get(structure)
        if found is None:
            if len(self._seen) > 100_000:
                self._seen.clear()
            found = self._evaluate(structure, limit)
            if found is None:
                return math.inf
            self._seen[structure] = found
        return found

    def _evaluate(self, structure: Structure, limit: float) -> float | None:
        if not self.builder.allowed(structure):
            return math.inf
        priced = self.builder.price(structure, math.exp(limit) if limit < _MISFIT / 2 else math.inf)
        if priced is None:
            return None
        if isinstance(priced, Misfit):
            return _MISFIT + math.log(priced.missing)
        cost = priced[1]
        return math.log(cost.step_time_s) if cost.fits else _MISFIT - 1.0 + math.log(cost.step_time_s) / 1e3

    def anneal(self, start: Structure, rng: random.Random, until: float, max_steps: int | None) -> Structure:
        """The best structure met from `start` until the fraction `until` of the time, or `max_steps` steps."""
        search = self.search
        current = best = start
        now = least = self.energy(start)
        began_s, began_steps = search.runtime_s, search.steps
        span_s = max(1e-9, until * search.budget.time_limit_s - began_s)
        while search.go_on(until) and (max_steps is None or search.steps - began_steps < max_steps):
            search.step()
            if max_steps is not None:
                done = (search.steps - began_steps) / max_steps
            else:
                done = (search.runtime_s - began_s) / span_s
            temperature = _HOT * (_COLD / _HOT) ** min(1.0, done)
            candidate = self._neighbourhood.random_move(current, rng)
            if candidate is None or candidate == current:
                continue
            limit = now - temperature * math.log(1.0 - rng.random())
            energy = self.energy(candidate, limit)
            if energy <= limit:
                current, now = candidate, energy
                if energy < least:
                    best, least = candidate, energy
        return best


def hand_made(problem: Problem, builder: Builder) -> Iterator[Structure]:
    """Structures that people would try: chains, and every kind of machine with its own symmetric grid."""
    yield from own_grids(problem, builder)
    yield from chain_structures(problem)


def own_grids(problem: Problem, builder: Builder) -> Iterator[Structure]:
    """Each kind its best symmetric grid for its share of the batch, side by side; at several micro-batch sizes."""
    for sharding in sharding_stages(problem.workload):
        for size in problem.space.micro_batch_sizes(problem.workload.global_batch)[:3]:
            chosen = []
            for members in kinds(problem):
                best: tuple[float, Bundle] | None = None
                for bundle in symmetric(problem, members):
                    sized = Bundle(bundle.stages, size)
                    rate = builder.rate(first_choice(problem, (sized,)), sized.width if sharding else 1)
                    if rate > 0.0 and (best is None or rate > best[0]):
                        best = (rate, sized)
                if best is not None:
                    chosen.append(best[1])
            if chosen:
                base = first_choice(problem, tuple(chosen))
                yield Structure(base.bundles, base.schedule, sharding)


def improve(search: Search, builder: Builder, starts: Iterable[Structure], rng: random.Random, until: float) -> None:
    """Price `starts`, then anneal from the best of them."""
    annealer = Annealer(search, builder)
    ranked: list[tuple[float, int, Structure]] = []
    for number, start in enumerate(starts):
        if not search.go_on(0.4 * until):
            break
        search.step()
        ranked.append((annealer.energy(start), number, start))
    ranked.sort(key=lambda item: item[:2])
    pool = [structure for energy, _, structure in ranked if energy < math.inf][:_ROUNDS]
    if not pool:
        return
    begin = search.runtime_s / search.budget.time_limit_s
    left = None if search.budget.max_steps is None else search.budget.max_steps - search.steps
    best = pool[0]
    for turn in range(_ROUNDS):
        end = begin + (until - begin) * (turn + 1) / _ROUNDS
        start = best if turn == _ROUNDS - 1 or turn >= len(pool) else pool[turn]
        found = annealer.anneal(start, rng, end, None if left is None else max(1, left // _ROUNDS))
        if annealer.energy(found) < annealer.energy(best):
            best = found


class LocalSearch:
    """`local_search`: hand-made structures, annealed."""

    name = "local_search"

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan found within `budget`."""
        search = Search(self.name, problem, budget, seed, pricer, listen)
        builder = Builder(search)
        improve(search, builder, hand_made(problem, builder), random.Random(seed), 1.0)
        return explain(search, builder)

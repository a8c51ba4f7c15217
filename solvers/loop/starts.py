"""Candidates to begin from: chains of the catalogue under the master, devices dealt out at random, or a known plan."""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import linprog

from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from solvers.compiled.kernels import entry
from solvers.compiled.plans import SIMULATED, state_of
from solvers.compiled.state import SearchState, SearchWork, copy_state, forget_touched, new_state, touch_all
from solvers.compiled.step import FAR, evaluate, refresh
from solvers.compiled.tables import Tables
from solvers.loop.dice import chance, roll
from solvers.loop.rebuild import deal
from solvers.loop.templates import build_copies, dissolve_last, list_chains
from solvers.loop.walk import Kit

_MOST_CHAINS, _PER_MIX = 160, 3  # chains in the catalogue, and with the same kinds and degrees
_MOST_LISTED = 40_000  # chains that are judged
_ROUNDING = 0.3  # of a chain that the programme builds in part, from which on it is built once more, if it can be
_TRIES_AFTER = 4  # chains that are tried on what a programme leaves free
_SIZES = 2  # smallest micro-batch sizes of these


class Catalogue:
    """Chains of one and of two kinds of machines, best use of devices first, some of every mix; and what makes
    candidates of them."""

    def __init__(self, tables: Tables, work: SearchWork) -> None:
        self.tables, self._work = tables, work
        self._scratch = new_state(tables), new_state(tables)
        self._mode = [mode for mode in tables.modes.tolist() if not mode[1]][-1]  # that needs least memory
        self.chains = self._listed()

    def _listed(self) -> Any:
        tables, state = self.tables, self._scratch[0]
        machines, kinds = tables.machines, len(tables.kind_group)
        place = np.full(kinds, -1, np.int64)
        limits, value = np.zeros(kinds + 1, np.int64), np.zeros(kinds + 1)
        for m in range(len(machines) - 1, -1, -1):
            kind, devices = int(machines[m]["kind"]), int(machines[m]["usable"]).bit_count()
            if devices and machines[m]["uneven"] < 0:
                place[kind] = m if place[kind] < 0 or devices >= limits[kinds] else place[kind]
                limits[kind] += devices
        for kind in range(kinds):
            rows = [row for row in tables.kind_group[kind].tolist() if row >= 0]
            if place[kind] >= 0 and rows:
                value[kind] = max(
                    1.0 / (cost["forward_s"] + policies[0]["backward_s"]) / tables.groups[row, 0]["degree"]
                    for row in rows
                    for cost, policies in [(tables.costs[row, 0], tables.policies[row, 0])]
                )
            value[kinds] += value[kind] * limits[kind]
        limits[kinds] = min(_SIZES, len(tables.sizes))
        width = 2 + 2 * state.stages.shape[1]
        book = np.zeros((_MOST_LISTED, width), np.int64), np.zeros(_MOST_LISTED), np.zeros(1, np.int64)
        state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = self._mode
        scratch = np.zeros(width, np.int64), np.zeros((kinds, len(tables.degrees)), np.int64)
        list_chains(tables, self._work, state, (place, value), limits, scratch, book)
        count = int(book[2][0])
        taken: dict[Any, int] = {}
        chosen, seen = [], set()
        for row in np.argsort(-book[1][:count], kind="stable").tolist():
            chain = book[0][row]
            blocks = chain[2 : 2 + 2 * int(chain[0])].reshape(-1, 2)
            mix, whole = frozenset(map(tuple, blocks.tolist())), chain.tobytes()
            if whole not in seen and taken.setdefault(mix, 0) < _PER_MIX:
                taken[mix] += 1
                seen.add(whole)
                chosen.append(row)
                if len(chosen) == _MOST_CHAINS:
                    break
        self._devices = limits[:kinds]
        chains = np.ascontiguousarray(book[0][chosen])
        self._uses = np.zeros((kinds, len(chains)))
        for number, chain in enumerate(chains):
            np.add.at(self._uses[:, number], chain[2 : 2 + 2 * chain[0] : 2], chain[3 : 3 + 2 * chain[0] : 2])
        self._rates = book[1][chosen] * (value[:kinds] @ self._uses)
        return chains

    def selections(self) -> Iterator[tuple[int, ...]]:
        """Kinds to leave out: none, each, and each two."""
        kinds = np.flatnonzero(self._devices).tolist()
        for number in range(min(3, len(kinds))):
            yield from combinations(kinds, number)

    def fill(self, kit: Kit, state: SearchState, left_out: Sequence[int]) -> float:
        """Make `state` a candidate of the chains that give the most sequences a second under a linear programme over
        how often each is built, rounded down, without the kinds `left_out`; its objective in the best sharding mode.
        What is then free is used where that lowers the objective."""
        devices = self._devices.astype(float)
        devices[list(left_out)] = 0.0
        solution = linprog(-self._rates, A_ub=self._uses, b_ub=devices, method="highs") if len(self.chains) else None
        clear(self.tables, state)
        state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = self._mode
        if solution is None or solution.x is None:
            return math.inf
        for number in np.argsort(-solution.x).tolist():
            copies = int(solution.x[number] + _ROUNDING)
            if copies:
                build_copies(self.tables, self._work, state, kit, self.chains[number], copies)
        if not state.plan[0]["num_pipelines"]:
            return math.inf
        self._add(kit, state, estimate(self.tables, self._work, state), _TRIES_AFTER, 0.0)
        return self._in_best_mode(state)

    def make(self, kit: Kit, state: SearchState, tries: int, skip: float) -> float:
        """Make `state` a candidate of chains, in the best sharding mode; its objective. Chains are added while that
        lowers the objective, gradients included: of each of the first `tries` chains of the catalogue that find
        devices, all copies and half of them are tried, and the best is taken. `skip`: the chance to leave a chain out,
        for unlike candidates."""
        clear(self.tables, state)
        modes = self.tables.modes
        mode = self._mode if skip == 0.0 else modes[roll(kit.dice, len(modes))]
        state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = mode
        best = math.inf
        while (added := self._add(kit, state, best, tries, skip)) < best * (1.0 - 1e-6):
            best = added
        return self._in_best_mode(state)

    def _add(self, kit: Kit, state: SearchState, least: float, tries: int, skip: float) -> float:
        """Add the copies of a chain that lower the objective most; the objective, `least` where none do."""
        work, trial = self._work, self._scratch[1]
        tried, begun, winner = 0, int(state.plan[0]["num_pipelines"]), self._scratch[0]
        best = least
        for chain in self.chains:
            if tried == tries:
                break
            if chance(kit.dice) < skip:
                continue
            copy_state(state, trial)
            built = build_copies(self.tables, work, trial, kit, chain, len(trial.pipelines))
            tried += built > 0
            for number in (built, built // 2) if built > 1 else (built,) if built else ():
                dissolve_last(work, trial, int(trial.plan[0]["num_pipelines"]) - begun - number)
                objective = estimate(self.tables, work, trial)
                if objective < best:
                    best = objective
                    copy_state(trial, winner)
        if best < least:
            copy_state(winner, state)
        return best

    def _in_best_mode(self, state: SearchState) -> float:
        """Leave a candidate in the sharding mode of the least objective, which is returned."""
        objectives = []
        for mode, (stage, by_machine) in enumerate(self.tables.modes.tolist()):
            state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = stage, by_machine
            objectives.append((estimate(self.tables, self._work, state), mode))
        state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = self.tables.modes[min(objectives)[1]]
        return float(refresh(self.tables, self._work, state))


class StartPool:
    """The best of the candidates that it is shown, best first: one of about each number of pipelines, as these lead to
    unlike plans."""

    def __init__(self, tables: Tables, size: int) -> None:
        self._tables, self._size = tables, size
        self.objectives: list[float] = []
        self.states: list[SearchState] = []

    def keep(self, objective: float, state: SearchState) -> None:
        """Keep a copy of a candidate, if it is a plan and better than the worst here."""
        worst = self._worst(state)
        if objective >= self.limit(state):
            return
        copied = new_state(self._tables) if worst < 0 else self.states.pop(worst)
        if worst >= 0:
            del self.objectives[worst]
        copy_state(state, copied)
        at = bisect(self.objectives, objective)
        self.objectives.insert(at, objective)
        self.states.insert(at, copied)

    def limit(self, state: SearchState) -> float:
        """The objective from which on `keep` would not keep a candidate."""
        worst = self._worst(state)
        return FAR if worst < 0 else self.objectives[worst]

    def _worst(self, state: SearchState) -> int:
        """The place of that which would give way to a candidate; -1 where none would."""
        number = _about(state)
        alike = [at for at, other in enumerate(self.states) if _about(other) == number]
        full = len(self.states) == self._size
        return alike[0] if alike else len(self.states) - 1 if full else -1


def _about(state: SearchState) -> int:
    """A number for candidates of about as many pipelines: two for each power of two."""
    return int(2.0 * math.log2(max(1, int(state.plan[0]["num_pipelines"]))))


def clear(tables: Tables, state: SearchState) -> None:
    """All devices are free."""
    state.plan[0]["num_pipelines"] = 0
    state.free[:] = tables.machines["usable"]


@entry
def deal_all(tables: Any, work: Any, state: Any, kit: Any, most: int) -> None:
    """All devices in 1 to `most` pipelines, few as often as many; sometimes a kind of machines is left out."""
    dice = kit.dice
    plan, mode = state.plan[0], tables.modes[roll(dice, len(tables.modes))]
    plan.zero_stage, plan.by_machine = mode[0], mode[1]
    out = roll(dice, 3 * len(tables.kind_group))
    for m in range(len(state.free)):
        if tables.machines[m].kind == out:
            state.free[m] = 0
    count = int(np.exp(chance(dice) * np.log(most + 1.0)))
    size = 0
    while size < len(tables.sizes) - 1 and roll(dice, 3) == 0:
        size += 1
    deal(tables, work, state, kit, max(1, count), size)
    for m in range(len(state.free)):
        if tables.machines[m].kind == out:
            state.free[m] = tables.machines[m].usable


def deal_out(tables: Tables, work: SearchWork, state: SearchState, kit: Kit) -> float:
    """Make `state` a random candidate of all devices; its objective."""
    clear(tables, state)
    devices = sum(int(mask).bit_count() for mask in tables.machines["usable"])
    deal_all(tables, work, state, kit, min(len(state.pipelines), devices))
    return float(refresh(tables, work, state))


def estimate(tables: Tables, work: SearchWork, state: SearchState) -> float:
    """The objective of a candidate, once from nothing: messages and micro-batches may be a little stale."""
    count = int(state.plan[0]["num_pipelines"])
    state.plan[0]["holders"] = max(1, count)
    state.stages["room"][:count] = 0
    forget_touched(work)
    touch_all(work, state)
    objective = float(evaluate(tables, work, state, math.inf))
    forget_touched(work)
    return objective


def known_start(tables: Tables, work: SearchWork, plan: Plan, cluster: Cluster) -> tuple[SearchState, float] | None:
    """The candidate of a known plan and its objective; None where it has none."""
    alone = all(len(stage.parallelism.replicas) == 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    plain = plan.schedule in SIMULATED and plan.sharding.stage < 2
    sizes = {pipeline.micro_batch_size for pipeline in plan.pipelines} <= set(tables.sizes.tolist())
    state = new_state(tables)
    longest = max(len(pipeline.stages) for pipeline in plan.pipelines)
    room = len(plan.pipelines) <= len(state.pipelines) and longest <= state.stages.shape[1]
    if not (alone and plain and sizes and room):
        return None
    copy_state(state_of(tables, plan, cluster), state)
    objective = refresh(tables, work, state)
    return (state, objective) if objective < math.inf else None

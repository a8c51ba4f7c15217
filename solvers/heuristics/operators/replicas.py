"""Moves that make replicas of stages, pipelines and TP groups, and undo it.

A TP group becomes a replica of another stage, of its own or another pipeline, and leaves it again; pipelines become
the replicas of one and part again; a TP group falls into replicas, in equal parts or not, and replicas join into one.
"""

import random
from collections.abc import Sequence
from itertools import combinations

from hexiopt.problem.problem import Problem
from solvers.core.partition import Bundle, Group, Structure

Slot = tuple[Group, ...]


class ReplicaMoves:
    """The moves of one problem whose space has replicas; each gives another structure, or None."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        self._by_machine = problem.usable_by_machine
        self._allowed = {m: set(problem.space.allowed_tp(len(own))) for m, own in self._by_machine.items()}
        self._sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)

    def pipelines_to_replicas(self, structure: Structure, rng: random.Random) -> Structure | None:
        """The pipelines of a bundle, or of two that are as long, become one: what were its stages are replicas."""
        chosen = [rng.randrange(len(structure.bundles))]
        first = structure.bundles[chosen[0]]
        if first.replicated or first.width == 1 or rng.random() < 0.5:
            partners = [
                at
                for at, other in enumerate(structure.bundles)
                if at != chosen[0] and len(other.stages) == len(first.stages)
            ]
            if not partners:
                return None
            chosen.append(rng.choice(partners))
        bundles = [structure.bundles[at] for at in chosen]
        stages = [sum(slots, start=()) for slots in zip(*(bundle.stages for bundle in bundles), strict=True)]
        # As many samples for each as before, or as few as there must be.
        size = sum(bundle.width * bundle.micro_batch_size for bundle in bundles) if rng.random() < 0.5 else 1
        line = self._line(stages, size)
        return None if line is None else self._replaced(structure, dict.fromkeys(chosen), [line])

    def replicas_to_pipelines(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A pipeline whose stages have equally many replicas becomes so many pipelines."""
        at = self._replicated(structure, rng)
        if at is None:
            return None
        bundle = structure.bundles[at]
        width = len(bundle.stages[0])
        if any(len(slot) != width for slot in bundle.stages):
            return None
        size = max((n for n in self._sizes if n * width <= bundle.micro_batch_size), default=self._sizes[0])
        if all(len(set(map(len, slot))) == 1 for slot in bundle.stages):
            return self._replaced(structure, {at: None}, [Bundle(bundle.stages, size)])
        lines = [Bundle(tuple((slot[k],) for slot in bundle.stages), size) for k in range(width)]
        return self._replaced(structure, {at: None}, lines)

    def join_as_replica(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A stage, or one of its replicas, becomes a replica of another stage, of any pipeline that moves alone."""
        places = [
            (b, s) for b, bundle in enumerate(structure.bundles) if bundle.width == 1 for s in range(len(bundle.stages))
        ]
        if len(places) < 2:
            return None
        (a, s), (b, t) = rng.sample(places, 2)
        changed = {at: list(structure.bundles[at].stages) for at in (a, b)}
        slot = changed[a][s]
        k = rng.randrange(len(slot))
        whole = rng.random() < 0.5
        moved, kept = (slot, ()) if whole else (slot[k : k + 1], slot[:k] + slot[k + 1 :])
        place = rng.randrange(len(changed[b][t]) + 1)
        changed[b][t] = changed[b][t][:place] + moved + changed[b][t][place:]
        changed[a][s : s + 1] = [kept] if kept else []
        return self._with_lines(structure, changed)

    def leave_replicas(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Some replicas of a stage become a stage of their own, of any pipeline that moves alone, or a pipeline."""
        at = self._replicated(structure, rng)
        if at is None:
            return None
        stages = list(structure.bundles[at].stages)
        s = rng.choice([s for s, slot in enumerate(stages) if len(slot) > 1])
        order = list(stages[s])
        rng.shuffle(order)
        cut = rng.randrange(1, len(order))
        stages[s], moved = (tuple(g for g in stages[s] if g in part) for part in (order[:cut], order[cut:]))
        changed = {at: stages}
        if rng.random() < 0.3:
            line = self._line([moved], structure.bundles[at].micro_batch_size)
            return None if line is None else self._with_lines(structure, changed, line)
        taker = rng.choice([b for b, bundle in enumerate(structure.bundles) if bundle.width == 1])
        taking = changed.setdefault(taker, list(structure.bundles[taker].stages))
        taking.insert(rng.randrange(len(taking) + 1), moved)
        return self._with_lines(structure, changed)

    def group_to_replicas(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A TP group of a pipeline that moves alone becomes two replicas, of any degrees that are allowed."""
        places = [
            (b, s, k)
            for b, bundle in enumerate(structure.bundles)
            if bundle.width == 1
            for s, slot in enumerate(bundle.stages)
            for k, group in enumerate(slot)
            if len(group) > 1
        ]
        if not places:
            return None
        b, s, k = rng.choice(places)
        stages = list(structure.bundles[b].stages)
        group = stages[s][k]
        allowed = self._allowed[self._machine_of[group[0]]]
        cuts = [n for n in range(1, len(group)) if n in allowed and len(group) - n in allowed]
        if not cuts:
            return None
        n = rng.choice(cuts)
        stages[s] = (*stages[s][:k], group[:n], group[n:], *stages[s][k + 1 :])
        return self._with_lines(structure, {b: stages})

    def replicas_to_group(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two replicas in one machine become one TP group."""
        at = self._replicated(structure, rng)
        if at is None:
            return None
        stages = list(structure.bundles[at].stages)
        pairs = [(s, a, b) for s, slot in enumerate(stages) for a, b in combinations(slot, 2) if self._joins(a, b)]
        if not pairs:
            return None
        s, a, b = rng.choice(pairs)
        joined = tuple(sorted(a + b))
        stages[s] = tuple(joined if group == a else group for group in stages[s] if group != b)
        return self._with_lines(structure, {at: stages})

    # Pieces.

    def _joins(self, a: Group, b: Group) -> bool:
        machine = self._machine_of[a[0]]
        return machine == self._machine_of[b[0]] and len(a) + len(b) in self._allowed[machine]

    def _line(self, stages: Sequence[Slot], least_size: int) -> Bundle | None:
        """A pipeline of `stages`, with the least allowed micro-batch from `least_size` that serves all replicas.

        The largest allowed one where `least_size` is beyond it.
        """
        most = max(map(len, stages))
        sizes = [size for size in self._sizes if size >= most]
        if not sizes:
            return None
        return Bundle.line(stages, min((size for size in sizes if size >= least_size), default=sizes[-1]))

    def _with_lines(self, structure: Structure, changed: dict[int, list[Slot]], *more: Bundle) -> Structure | None:
        """The structure with other stages for some bundles of one pipeline, gone where none are left; and `more`."""
        lines: dict[int, Bundle | None] = {}
        for at, stages in changed.items():
            if not stages:
                lines[at] = None
                continue
            lines[at] = self._line(stages, structure.bundles[at].micro_batch_size)
            if lines[at] is None:
                return None
        return self._replaced(structure, lines, more)

    @staticmethod
    def _replaced(structure: Structure, changed: dict[int, Bundle | None], more: Sequence[Bundle]) -> Structure:
        kept = (changed.get(at, bundle) for at, bundle in enumerate(structure.bundles))
        return structure.with_bundles((*(bundle for bundle in kept if bundle is not None), *more))

    @staticmethod
    def _replicated(structure: Structure, rng: random.Random) -> int | None:
        """A replicated bundle."""
        found = [at for at, bundle in enumerate(structure.bundles) if bundle.replicated]
        return rng.choice(found) if found else None

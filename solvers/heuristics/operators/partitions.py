"""Moves between structures: each takes a structure and a random source and gives another, or None.

A move keeps devices in at most one place and TP groups inside a machine; whether the result obeys the plan
space and fits memory is for the builder to say.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import INTERLEAVED
from solvers.core.interleaving import drawn_chunks, drawn_schedule, may_interleave
from solvers.core.partition import Bundle, Structure
from solvers.core.zero import drawn_groups, drawn_stage
from solvers.frame.starts import cut
from solvers.heuristics.operators.replicas import ReplicaMoves, Slot

Move = Callable[["Neighbourhood", Structure, random.Random], Structure | None]

_REPLICATE = 0.3  # most of the moves that concern replicas
_DEVICES_REPLICATING = 2.0  # that share of all devices, if it is less


_REPLICA_MOVES: tuple[Move, ...] = (
    ReplicaMoves.pipelines_to_replicas,
    ReplicaMoves.replicas_to_pipelines,
    ReplicaMoves.join_as_replica,
    ReplicaMoves.join_as_replica,
    ReplicaMoves.leave_replicas,
    ReplicaMoves.group_to_replicas,
    ReplicaMoves.replicas_to_group,
)


class Neighbourhood(ReplicaMoves):
    """The moves of one problem; `replicates` where its plans may have replicas."""

    def __init__(self, problem: Problem, replicates: bool = False) -> None:
        super().__init__(problem)
        self._uneven = {m for m, spec in enumerate(problem.cluster.machines) if not spec.is_uniform}
        self.moves: tuple[Move, ...] = (
            Neighbourhood.reorder,
            Neighbourhood.reorder,
            Neighbourhood.halve_tp,
            Neighbourhood.double_tp,
            Neighbourhood.width_to_stages,
            Neighbourhood.stages_to_width,
            Neighbourhood.width_to_tp,
            Neighbourhood.tp_to_width,
            Neighbourhood.split_bundle,
            Neighbourhood.merge_bundles,
            Neighbourhood.move_slot,
            Neighbourhood.move_slot,
            Neighbourhood.swap_slots,
            Neighbourhood.swap_groups,
            Neighbourhood.join,
            Neighbourhood.cut_in_two,
            Neighbourhood.drop,
            Neighbourhood.use_idle,
            Neighbourhood.resize_micro_batch,
            Neighbourhood.other_choice,
            *([Neighbourhood.other_chunks] if may_interleave(problem) else []),
        )
        # In a small cluster replicas often pay; in a large one pipelines do as well, and cost less to price.
        self._replicate = min(_REPLICATE, _DEVICES_REPLICATING / len(problem.usable_devices)) if replicates else 0.0

    def random_move(self, structure: Structure, rng: random.Random) -> Structure | None:
        """One random move, or None where it does not apply."""
        moves = _REPLICA_MOVES if self._replicate and rng.random() < self._replicate else self.moves
        return rng.choice(moves)(self, structure, rng)

    # Inside a bundle.

    def reorder(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Move a stage to another place, or swap two."""
        at, bundle = self._pick(structure, rng)
        p = len(bundle.stages)
        if p < 2:
            return None
        stages = list(bundle.stages)
        a, b = rng.sample(range(p), 2)
        if rng.random() < 0.5:
            stages[a], stages[b] = stages[b], stages[a]
        else:
            stages.insert(b, stages.pop(a))
        return self._with(structure, at, bundle.with_stages(stages))

    def halve_tp(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A stage becomes two of half its TP degree."""
        at, bundle = self._pick(structure, rng)
        s = rng.randrange(len(bundle.stages))
        halves = self._halves(bundle.stages[s])
        if halves is None:
            return None
        return self._with(structure, at, bundle.with_stages((*bundle.stages[:s], *halves, *bundle.stages[s + 1 :])))

    def double_tp(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two stages in the same machines become one of twice the TP degree."""
        at, bundle = self._pick(structure, rng)
        p = len(bundle.stages)
        if p < 2:
            return None
        a = rng.randrange(p)
        partners = [b for b in range(p) if b != a and self._joined(bundle.stages[a], bundle.stages[b])]
        if not partners:
            return None
        b = rng.choice(partners)
        stages = list(bundle.stages)
        joined = self._joined(stages[a], stages[b])
        assert joined is not None
        stages[a] = joined
        del stages[b]
        return self._with(structure, at, bundle.with_stages(stages))

    def width_to_stages(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Half as many pipelines, every stage followed by a second one on the other half's devices."""
        at, bundle = self._pick(structure, rng)
        half = bundle.width // 2
        if bundle.width % 2:
            return None
        stages = [part for slot in bundle.stages for part in (slot[:half], slot[half:])]
        return self._with(structure, at, bundle.with_stages(stages))

    def stages_to_width(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Twice as many pipelines, half as long: neighbouring stages of equal TP degree stand side by side."""
        at, bundle = self._pick(structure, rng)
        stages = bundle.stages
        if len(stages) % 2 or bundle.replicated:
            return None
        if rng.random() < 0.5:
            pairs = [(stages[s], stages[s + 1]) for s in range(0, len(stages), 2)]
        else:
            half = len(stages) // 2
            pairs = [(stages[s], stages[s + half]) for s in range(half)]
        if any(len(a[0]) != len(b[0]) for a, b in pairs):
            return None
        return self._with(structure, at, bundle.with_stages(a + b for a, b in pairs))

    def width_to_tp(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Half as many pipelines, every TP degree doubled."""
        at, bundle = self._pick(structure, rng)
        half = bundle.width // 2
        if bundle.width % 2:
            return None
        stages = []
        for slot in bundle.stages:
            joined = self._joined(slot[:half], slot[half:]) or self._joined(slot[::2], slot[1::2])
            if joined is None:
                return None
            stages.append(joined)
        return self._with(structure, at, bundle.with_stages(stages))

    def tp_to_width(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Twice as many pipelines, every TP degree halved."""
        at, bundle = self._pick(structure, rng)
        if bundle.replicated:
            return None
        stages = []
        for slot in bundle.stages:
            halves = self._halves(slot)
            if halves is None:
                return None
            stages.append(halves[0] + halves[1])
        return self._with(structure, at, bundle.with_stages(stages))

    def resize_micro_batch(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Twice or half the micro-batch, of one bundle or of all."""
        factor = rng.choice((0.5, 2.0))
        chosen = range(len(structure.bundles))
        if rng.random() < 0.5 and self.problem.space.uneven_batch:
            chosen = range(first := rng.randrange(len(structure.bundles)), first + 1)
        bundles = list(structure.bundles)
        for at in chosen:
            size = int(bundles[at].micro_batch_size * factor)
            if size not in self._sizes or size < bundles[at].most_replicas:
                return None
            bundles[at] = replace(bundles[at], micro_batch_size=size)
        return structure.with_bundles(bundles)

    # Between bundles.

    def split_bundle(self, structure: Structure, rng: random.Random) -> Structure | None:
        """One bundle becomes two of the same stages."""
        at, bundle = self._pick(structure, rng)
        if bundle.width < 2:
            return None
        k = rng.choice((bundle.width // 2, rng.randrange(1, bundle.width)))
        left = bundle.with_stages(slot[:k] for slot in bundle.stages)
        right = bundle.with_stages(slot[k:] for slot in bundle.stages)
        return self._with(structure, at, left, right)

    def merge_bundles(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two bundles with stages of the same TP degrees become one, so that their layers align."""
        pair = self._pick_two(structure, rng)
        if pair is None:
            return None
        a, b = pair
        first, second = structure.bundles[a], structure.bundles[b]
        shapes = [[len(slot[0]) for slot in bundle.stages] for bundle in (first, second)]
        if shapes[0] != shapes[1] or first.replicated or second.replicated:
            return None
        merged = first.with_stages(x + y for x, y in zip(first.stages, second.stages, strict=True))
        return self._with_two(structure, a, b, merged, None)

    def move_slot(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A stage leaves a bundle for another; where that is narrower, it becomes several stages there."""
        pair = self._pick_two(structure, rng)
        if pair is None:
            return None
        a, b = pair
        giver, taker = structure.bundles[a], structure.bundles[b]
        if len(giver.stages) < 2 or giver.width % taker.width:
            return None
        s, width = rng.randrange(len(giver.stages)), taker.width
        slot = giver.stages[s]
        # Replicas stay together.
        parts = [slot] if giver.replicated else [slot[k : k + width] for k in range(0, giver.width, width)]
        stages = list(taker.stages)
        place = rng.randrange(len(stages) + 1)
        stages[place:place] = parts
        taken = self._taking(taker, giver, stages)
        left = giver.with_stages(giver.stages[:s] + giver.stages[s + 1 :])
        return None if taken is None else self._with_two(structure, a, b, left, taken)

    def swap_slots(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two bundles of one width exchange a stage."""
        pair = self._pick_two(structure, rng)
        if pair is None:
            return None
        a, b = pair
        one, two = structure.bundles[a], structure.bundles[b]
        if one.width != two.width:
            return None
        first, second = list(one.stages), list(two.stages)
        s, t = rng.randrange(len(first)), rng.randrange(len(second))
        first[s], second[t] = second[t], first[s]
        a_new, b_new = self._taking(one, two, first), self._taking(two, one, second)
        return None if a_new is None or b_new is None else self._with_two(structure, a, b, a_new, b_new)

    def swap_groups(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two TP groups of one degree exchange places, anywhere."""
        places = [
            (b, s, k)
            for b, bundle in enumerate(structure.bundles)
            for s, slot in enumerate(bundle.stages)
            for k in range(len(slot))
        ]
        if len(places) < 2:
            return None
        one, two = rng.sample(places, 2)
        bundles = [[list(slot) for slot in bundle.stages] for bundle in structure.bundles]
        x, y = bundles[one[0]][one[1]][one[2]], bundles[two[0]][two[1]][two[2]]
        machine = self._machine_of[x[0]]
        if len(x) != len(y) or (machine == self._machine_of[y[0]] and machine not in self._uneven):
            return None
        bundles[one[0]][one[1]][one[2]], bundles[two[0]][two[1]][two[2]] = y, x
        return structure.with_bundles(
            old.with_stages(tuple(slot) for slot in new) for old, new in zip(structure.bundles, bundles, strict=True)
        )

    def join(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Two bundles of one width become one of longer pipelines."""
        pair = self._pick_two(structure, rng)
        if pair is None:
            return None
        a, b = pair
        first, second = structure.bundles[a], structure.bundles[b]
        if first.width != second.width:
            return None
        joined = self._taking(first, second, first.stages + second.stages)
        return None if joined is None else self._with_two(structure, a, b, joined, None)

    def cut_in_two(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A bundle of long pipelines becomes two of shorter ones."""
        at, bundle = self._pick(structure, rng)
        if len(bundle.stages) < 2:
            return None
        s = rng.randrange(1, len(bundle.stages))
        stages = bundle.stages
        if rng.random() < 0.5:
            order = list(range(len(stages)))
            rng.shuffle(order)
            chosen = set(order[:s])
            parts = [[x for i, x in enumerate(stages) if (i in chosen) is side] for side in (True, False)]
        else:
            parts = [list(stages[:s]), list(stages[s:])]
        return self._with(structure, at, *(bundle.with_stages(part) for part in parts))

    # In and out of use.

    def drop(self, structure: Structure, rng: random.Random) -> Structure | None:
        """A stage, or a whole bundle, falls out of use."""
        at, bundle = self._pick(structure, rng)
        if len(bundle.stages) > 1 and rng.random() < 0.8:
            s = rng.randrange(len(bundle.stages))
            return self._with(structure, at, bundle.with_stages(bundle.stages[:s] + bundle.stages[s + 1 :]))
        return self._with(structure, at) if len(structure.bundles) > 1 else None

    def use_idle(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Idle devices of a machine become a stage of a bundle, or a bundle of their own."""
        used = structure.devices()
        idle = {m: [d for d in own if d not in used] for m, own in self._by_machine.items()}
        machines = [m for m, own in idle.items() if own]
        if not machines:
            return None
        machine = rng.choice(machines)
        tp = rng.choice([t for t in sorted(self._allowed[machine]) if t <= len(idle[machine])])
        groups = cut(idle[machine], tp)
        at, bundle = self._pick(structure, rng)
        if rng.random() < 0.3:
            width = rng.choice([w for w in range(1, len(groups) + 1) if len(groups) % w == 0])
            stages = tuple(tuple(groups[k : k + width]) for k in range(0, len(groups), width))
            return structure.with_bundles((*structure.bundles, Bundle(stages, bundle.micro_batch_size)))
        if len(groups) < bundle.width:
            return None
        place = rng.randrange(len(bundle.stages) + 1)
        slot = tuple(groups[: bundle.width])
        return self._with(structure, at, bundle.with_stages((*bundle.stages[:place], slot, *bundle.stages[place:])))

    def other_choice(self, structure: Structure, rng: random.Random) -> Structure | None:
        """Another schedule or sharding."""
        schedule, chunks = drawn_schedule(self.problem, rng)
        sharding = drawn_stage(self.problem, rng, aligned=len(structure.bundles) == 1)
        found = Structure(structure.bundles, schedule, sharding, chunks, drawn_groups(self.problem, rng, sharding))
        return None if found == structure else found

    def other_chunks(self, structure: Structure, rng: random.Random) -> Structure | None:
        """The same pipelines interleaved, or interleaved with other numbers of layer ranges."""
        chunks = drawn_chunks(self.problem, rng)
        if all(len(bundle.stages) == 1 for bundle in structure.bundles) or chunks == structure.chunks:
            return None
        return replace(structure, schedule=INTERLEAVED, chunks=chunks)

    # Pieces.

    def _joined(self, one: Slot, two: Slot) -> Slot | None:
        """The groups of two stages joined pairwise into groups of the double degree, where machines allow it."""
        if len(one) != len(two):
            return None
        for a, b in zip(one, two, strict=True):
            machine = self._machine_of[a[0]]
            if len(a) != len(b) or machine != self._machine_of[b[0]] or 2 * len(a) not in self._allowed[machine]:
                return None
        return tuple(tuple(sorted(a + b)) for a, b in zip(one, two, strict=True))

    def _taking(self, taker: Bundle, giver: Bundle, stages: Sequence[Slot]) -> Bundle | None:
        """`taker` with `stages`, some of them from `giver`."""
        if taker.replicated or giver.replicated:
            return self._line(stages, taker.micro_batch_size)
        return taker.with_stages(stages)

    @staticmethod
    def _halves(slot: Slot) -> tuple[Slot, Slot] | None:
        if any(len(group) % 2 for group in slot):
            return None
        return tuple(g[: len(g) // 2] for g in slot), tuple(g[len(g) // 2 :] for g in slot)

    @staticmethod
    def _pick(structure: Structure, rng: random.Random) -> tuple[int, Bundle]:
        at = rng.randrange(len(structure.bundles))
        return at, structure.bundles[at]

    @staticmethod
    def _pick_two(structure: Structure, rng: random.Random) -> tuple[int, int] | None:
        if len(structure.bundles) < 2:
            return None
        a, b = rng.sample(range(len(structure.bundles)), 2)
        return a, b

    @staticmethod
    def _with(structure: Structure, at: int, *new: Bundle) -> Structure:
        bundles = structure.bundles
        return structure.with_bundles((*bundles[:at], *new, *bundles[at + 1 :]))

    @staticmethod
    def _with_two(structure: Structure, a: int, b: int, first: Bundle, second: Bundle | None) -> Structure:
        bundles: list[Bundle | None] = list(structure.bundles)
        bundles[a], bundles[b] = first, second
        return structure.with_bundles(bundle for bundle in bundles if bundle is not None)

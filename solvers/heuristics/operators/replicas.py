"""Operators that make replicas of stages, pipelines and TP groups, and undo it.

A TP group becomes a replica of another stage, of its own or another pipeline, and leaves it again; pipelines become
the replicas of one and part again; a TP group falls into replicas, in equal parts or not, and replicas join into one.
"""

import random
from itertools import combinations

from solvers.core.partition import Bundle, Structure
from solvers.heuristics.operators.neighbourhood import Bundles, Neighbourhood, Slot, replaced


def pipelines_to_replicas(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
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
    line = near.line(stages, size)
    return None if line is None else replaced(structure, dict.fromkeys(chosen, ()), [line])


def replicas_to_pipelines(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """A pipeline whose stages have equally many replicas becomes so many pipelines."""
    at = _replicated(structure, rng)
    if at is None:
        return None
    bundle = structure.bundles[at]
    width = len(bundle.stages[0])
    if any(len(slot) != width for slot in bundle.stages):
        return None
    size = max((n for n in near.sizes if n * width <= bundle.micro_batch_size), default=near.sizes[0])
    if all(len(set(map(len, slot))) == 1 for slot in bundle.stages):
        return replaced(structure, {at: ()}, [Bundle(bundle.stages, size)])
    lines = [Bundle(tuple((slot[k],) for slot in bundle.stages), size) for k in range(width)]
    return replaced(structure, {at: ()}, lines)


def join_as_replica(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
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
    return _with_lines(near, structure, changed)


def leave_replicas(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """Some replicas of a stage become a stage of their own, of any pipeline that moves alone, or a pipeline."""
    at = _replicated(structure, rng)
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
        line = near.line([moved], structure.bundles[at].micro_batch_size)
        return None if line is None else _with_lines(near, structure, changed, line)
    taker = rng.choice([b for b, bundle in enumerate(structure.bundles) if bundle.width == 1])
    taking = changed.setdefault(taker, list(structure.bundles[taker].stages))
    taking.insert(rng.randrange(len(taking) + 1), moved)
    return _with_lines(near, structure, changed)


def group_to_replicas(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
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
    allowed = near.allowed[near.machine_of[group[0]]]
    cuts = [n for n in range(1, len(group)) if n in allowed and len(group) - n in allowed]
    if not cuts:
        return None
    n = rng.choice(cuts)
    stages[s] = (*stages[s][:k], group[:n], group[n:], *stages[s][k + 1 :])
    return _with_lines(near, structure, {b: stages})


def replicas_to_group(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """Two replicas in one machine become one TP group."""
    at = _replicated(structure, rng)
    if at is None:
        return None
    stages = list(structure.bundles[at].stages)
    pairs = [(s, a, b) for s, slot in enumerate(stages) for a, b in combinations(slot, 2) if near.joins(a, b)]
    if not pairs:
        return None
    s, a, b = rng.choice(pairs)
    joined = tuple(sorted(a + b))
    stages[s] = tuple(joined if group == a else group for group in stages[s] if group != b)
    return _with_lines(near, structure, {at: stages})


def _replicated(structure: Structure, rng: random.Random) -> int | None:
    """A replicated bundle."""
    found = [at for at, bundle in enumerate(structure.bundles) if bundle.replicated]
    return rng.choice(found) if found else None


def _with_lines(
    near: Neighbourhood, structure: Structure, changed: dict[int, list[Slot]], *more: Bundle
) -> Structure | None:
    """The partition with other stages for some bundles of one pipeline, gone where none are left; and `more`."""
    lines: dict[int, Bundles] = {}
    for at, stages in changed.items():
        line = near.line(stages, structure.bundles[at].micro_batch_size) if stages else None
        if stages and line is None:
            return None
        lines[at] = () if line is None else (line,)
    return replaced(structure, lines, more)

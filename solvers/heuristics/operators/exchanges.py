"""Operators between bundles, which exchange stages and TP groups or join, and on which devices are in use."""

import random

from solvers.core.partition import Bundle, Structure
from solvers.frame.starts import cut
from solvers.heuristics.operators.neighbourhood import Bundles, Neighbourhood, on_two, replaced


@on_two
def merge_groups(
    near: Neighbourhood, first: Bundle, second: Bundle, rng: random.Random
) -> tuple[Bundles, Bundles] | None:
    """Two bundles with stages of the same TP degrees become one, so that their layers align."""
    degrees = [[len(slot[0]) for slot in bundle.stages] for bundle in (first, second)]
    if degrees[0] != degrees[1] or first.replicated or second.replicated:
        return None
    return (first.with_stages(x + y for x, y in zip(first.stages, second.stages, strict=True)),), ()


@on_two
def join_pipelines(
    near: Neighbourhood, first: Bundle, second: Bundle, rng: random.Random
) -> tuple[Bundles, Bundles] | None:
    """Two bundles of one width become one of longer pipelines."""
    if first.width != second.width:
        return None
    joined = near.taking(first, second, first.stages + second.stages)
    return None if joined is None else ((joined,), ())


@on_two
def move_stage(near: Neighbourhood, giver: Bundle, taker: Bundle, rng: random.Random) -> tuple[Bundles, Bundles] | None:
    """A stage leaves a bundle for another; where that is narrower, it becomes several stages there."""
    if len(giver.stages) < 2 or giver.width % taker.width:
        return None
    s, width = rng.randrange(len(giver.stages)), taker.width
    slot = giver.stages[s]
    # Replicas stay together.
    parts = [slot] if giver.replicated else [slot[k : k + width] for k in range(0, giver.width, width)]
    stages = list(taker.stages)
    place = rng.randrange(len(stages) + 1)
    stages[place:place] = parts
    taken = near.taking(taker, giver, stages)
    return None if taken is None else ((giver.with_stages(giver.stages[:s] + giver.stages[s + 1 :]),), (taken,))


@on_two
def swap_stages(near: Neighbourhood, one: Bundle, two: Bundle, rng: random.Random) -> tuple[Bundles, Bundles] | None:
    """Two bundles of one width exchange a stage."""
    if one.width != two.width:
        return None
    first, second = list(one.stages), list(two.stages)
    s, t = rng.randrange(len(first)), rng.randrange(len(second))
    first[s], second[t] = second[t], first[s]
    a, b = near.taking(one, two, first), near.taking(two, one, second)
    return None if a is None or b is None else ((a,), (b,))


def swap_tp_groups(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
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
    x, y = (structure.bundles[b].stages[s][k] for b, s, k in (one, two))
    machine = near.machine_of[x[0]]
    if len(x) != len(y) or (machine == near.machine_of[y[0]] and machine not in near.uneven):
        return None
    to = {x: y, y: x}
    return structure.with_bundles(
        bundle.with_stages(tuple(to.get(group, group) for group in slot) for slot in bundle.stages)
        for bundle in structure.bundles
    )


def leave_unused(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """A stage, or a whole bundle, falls out of use."""
    at = rng.randrange(len(structure.bundles))
    bundle = structure.bundles[at]
    if len(bundle.stages) > 1 and rng.random() < 0.8:
        s = rng.randrange(len(bundle.stages))
        return replaced(structure, {at: (bundle.with_stages(bundle.stages[:s] + bundle.stages[s + 1 :]),)})
    return replaced(structure, {at: ()}) if len(structure.bundles) > 1 else None


def use_idle(near: Neighbourhood, structure: Structure, rng: random.Random) -> Structure | None:
    """Idle devices of a machine become a stage of a bundle, or a bundle of their own."""
    used = structure.devices()
    idle = {m: [d for d in own if d not in used] for m, own in near.by_machine.items()}
    machines = [m for m, own in idle.items() if own]
    if not machines:
        return None
    machine = rng.choice(machines)
    tp = rng.choice([t for t in sorted(near.allowed[machine]) if t <= len(idle[machine])])
    groups = cut(idle[machine], tp)
    at = rng.randrange(len(structure.bundles))
    bundle = structure.bundles[at]
    if rng.random() < 0.3:
        width = rng.choice([w for w in range(1, len(groups) + 1) if len(groups) % w == 0])
        stages = tuple(tuple(groups[k : k + width]) for k in range(0, len(groups), width))
        return replaced(structure, {}, (Bundle(stages, bundle.micro_batch_size),))
    if len(groups) < bundle.width:
        return None
    place = rng.randrange(len(bundle.stages) + 1)
    slot = tuple(groups[: bundle.width])
    return replaced(structure, {at: (bundle.with_stages((*bundle.stages[:place], slot, *bundle.stages[place:])),)})

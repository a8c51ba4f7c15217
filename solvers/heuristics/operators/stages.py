"""Operators inside a bundle: the order of its stages, their TP degrees, its width and its length."""

import random
from collections.abc import Iterable

from solvers.core.partition import Bundle
from solvers.heuristics.operators.neighbourhood import Bundles, Neighbourhood, Slot, halves, on_one


def _with(bundle: Bundle, stages: Iterable[Slot]) -> Bundles:
    return (bundle.with_stages(stages),)


@on_one
def reorder_stages(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Move a stage to another place, or swap two."""
    stages = list(bundle.stages)
    if len(stages) < 2:
        return None
    a, b = rng.sample(range(len(stages)), 2)
    if rng.random() < 0.5:
        stages[a], stages[b] = stages[b], stages[a]
    else:
        stages.insert(b, stages.pop(a))
    return _with(bundle, stages)


@on_one
def halve_tp(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """A stage becomes two of half its TP degree."""
    s = rng.randrange(len(bundle.stages))
    two = halves(bundle.stages[s])
    return None if two is None else _with(bundle, (*bundle.stages[:s], *two, *bundle.stages[s + 1 :]))


@on_one
def double_tp(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Two stages in the same machines become one of twice the TP degree."""
    stages = list(bundle.stages)
    if len(stages) < 2:
        return None
    a = rng.randrange(len(stages))
    partners = {b: joined for b, other in enumerate(stages) if b != a and (joined := near.joined(stages[a], other))}
    if not partners:
        return None
    b = rng.choice(list(partners))
    stages[a] = partners[b]
    del stages[b]
    return _with(bundle, stages)


@on_one
def width_to_stages(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Half as many pipelines, every stage followed by a second one on the other half's devices."""
    half = bundle.width // 2
    if bundle.width % 2:
        return None
    return _with(bundle, (part for slot in bundle.stages for part in (slot[:half], slot[half:])))


@on_one
def stages_to_width(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Twice as many pipelines, half as long: neighbouring stages of equal TP degree stand side by side."""
    stages = bundle.stages
    if len(stages) % 2 or bundle.replicated:
        return None
    half = len(stages) // 2
    pairs = list(zip(stages[::2], stages[1::2], strict=True))
    if rng.random() >= 0.5:
        pairs = list(zip(stages[:half], stages[half:], strict=True))
    if any(len(a[0]) != len(b[0]) for a, b in pairs):
        return None
    return _with(bundle, (a + b for a, b in pairs))


@on_one
def width_to_tp(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Half as many pipelines, every TP degree doubled."""
    half = bundle.width // 2
    if bundle.width % 2:
        return None
    joined = [near.joined(slot[:half], slot[half:]) or near.joined(slot[::2], slot[1::2]) for slot in bundle.stages]
    return None if None in joined else _with(bundle, filter(None, joined))


@on_one
def tp_to_width(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """Twice as many pipelines, every TP degree halved."""
    pairs = [None] if bundle.replicated else [halves(slot) for slot in bundle.stages]
    return None if None in pairs else _with(bundle, (a + b for a, b in filter(None, pairs)))


@on_one
def split_group(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """One bundle becomes two of the same stages."""
    if bundle.width < 2:
        return None
    k = rng.choice((bundle.width // 2, rng.randrange(1, bundle.width)))
    return (
        bundle.with_stages(slot[:k] for slot in bundle.stages),
        bundle.with_stages(slot[k:] for slot in bundle.stages),
    )


@on_one
def cut_pipeline(near: Neighbourhood, bundle: Bundle, rng: random.Random) -> Bundles | None:
    """A bundle of long pipelines becomes two of shorter ones."""
    stages = bundle.stages
    if len(stages) < 2:
        return None
    s = rng.randrange(1, len(stages))
    if rng.random() >= 0.5:
        return bundle.with_stages(stages[:s]), bundle.with_stages(stages[s:])
    order = list(range(len(stages)))
    rng.shuffle(order)
    chosen = set(order[:s])
    parts = ([x for i, x in enumerate(stages) if (i in chosen) is side] for side in (True, False))
    first, second = map(bundle.with_stages, parts)
    return first, second

"""Recipes near a recipe."""

import random
from collections.abc import Sequence

from solvers.columns.chain_column import ChainRecipe
from solvers.columns.machine_kinds import MachineKinds

_SHUFFLED = 0.25  # of the recipes, in another order


def near_recipe(
    recipe: ChainRecipe, kinds: MachineKinds, sizes: Sequence[int], rng: random.Random
) -> ChainRecipe | None:
    """A chain with a machine more or less, or of another kind, wider or narrower, or with micro-batches of one of
    `sizes`; some also in another order, or in another way. None where the draw leaves no chain, or takes too many
    machines."""
    order, width, size = dict(recipe.order), recipe.width, recipe.micro_batch_size
    change = rng.randrange(5)
    if change == 0:  # another kind's machine for one
        _add(order, rng.choice(list(order)), -1)
        _add(order, rng.randrange(len(kinds)), 1)
    elif change < 3:
        _add(order, rng.randrange(len(kinds)), rng.choice((-1, 1)))
    elif change == 3:
        others = [w for w in kinds.widths if w > width][:1] + [w for w in kinds.widths if w < width][-1:]
        width = rng.choice(others or [width])
    else:
        size = rng.choice(sizes)
    if not order or any(not 0 < n <= kinds.supply[k] for k, n in order.items()):
        return None
    parts = list(order.items())
    if rng.random() < _SHUFFLED:
        rng.shuffle(parts)
    degrees = recipe.degrees if rng.random() < 0.5 else ()
    return ChainRecipe(tuple(parts), width, size, degrees, 0 if degrees else rng.choice((0, 0, 1)))


def _add(order: dict[int, int], kind: int, count: int) -> None:
    order[kind] = order.get(kind, 0) + count
    if not order[kind]:
        del order[kind]

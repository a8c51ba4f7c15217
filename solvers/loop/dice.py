"""Random numbers of a walk: xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators",
2016), its state in an array of one number, so that a walk draws the same numbers on any thread."""

from typing import Any

import numpy as np

from solvers.compiled.kernels import entry

_MIX = 0x9E3779B97F4A7C15  # odd, as of splitmix64: unlike seeds for like numbers


def new_dice(seed: int, walk: int) -> Any:
    """The state of the generator of walk number `walk` under `seed`; never 0."""
    mixed = ((seed * 1_000_003 + walk + 1) * _MIX) & (2**64 - 1)
    return np.array([mixed ^ mixed >> 29 or 1], np.uint64)


@entry
def roll(dice: Any, sides: int) -> Any:
    """A whole number from 0 to below `sides`."""
    x = dice[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    dice[0] = x
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33)) % sides


@entry
def chance(dice: Any) -> Any:
    """A number from 0 to below 1."""
    return roll(dice, 1 << 30) / (1 << 30)

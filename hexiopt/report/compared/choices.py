"""Choices as points of time and money, and those that no other beats in both."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A point: seconds per step, and a price or another quantity to be small. `group` gives its colour."""

    name: str
    step_time_s: float
    price: float
    group: str


def unbeaten(choices: Sequence[Choice]) -> list[Choice]:
    """The choices of which none other is at least as fast and as cheap and better in one, fastest first."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.step_time_s, one.price)):
        if not front or choice.price < front[-1].price:
            front.append(choice)
    return front

"""How messages that are under way at once share a network: max-min fairness."""

from collections.abc import Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """What a message needs of a shared resource: the seconds for which it alone would occupy it, and how many messages
    like it cross it at once, itself among them."""

    resource: int
    seconds: float
    flows: int = 1


def fair_rates(needs: Sequence[Sequence[Need]], most: Sequence[float]) -> list[float]:
    """The share of each message that is transferred in a second [messages].

    `needs[k]` has what message k needs of shared resources, at least one; `most[k]` is its highest rate by everything
    that is not shared. All messages get equal time of the resource that each needs longest,
    until a resource is full or a message at its highest rate; these messages keep their rates, and the others get more
    (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2).
    """
    longest = [max(need.seconds for need in message) for message in needs]
    free = {need.resource: 1.0 for message in needs for need in message}
    rates, rising, level = [0.0] * len(needs), list(range(len(needs))), 0.0
    while rising:
        load = dict.fromkeys(free, 0.0)
        for k in rising:
            for resource, seconds, flows in needs[k]:
                load[resource] += flows * seconds / longest[k]
        levels = {resource: free[resource] / load[resource] for resource in free if load[resource] > 0.0}
        full = min(levels, key=levels.__getitem__)
        top = min(most[k] * longest[k] for k in rising)
        level = max(level, min(levels[full], top))  # rounding aside, it only rises
        done = [
            k
            for k in rising
            if (any(need.resource == full for need in needs[k]) if levels[full] <= top else most[k] * longest[k] <= top)
        ]
        for k in done:
            rates[k] = level / longest[k]
            for resource, seconds, flows in needs[k]:
                free[resource] -= flows * rates[k] * seconds
        rising = [k for k in rising if k not in done]
    return rates

"""Which pairs of machines stated links join, and what those links carry together."""

from collections.abc import Mapping, Sequence

from hexiopt.problem.machine import Machine
from hexiopt.problem.network import Link


def unlinked_pair(
    machines: Sequence[Machine], names: Mapping[str, range], links: Sequence[Link]
) -> tuple[str, str] | None:
    """The first machines of which no stated link leads from one to the other; None where links join all pairs."""
    if not links and len(machines) > 1:
        return machines[0].name, machines[1].name
    targets: dict[int, set[int]] = {m: {m} for m in range(len(machines))}
    for link in links:
        for source, target in link.directions():
            for m in names[source]:
                targets[m].update(names[target])
    for m, linked in targets.items():
        if len(linked) < len(machines):
            return machines[m].name, next(other.name for k, other in enumerate(machines) if k not in linked)
    return None


def rates_of_links(machines: Sequence[Machine], names: Mapping[str, range], links: Sequence[Link]) -> dict[str, float]:
    """Bytes/s of all stated links of a machine together, in the direction that has more, by its spec's name.

    An interface of that rate is never slower than the links that share it.
    """
    out, into = [0.0] * len(machines), [0.0] * len(machines)
    for link in links:
        for source, target in link.directions():
            for m in names[source]:
                out[m] += link.bandwidth_bytes_per_s * (len(names[target]) - (m in names[target]))
            for m in names[target]:
                into[m] += link.bandwidth_bytes_per_s * (len(names[source]) - (m in names[source]))
    rates: dict[str, float] = {}
    for machine, *directions in zip(machines, out, into, strict=True):
        rates[machine.spec_name] = max(rates.get(machine.spec_name, 0.0), *directions)
    return rates

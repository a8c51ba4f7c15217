"""The pairs of machines that links join, each at most once, and the total rate of a machine's links."""

from collections.abc import Mapping, Sequence

from hexiopt.errors import FieldError, closest_of_many, quoted
from hexiopt.problem.machine import Machine
from hexiopt.problem.network import Link

MAX_LINK_PAIRS = 4_000_000


def check_links(links: Sequence[Link], machines: Sequence[Machine], names: Mapping[str, range], where: str) -> None:
    """Refuse links of anything but two machines or specs (`names`), a second link of a pair, and too many links.

    Raises FieldError.
    """
    covered = _CoveredPairs(machines)
    num_pairs = 0
    for i, link in enumerate(links):
        source, target = f"{where}: links[{i}].source", f"{where}: links[{i}].target"
        for field, end in ((source, link.source), (target, link.target)):
            if not isinstance(end, str) or end not in names:
                hint = closest_of_many(end, names) if isinstance(end, str) else "write its name"
                raise FieldError(field, end, f"names {quoted(end)}, which is not a machine; {hint}")
        if names[link.source] == names[link.target] and len(names[link.source]) == 1:
            raise FieldError(target, link.target, "links a machine with itself; name two machines")
        for a, b in link.directions():
            num_pairs += len(names[a]) * len(names[b])
            if num_pairs > MAX_LINK_PAIRS:
                rule = f"makes more than {MAX_LINK_PAIRS} linked machine pairs; use groups"
                raise FieldError(source, link.source, rule)
            if covered.add(a, b):
                rule = "covers a pair of machines that already has a link; keep one link"
                raise FieldError(source, link.source, rule)


class _CoveredPairs:
    """The ordered machine pairs that have a link, stored as pairs of names.

    Names are whole specs or single machines, so two pairs of names overlap where both of their ends do. A link between
    a spec and one of its own machines does not cover that machine's pair with itself, so nothing can overlap there.
    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._spec = {machine.name: machine.spec_name for machine in machines}
        self._links: dict[tuple[str, str], _Links] = {}

    def add(self, source: str, target: str) -> bool:
        """Add the pair of names; returns whether any of its machine pairs has been added before."""
        specs = self._spec.get(source, source), self._spec.get(target, target)
        links = self._links.setdefault(specs, _Links())
        ends = source, target
        whole = source == specs[0], target == specs[1]
        if all(whole):
            clash = bool(links.pairs)
        elif not any(whole):
            clash = not links.pairs.isdisjoint({specs, ends, (specs[0], target), (source, specs[1])})
        else:
            single = 1 if whole[0] else 0
            other = links.against_spec[1 - single]
            harmless = specs[0] == specs[1] and ends[single] in other
            clash = specs in links.pairs or ends[single] in links.singles[single] or len(other) > harmless
        links.pairs.add(ends)
        for end in (0, 1):
            if not whole[end]:
                links.singles[end].add(ends[end])
                if whole[1 - end]:
                    links.against_spec[end].add(ends[end])
        return clash


class _Links:
    """The stored pairs of names between two specs: of single machines, and of single machines with a whole spec."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self.singles: tuple[set[str], set[str]] = (set(), set())
        self.against_spec: tuple[set[str], set[str]] = (set(), set())


def unlinked_pair(
    machines: Sequence[Machine], names: Mapping[str, range], links: Sequence[Link]
) -> tuple[str, str] | None:
    """The first pair of machines without a stated link from one to the other; None if links join all pairs."""
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
    """The total bytes/s of a machine's stated links, in the faster direction, by the name of its spec.

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

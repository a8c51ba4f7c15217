"""What a cluster could become: a machine more or less, faster links, and what a price list offers.

Machines are added after the cluster's own and taken away by `Space.exclude`, so a device has one number in all
alternatives, and a plan for one of them is a plan for every other that has its devices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.price_list import Interface, PriceList
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine, machine_names, spec_spans
from hexiopt.problem.network import Group, Link
from hexiopt.problem.nodelist import compress
from hexiopt.problem.problem import Problem
from hexiopt.reading import whole_in
from hexiopt.report.style import rate

MAX_ADDED = 10_000  # machines
BASE, ADD, TAKE, LINK = "as it is", "machine added", "machine taken", "faster links"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A changed problem. `like` is a machine of the base cluster of the kind of which `number` are added or taken."""

    name: str
    change: str
    problem: Problem
    like: int | None = None
    number: int = 0


def with_prices(problem: Problem, prices: PriceList) -> Problem:
    """`problem` with the machines' prices by their GPUs, where they state none."""

    def stated(machine: Machine) -> Machine:
        per_gpu = prices.gpu_prices.get(machine.gpu.type_name)
        if machine.price_per_hour is not None or per_gpu is None:
            return machine
        return machine.replace(price_per_hour=per_gpu * machine.num_gpus)

    return _changed(problem, stated)


@dataclass(frozen=True)
class Wishes:
    """Alternatives that the user states beside those made by rule: sets of machines or devices to `take` away, each
    together, by name; and sets of machines to `add`, each a number by the name of a machine of the cluster or of the
    price list.

    A single set may be given as it is. Raises InputError for other values.
    """

    take: Any = ()
    add: Any = ()

    def __post_init__(self) -> None:
        take = _sets(self.take, str)
        if not all(isinstance(one, Sequence) and all(isinstance(name, str) and name for name in one) for one in take):
            raise InputError(f"whatif.take: {quoted(self.take)} is no list of machines; write [a,b], or [[a],[b,c]]")
        add = _sets(self.add, Mapping)
        if not all(isinstance(one, Mapping) and one for one in add):
            raise InputError(f"whatif.add: {quoted(self.add)} is no number of machines by name; write {{a: 2}}")
        for name, number in (item for one in add for item in one.items()):
            whole_in(number, f"whatif.add: {name}", at_least=1, at_most=MAX_ADDED)
        object.__setattr__(self, "take", tuple((one,) if isinstance(one, str) else tuple(one) for one in take))
        object.__setattr__(self, "add", tuple(add))


def _sets(stated: Any, kind: type) -> Sequence[Any]:
    """The sets in `stated`, which may be a single one: a `kind`, or a list of nothing else than names."""
    if stated is None or isinstance(stated, kind):
        return [] if stated is None else [stated]
    if not isinstance(stated, Sequence):
        return [stated]
    return [stated] if stated and all(isinstance(one, str) for one in stated) else stated


def alternatives(problem: Problem, prices: PriceList, factor: float, wishes: Wishes = Wishes()) -> list[Alternative]:
    """The problem as it is, then its alternatives; of equal ones the first.

    One machine of each kind is added, one is taken, and all; the rates of each kind's interfaces and inner links, of
    every group's uplink and of every stated link are multiplied by `factor`; the machines on offer are added, 1, 2, 4,
    ... up to their number, and slower interfaces are replaced by those on offer; and what `wishes` state. Raises
    InputError for wishes that name no machine, or leave none.
    """
    found = [Alternative(BASE, BASE, problem), *_wished(problem, prices, wishes)]
    made = (_added, _offered, _taken, _faster, _interfaces)
    for alternative in (one for make in made for one in make(problem, prices, factor)):
        if not any(_same(alternative.problem, other.problem) for other in found):
            found.append(alternative)
    return found


def _same(one: Problem, other: Problem) -> bool:
    """Whether two alternatives, which differ in machines and links alone, have the same ones to use."""
    return one.usable_devices == other.usable_devices and one.cluster == other.cluster


def _wished(problem: Problem, prices: PriceList, wishes: Wishes) -> Iterator[Alternative]:
    for names in wishes.take:
        for name in names:
            problem.cluster.devices_named(name, "whatif.take")  # raises InputError
        exclude = tuple(name for name in names if name not in problem.space.exclude)
        left = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *exclude)))
        yield Alternative(f"− {', '.join(names)}", TAKE, left)
    known = {
        **{name: prices.machines[span[0]].replace(name=name) for name, span in spec_spans(prices.machines).items()},
        **{_kind_name(problem, kind): problem.cluster.machines[kind[0]] for kind in _kinds(problem)},
        **{name: problem.cluster.machines[span[0]] for name, span in machine_names(problem.cluster.machines).items()},
    }
    for counts in wishes.add:
        grown: Problem | None = problem
        for name, number in counts.items():
            if name not in known:
                raise InputError(f"whatif.add: {quoted(name)} is no machine; {did_you_mean(str(name), known)}")
            grown = grown and _grown(grown, known[name], number)
        if grown is None:
            raise InputError("whatif.add: the cluster has no network, so nothing can be added; state inter_machine")
        yield Alternative(f"+ {', '.join(f'{number:,} × {name}' for name, number in counts.items())}", ADD, grown)


def _kinds(problem: Problem) -> list[list[int]]:
    """The usable machines by kind."""
    kinds: dict[object, list[int]] = {}
    for m in problem.usable_by_machine:
        kinds.setdefault(problem.cluster.machines[m].kind, []).append(m)
    return list(kinds.values())


def _kind_name(problem: Problem, kind: Sequence[int]) -> str:
    """What the machines of a kind are called in the cluster file: their spec, or a node list of them."""
    machines = [problem.cluster.machines[m] for m in kind]
    if len(specs := dict.fromkeys(machine.spec_name for machine in machines)) == 1:
        return machines[0].spec_name
    return ",".join(compress(specs))


def _words(problem: Problem, kind: Sequence[int]) -> str:
    machine = problem.cluster.machines[kind[0]]
    return f"{_kind_name(problem, kind)} ({machine.num_gpus} × {machine.gpu.name})"


def _added(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for kind in _kinds(problem):
        grown = _grown(problem, problem.cluster.machines[kind[0]], 1)
        if grown is not None:
            yield Alternative(f"+ 1 × {_words(problem, kind)}", ADD, grown, kind[0], 1)


def _offered(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    present = {problem.cluster.machines[kind[0]].kind for kind in _kinds(problem)}
    for name, span in spec_spans(prices.machines).items():
        machine = prices.machines[span[0]].replace(name=name)
        for number in sorted({len(span), *(1 << k for k in range(len(span).bit_length()))}):
            if number == 1 and machine.kind in present:
                continue  # as one more of the cluster's own
            grown = _grown(problem, machine, number)
            if grown is not None:
                words = f"{name} ({machine.num_gpus} × {machine.gpu.name})"
                yield Alternative(f"+ {number:,} × {words}", ADD, grown, None, number)


def _grown(problem: Problem, machine: Machine, number: int) -> Problem | None:
    """The problem with `number` more machines like `machine`, in the group and with the stated links of its spec.

    None where it is unknown how they would be connected.
    """
    cluster, spec = problem.cluster, machine.spec_name
    taken = {name for own in cluster.machines for name in (own.name, own.spec_name)} | {g.name for g in cluster.groups}
    name = next(name for name in (f"{spec}-more{k or ''}" for k in range(len(taken) + 1)) if name not in taken)
    names = [name] if number == 1 else [f"{name}-{k}" for k in range(number)]
    more = tuple(machine.replace(name=one, spec_name=name) for one in names)
    own = {one.name for one in cluster.machines if one.spec_name == spec} | {spec}

    def joined(group: Group) -> Group:
        return replace(group, members=(*group.members, name)) if own & set(group.members) else group

    def copied(link: Link) -> list[Link]:
        if link.source == link.target == spec:
            among = [replace(link, source=name, target=name)] if number > 1 else []
            return [link, replace(link, source=name, target=spec, both=True), *among]
        ends = [name if end == spec else end for end in (link.source, link.target)]
        return [link] if ends == [link.source, link.target] else [link, replace(link, source=ends[0], target=ends[1])]

    try:
        grown = cluster.replace(
            machines=cluster.machines + more,
            groups=tuple(map(joined, cluster.groups)),
            links=tuple(one for link in cluster.links for one in copied(link)),
        )
    except InputError:  # a single machine without a network
        return None
    unstated = math.isinf(cluster.inter_bandwidth_bytes_per_s)
    if unstated and len(cluster.machines) > 1 and cluster.is_linked and not grown.is_linked:
        return None  # parts of a box, which nothing but their links connects
    return problem.replace(cluster=grown)


def _taken(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    if len(problem.usable_by_machine) == 1:
        return
    for kind in _kinds(problem):
        for number in dict.fromkeys((1, len(kind))):
            if number == len(problem.usable_by_machine):
                continue
            gone = tuple(problem.cluster.machines[m].name for m in kind[-number:])
            left = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *gone)))
            every = "all " if number == len(kind) > 1 else ""
            yield Alternative(f"− {every}{number:,} × {_words(problem, kind)}", TAKE, left, kind[-1], number)


def _faster(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    cluster, times = problem.cluster, f"{factor:g} ×"

    def sped(machines: Sequence[int], change: Callable[[Machine], Machine]) -> Problem:
        kind = cluster.machines[machines[0]].kind
        return _changed(problem, lambda machine: change(machine) if machine.kind == kind else machine)

    def nic(machine: Machine) -> Machine:
        return machine.replace(nic_bandwidth_bytes_per_s=factor * machine.nic_bandwidth_bytes_per_s)

    def inside(machine: Machine) -> Machine:
        links = [replace(one, bandwidth_bytes_per_s=factor * one.bandwidth_bytes_per_s) for one in machine.intra_links]
        faster = factor * machine.intra_bandwidth_bytes_per_s
        return machine.replace(intra_bandwidth_bytes_per_s=faster, intra_links=tuple(links))

    several = len(problem.usable_by_machine) > 1
    if several:
        yield Alternative(f"{times} all interfaces", LINK, _changed(problem, nic))
    for same in _kinds(problem):
        if several:
            yield Alternative(f"{times} network of {_words(problem, same)}", LINK, sped(same, nic))
        if cluster.machines[same[0]].num_gpus > 1:
            yield Alternative(f"{times} inside {_words(problem, same)}", LINK, sped(same, inside))
    for g, group in enumerate(cluster.groups):
        faster = replace(group, uplink_bytes_per_s=factor * group.uplink_bytes_per_s)
        groups = (*cluster.groups[:g], faster, *cluster.groups[g + 1 :])
        yield Alternative(f"{times} uplink of {group.name}", LINK, _on(problem, cluster.replace(groups=groups)))
    for k, link in enumerate(cluster.links):
        quick = replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        links = (*cluster.links[:k], quick, *cluster.links[k + 1 :])
        ends = f"{link.source} {'–' if link.both else '→'} {link.target}"
        yield Alternative(f"{times} link {ends}", LINK, _on(problem, cluster.replace(links=links)))


def _interfaces(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for offer in prices.interfaces if len(problem.usable_by_machine) > 1 else ():
        name = f"interfaces {offer.name} ({rate(offer.bandwidth_bytes_per_s)} GB/s)"
        yield Alternative(name, LINK, _changed(problem, partial(_upgraded, offer)))


def _upgraded(offer: Interface, machine: Machine) -> Machine:
    if machine.nic_bandwidth_bytes_per_s >= offer.bandwidth_bytes_per_s:
        return machine
    price = machine.price_per_hour
    return machine.replace(
        nic_bandwidth_bytes_per_s=offer.bandwidth_bytes_per_s,
        nic_latency_s=min(machine.nic_latency_s, offer.latency_s),
        price_per_hour=None if price is None else price + machine.num_interfaces * offer.price_per_hour,
    )


def _changed(problem: Problem, change: Callable[[Machine], Machine]) -> Problem:
    return _on(problem, problem.cluster.replace(machines=tuple(map(change, problem.cluster.machines))))


def _on(problem: Problem, cluster: Cluster) -> Problem:
    return problem.replace(cluster=cluster)

"""Alternatives to a cluster: a machine more or less, faster links, and the offers of a price list.

New machines are appended to the cluster's machines, and machines are removed by `Space.exclude`. So a device has the
same number in all alternatives, and a plan for one is a plan for every other that has its devices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.price_list import Interface, PriceList
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
    """A changed problem. `number` machines are added or removed of the kind of machine `like` of the base cluster."""

    name: str
    change: str
    problem: Problem
    like: int | None = None
    number: int = 0


def with_prices(problem: Problem, prices: PriceList) -> Problem:
    """Price the machines of `problem` that state no price by their GPUs."""

    def add_price(machine: Machine) -> Machine:
        per_gpu = prices.gpu_prices.get(machine.gpu.type_name)
        if machine.price_per_hour is not None or per_gpu is None:
            return machine
        return machine.replace(price_per_hour=per_gpu * machine.num_gpus)

    return _change_machines(problem, add_price)


@dataclass(frozen=True)
class Wishes:
    """Alternatives that the user states, besides those made by rule.

    `take` has sets of names of machines or devices, removed a set at a time; `add` has sets of machines: numbers by
    the name of a machine of the cluster or of the price list. A single set needs no list around it. Raises InputError
    for other values.
    """

    take: Any = ()
    add: Any = ()

    def __post_init__(self) -> None:
        take = _sets(self.take, str)
        if not all(isinstance(s, Sequence) and all(isinstance(name, str) and name for name in s) for s in take):
            raise InputError(f"whatif.take: {quoted(self.take)} is no list of machines; write [a,b], or [[a],[b,c]]")
        add = _sets(self.add, Mapping)
        if not all(isinstance(names, Mapping) and names for names in add):
            raise InputError(f"whatif.add: {quoted(self.add)} is no number of machines by name; write {{a: 2}}")
        for name, number in (item for names in add for item in names.items()):
            whole_in(number, f"whatif.add: {name}", at_least=1, at_most=MAX_ADDED)
        object.__setattr__(self, "take", tuple((names,) if isinstance(names, str) else tuple(names) for names in take))
        object.__setattr__(self, "add", tuple(add))


def _sets(value: Any, kind: type) -> Sequence[Any]:
    """The sets in `value`, which may be a single set: a `kind`, or a list of names only."""
    if value is None or isinstance(value, kind):
        return [] if value is None else [value]
    if not isinstance(value, Sequence):
        return [value]
    return [value] if value and all(isinstance(item, str) for item in value) else value


def alternatives(problem: Problem, prices: PriceList, factor: float, wishes: Wishes = Wishes()) -> list[Alternative]:
    """List the problem as it is, then its alternatives, the first of equal ones.

    They are: the `wishes`; one machine more of each kind; the machines on offer, 1, 2, 4, ... up to their number; one
    machine less of each kind, and all of it; the rates of each kind's interfaces and inner links, of every group's
    uplink and of every stated link times `factor`; and slower interfaces replaced by those on offer. Raises InputError
    for wishes that name no machine, or leave none.
    """
    distinct = [Alternative(BASE, BASE, problem), *_wish(problem, prices, wishes)]
    rules = (_add_one, _add_offers, _remove, _speed_up_links, _upgrade_interfaces)
    for alternative in (candidate for make in rules for candidate in make(problem, prices, factor)):
        if not any(_same(alternative.problem, other.problem) for other in distinct):
            distinct.append(alternative)
    return distinct


def _same(first: Problem, second: Problem) -> bool:
    """Whether two alternatives, which differ in machines and links alone, may use the same ones."""
    return first.usable_devices == second.usable_devices and first.cluster == second.cluster


def _wish(problem: Problem, prices: PriceList, wishes: Wishes) -> Iterator[Alternative]:
    for names in wishes.take:
        for name in names:
            problem.cluster.devices_named(name, "whatif.take")  # raises InputError
        exclude = tuple(name for name in names if name not in problem.space.exclude)
        smaller = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *exclude)))
        yield Alternative(f"− {', '.join(names)}", TAKE, smaller)
    machines = {
        **{name: prices.machines[span[0]].replace(name=name) for name, span in spec_spans(prices.machines).items()},
        **{_kind_name(problem, kind): problem.cluster.machines[kind[0]] for kind in _kinds(problem)},
        **{name: problem.cluster.machines[span[0]] for name, span in machine_names(problem.cluster.machines).items()},
    }
    for counts in wishes.add:
        larger: Problem | None = problem
        for name, number in counts.items():
            if name not in machines:
                raise InputError(f"whatif.add: {quoted(name)} is no machine; {did_you_mean(str(name), machines)}")
            larger = larger and _enlarge(larger, machines[name], number)
        if larger is None:
            raise InputError("whatif.add: the cluster has no network, so nothing can be added; state inter_machine")
        yield Alternative(f"+ {', '.join(f'{number:,} × {name}' for name, number in counts.items())}", ADD, larger)


def _kinds(problem: Problem) -> list[list[int]]:
    """The usable machines by kind, as indices."""
    kinds: dict[object, list[int]] = {}
    for m in problem.usable_by_machine:
        kinds.setdefault(problem.cluster.machines[m].kind, []).append(m)
    return list(kinds.values())


def _kind_name(problem: Problem, kind: Sequence[int]) -> str:
    """The name of a kind of machines in the cluster file: their spec, or a node list of their specs."""
    machines = [problem.cluster.machines[m] for m in kind]
    if len(specs := dict.fromkeys(machine.spec_name for machine in machines)) == 1:
        return machines[0].spec_name
    return ",".join(compress(specs))


def _kind_in_words(problem: Problem, kind: Sequence[int]) -> str:
    machine = problem.cluster.machines[kind[0]]
    return f"{_kind_name(problem, kind)} ({machine.num_gpus} × {machine.gpu.name})"


def _add_one(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for kind in _kinds(problem):
        larger = _enlarge(problem, problem.cluster.machines[kind[0]], 1)
        if larger is not None:
            yield Alternative(f"+ 1 × {_kind_in_words(problem, kind)}", ADD, larger, kind[0], 1)


def _add_offers(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    present = {problem.cluster.machines[kind[0]].kind for kind in _kinds(problem)}
    for name, span in spec_spans(prices.machines).items():
        machine = prices.machines[span[0]].replace(name=name)
        for number in sorted({len(span), *(1 << k for k in range(len(span).bit_length()))}):
            if number == 1 and machine.kind in present:
                continue  # equal to one more machine of the cluster
            larger = _enlarge(problem, machine, number)
            if larger is not None:
                words = f"{name} ({machine.num_gpus} × {machine.gpu.name})"
                yield Alternative(f"+ {number:,} × {words}", ADD, larger, None, number)


def _enlarge(problem: Problem, machine: Machine, number: int) -> Problem | None:
    """Add `number` copies of `machine`, in the group and with the stated links of its spec.

    None where it is unknown how they would be connected.
    """
    cluster, spec = problem.cluster, machine.spec_name
    in_use = {name for m in cluster.machines for name in (m.name, m.spec_name)} | {g.name for g in cluster.groups}
    name = next(name for name in (f"{spec}-more{k or ''}" for k in range(len(in_use) + 1)) if name not in in_use)
    names = [name] if number == 1 else [f"{name}-{k}" for k in range(number)]
    copies = tuple(machine.replace(name=copy, spec_name=name) for copy in names)
    originals = {m.name for m in cluster.machines if m.spec_name == spec} | {spec}

    def join(group: Group) -> Group:
        return replace(group, members=(*group.members, name)) if originals & set(group.members) else group

    def copy_link(link: Link) -> list[Link]:
        if link.source == link.target == spec:
            among = [replace(link, source=name, target=name)] if number > 1 else []
            return [link, replace(link, source=name, target=spec, both=True), *among]
        ends = [name if end == spec else end for end in (link.source, link.target)]
        return [link] if ends == [link.source, link.target] else [link, replace(link, source=ends[0], target=ends[1])]

    try:
        larger = cluster.replace(
            machines=cluster.machines + copies,
            groups=tuple(map(join, cluster.groups)),
            links=tuple(copy for link in cluster.links for copy in copy_link(link)),
        )
    except InputError:  # a single machine without a network
        return None
    unstated = math.isinf(cluster.inter_bandwidth_bytes_per_s)
    if unstated and len(cluster.machines) > 1 and cluster.is_linked and not larger.is_linked:
        return None  # parts of a box, which only their links connect
    return problem.replace(cluster=larger)


def _remove(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    if len(problem.usable_by_machine) == 1:
        return
    for kind in _kinds(problem):
        for number in dict.fromkeys((1, len(kind))):
            if number == len(problem.usable_by_machine):
                continue
            removed = tuple(problem.cluster.machines[m].name for m in kind[-number:])
            smaller = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *removed)))
            every = "all " if number == len(kind) > 1 else ""
            yield Alternative(f"− {every}{number:,} × {_kind_in_words(problem, kind)}", TAKE, smaller, kind[-1], number)


def _speed_up_links(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    cluster, times = problem.cluster, f"{factor:g} ×"

    def change_kind(machines: Sequence[int], change: Callable[[Machine], Machine]) -> Problem:
        kind = cluster.machines[machines[0]].kind
        return _change_machines(problem, lambda machine: change(machine) if machine.kind == kind else machine)

    def nic(machine: Machine) -> Machine:
        return machine.replace(nic_bandwidth_bytes_per_s=factor * machine.nic_bandwidth_bytes_per_s)

    def inside(machine: Machine) -> Machine:
        links = [replace(a, bandwidth_bytes_per_s=factor * a.bandwidth_bytes_per_s) for a in machine.intra_links]
        faster = factor * machine.intra_bandwidth_bytes_per_s
        return machine.replace(intra_bandwidth_bytes_per_s=faster, intra_links=tuple(links))

    several = len(problem.usable_by_machine) > 1
    if several:
        yield Alternative(f"{times} all interfaces", LINK, _change_machines(problem, nic))
    for kind in _kinds(problem):
        if several:
            yield Alternative(f"{times} network of {_kind_in_words(problem, kind)}", LINK, change_kind(kind, nic))
        if cluster.machines[kind[0]].num_gpus > 1:
            yield Alternative(f"{times} inside {_kind_in_words(problem, kind)}", LINK, change_kind(kind, inside))
    for g, group in enumerate(cluster.groups):
        for words, field in (("uplink of", "uplink_bytes_per_s"), ("inside", "shared_bytes_per_s")):
            if (rate := getattr(group, field)) < math.inf:
                faster = replace(group, **{field: factor * rate})
                groups = (*cluster.groups[:g], faster, *cluster.groups[g + 1 :])
                changed = problem.replace(cluster=cluster.replace(groups=groups))
                yield Alternative(f"{times} {words} {group.name}", LINK, changed)
    for k, link in enumerate(cluster.links):
        quick = replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)
        links = (*cluster.links[:k], quick, *cluster.links[k + 1 :])
        ends = f"{link.source} {'–' if link.both else '→'} {link.target}"
        yield Alternative(f"{times} link {ends}", LINK, problem.replace(cluster=cluster.replace(links=links)))


def _upgrade_interfaces(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for offer in prices.interfaces if len(problem.usable_by_machine) > 1 else ():
        name = f"interfaces {offer.name} ({rate(offer.bandwidth_bytes_per_s)} GB/s)"
        yield Alternative(name, LINK, _change_machines(problem, partial(_upgrade, offer)))


def _upgrade(offer: Interface, machine: Machine) -> Machine:
    if machine.nic_bandwidth_bytes_per_s >= offer.bandwidth_bytes_per_s:
        return machine
    price = machine.price_per_hour
    return machine.replace(
        nic_bandwidth_bytes_per_s=offer.bandwidth_bytes_per_s,
        nic_latency_s=min(machine.nic_latency_s, offer.latency_s),
        price_per_hour=None if price is None else price + machine.num_interfaces * offer.price_per_hour,
    )


def _change_machines(problem: Problem, change: Callable[[Machine], Machine]) -> Problem:
    machines = tuple(map(change, problem.cluster.machines))
    return problem.replace(cluster=problem.cluster.replace(machines=machines))

"""What a cluster could become: a machine more or less, faster links, and what a price list offers.

Machines are added after the cluster's own and taken away by `Space.exclude`, so a device has one number in all
alternatives, and a plan for one of them is a plan for every other that has its devices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hexiopt.errors import InputError
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine, spec_spans
from hexiopt.problem.network import Group, Link
from hexiopt.problem.problem import Problem
from hexiopt.readers.price_list import Interface, PriceList
from hexiopt.report.style import rate

BASE, ADD, TAKE, LINK = "as it is", "machine added", "machine taken", "faster links"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A changed problem. `like` is a machine of the base cluster of the kind of which `number` are added or taken."""

    name: str
    change: str
    problem: Problem
    like: int | None = None
    number: int = 0


def priced(problem: Problem, prices: PriceList) -> Problem:
    """`problem` with the machines' prices by their GPUs, where they state none."""

    def stated(machine: Machine) -> Machine:
        per_gpu = prices.gpu_prices.get(machine.gpu.type_name)
        if machine.price_per_hour is not None or per_gpu is None:
            return machine
        return machine.replace(price_per_hour=per_gpu * machine.num_gpus)

    return _changed(problem, stated)


def alternatives(problem: Problem, prices: PriceList, factor: float) -> list[Alternative]:
    """The problem as it is, then its alternatives; of equal ones the first.

    One machine of each kind is added, and taken; the rates of each kind's interfaces and inner links, of every group's
    uplink and of every stated link are multiplied by `factor`; the machines on offer are added, 1, 2, 4, ... up to
    their number, and slower interfaces are replaced by those on offer.
    """
    found = [Alternative(BASE, BASE, problem)]
    made = (_added, _offered, _taken, _faster, _interfaces)
    for alternative in (one for make in made for one in make(problem, prices, factor)):
        if all(alternative.problem != other.problem for other in found):
            found.append(alternative)
    return found


def _kinds(problem: Problem) -> list[list[int]]:
    """The usable machines by kind."""
    kinds: dict[object, list[int]] = {}
    for m in problem.usable_by_machine:
        kinds.setdefault(problem.cluster.machines[m].kind, []).append(m)
    return list(kinds.values())


def _words(problem: Problem, m: int) -> str:
    machine = problem.cluster.machines[m]
    return f"{machine.spec_name} ({machine.num_gpus} × {machine.gpu.name})"


def _added(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for m, *_ in _kinds(problem):
        grown = _grown(problem, problem.cluster.machines[m], 1)
        if grown is not None:
            yield Alternative(f"+ 1 × {_words(problem, m)}", ADD, grown, m, 1)


def _offered(problem: Problem, prices: PriceList, factor: float) -> Iterator[Alternative]:
    for name, span in spec_spans(prices.machines).items():
        machine = prices.machines[span[0]].replace(name=name)
        for number in sorted({len(span), *(1 << k for k in range(len(span).bit_length()))}):
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
    for *_, m in _kinds(problem):
        exclude = (*problem.space.exclude, problem.cluster.machines[m].name)
        left = problem.replace(space=problem.space.replace(exclude=exclude))
        yield Alternative(f"− 1 × {_words(problem, m)}", TAKE, left, m, 1)


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
            yield Alternative(f"{times} network of {_words(problem, same[0])}", LINK, sped(same, nic))
        if cluster.machines[same[0]].num_gpus > 1:
            yield Alternative(f"{times} inside {_words(problem, same[0])}", LINK, sped(same, inside))
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

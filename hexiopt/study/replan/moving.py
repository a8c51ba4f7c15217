"""What a change of plans moves: the states that each device must fetch, from which device, and how long that takes.

A device holds an interval of each unit's parameters, where a unit is a layer, the embedding or the LM head and [0, 1)
all its parameters: rank r of a TP group of t holds weights [r/t, (r+1)/t). Master weights and moments follow, cut under
ZeRO among the holders of the sharding group in equal parts (`StateSharding`). A device keeps what it already holds and
fetches the rest from devices that hold it. Where no remaining device holds a part, training goes back to a checkpoint,
from which every device reads all its states.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from hexiopt.cost.executors.network_load import load_of
from hexiopt.plan.holdings import Holdings, Interval, intervals, sharding_groups
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import largest_shard
from hexiopt.problem.operators import Holder
from hexiopt.problem.problem import Problem
from hexiopt.units import GB

# Assumptions for users who have not measured their own. A file system that all machines share serves each a few GB/s:
# that of Llama 3 sustains 2 TB/s and peaks at 7 TB/s for 2,000 machines of 8 H100s (arXiv 2407.21783, 3.3.1), 1 to 3.5
# each. In two minutes processes end and start, communicators form and layers compile.
CHECKPOINT_GB_PER_S = 2.0
RESTART_S = 120.0

_ROUNDING = 1e-12  # of a unit


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a device fetches from another one, or from a checkpoint where `source` is None."""

    device: int
    source: int | None
    num_bytes: float


@dataclass(frozen=True)
class Moving:
    """The transfers that begin a plan on the devices of `problem`. Between two devices there is at most one.

    `from_checkpoint`: some state is on no remaining device, so that all states come from a checkpoint.
    """

    problem: Problem
    transfers: tuple[Transfer, ...]
    from_checkpoint: bool

    @property
    def num_bytes(self) -> float:
        """Bytes of all transfers."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    def seconds(self, checkpoint_gb_per_s: float | None = None) -> float:
        """A lower bound on the duration in seconds, with all transfers at once: that of the busiest link.

        Transfers between machines load every network resource on their route, those inside one the links of both
        devices. A machine reads a checkpoint at most at `checkpoint_gb_per_s`, and as fast as its interfaces receive.
        """
        cluster, network = self.problem.cluster, self.problem.cluster.network
        between = [(t.source, t.device, t.num_bytes) for t in self.transfers if t.source is not None]
        load, _ = load_of(network, between, receivers=True)
        read: dict[int, float] = defaultdict(float)
        for transfer in self.transfers:
            if transfer.source is None:
                interface = network.receive_interface(transfer.device)
                load[interface] = load.get(interface, 0.0) + transfer.num_bytes / float(network.capacity[interface])
                read[int(cluster.machine_of[transfer.device])] += transfer.num_bytes
        rate = inf if checkpoint_gb_per_s is None else checkpoint_gb_per_s * GB
        return max((*load.values(), *(num_bytes / rate for num_bytes in read.values())), default=0.0)


def moving(old_problem: Problem, old: Plan, problem: Problem, plan: Plan) -> Moving:
    """What `plan` on `problem` must fetch where `old` ran on `old_problem`, which trained the same model.

    Devices are the same where their names are. Devices that `problem` excludes, or whose cluster lacks them, are lost
    with what they held.
    """
    cluster = problem.cluster
    left = {cluster.device_name(device): device for device in problem.usable_devices}
    now = {device: left.get(old_problem.cluster.device_name(device)) for device in old.devices()}
    held = _holdings(old_problem, old)
    wanted = _holdings(problem, plan)
    unit_bytes = _unit_bytes(problem)
    patterns: dict[tuple[tuple[Interval, ...], tuple[Interval, ...]], float] = defaultdict(float)
    for key, wants in wanted.items():
        have = tuple((left_device, a, b) for device, a, b in held[key] if (left_device := now[device]) is not None)
        patterns[have, tuple(wants)] += unit_bytes[key[0], key[2]]
    fetched: list[tuple[int, tuple[int, ...], float]] = []
    for (have, needs), num_bytes in patterns.items():
        for device, sources, part in _missing(have, needs):
            if not sources:
                return restoring(problem, plan)
            fetched.append((device, sources, part * num_bytes))
    return Moving(problem, tuple(_assign_sources(problem, fetched)), from_checkpoint=False)


Key = tuple[Holder, int, bool]  # who holds the unit, its number; weights, or master weights and moments


def _unit_bytes(problem: Problem) -> dict[tuple[Holder, bool], float]:
    """Bytes of a unit of each holder's parameters: weights, frozen ones too, or master weights and moments."""
    parameters, unit_bytes = problem.parameters, defaultdict[tuple[Holder, bool], float](float)
    for group in parameters.trained_groups:
        states = problem.workload.states if group.holder == "layer" else parameters.end_states
        unit_bytes[group.holder, True] += group.params * states.weight
        unit_bytes[group.holder, False] += group.params * states.sharded
    for frozen in parameters.frozen_groups:
        unit_bytes[frozen.group.holder, True] += frozen.bytes_on(largest_shard(problem.model, 1))
    return unit_bytes


def _holdings(problem: Problem, plan: Plan) -> dict[Key, list[Interval]]:
    """Who holds which part of each unit, in the order of the plan."""
    holdings, sharding = Holdings.of(plan.pipelines), plan.sharding
    copy_intervals, groups = list(map(intervals, holdings.devices)), sharding_groups(plan, problem.cluster)
    weights, states = dict[Key, list[Interval]](), dict[Key, list[Interval]]()
    for group, units, copies in holdings.groups(problem.model.parameter_groups):
        whole = [interval for copy in copies for interval in copy_intervals[copy]]
        spread = _shard(whole, groups) if sharding.stage else whole
        weights |= {(group.holder, unit, True): spread if sharding.stage == 3 else whole for unit in units}
        states |= {(group.holder, unit, False): spread for unit in units}
    return weights | states


def _shard(held: Sequence[Interval], groups: Sequence[int] | None) -> list[Interval]:
    """Each part of a unit cut equally among its holders in each sharding group."""
    by_group: dict[int, list[Interval]] = defaultdict(list)
    for device, start, end in held:
        by_group[groups[device] if groups else 0].append((device, start, end))
    pieces = []
    for parts in by_group.values():
        for start, end, devices in _segments(parts):
            step = (end - start) / len(devices)
            pieces += [(device, start + k * step, start + (k + 1) * step) for k, device in enumerate(devices)]
    return pieces


def _segments(held: Iterable[Interval]) -> list[tuple[float, float, tuple[int, ...]]]:
    """The unit cut where any holder's part begins or ends: [start, end) and its holders, in order; only parts held."""
    events: dict[float, tuple[list[int], list[int]]] = {}
    order: dict[int, int] = {}
    for device, start, end in held:
        order.setdefault(device, len(order))
        for at, side in ((start, 0), (end, 1)):
            events.setdefault(round(at / _ROUNDING) * _ROUNDING, ([], []))[side].append(device)
    segments, active, before = [], dict[int, int](), 0.0
    for at in sorted(events):
        if active and at > before:
            segments.append((before, at, tuple(sorted(active, key=order.__getitem__))))
        begins, ends = events[at]
        for device in ends:
            active[device] -= 1
            if not active[device]:
                del active[device]
        for device in begins:
            active[device] = active.get(device, 0) + 1
        before = at
    return segments


def _missing(have: Sequence[Interval], needs: Sequence[Interval]) -> list[tuple[int, tuple[int, ...], float]]:
    """What devices need and do not hold: device, who holds it (none: nobody), and the part of the unit."""
    segments = _segments(have)
    starts = [start for start, _, _ in segments]
    missing: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    for device, start, end in needs:
        at = start
        k = max(0, bisect_right(starts, start + _ROUNDING) - 1)
        while at < end - 2 * _ROUNDING:
            if k < len(segments) and segments[k][1] <= at + _ROUNDING:
                k += 1
                continue
            first, last, holders = segments[k] if k < len(segments) else (end, end, ())
            if first > at + _ROUNDING:  # a gap that nobody holds
                last, holders = min(first, end), ()
            until = min(last, end)
            if device not in holders:
                missing[device, holders] += until - at
            at = until
    return [(device, holders, part) for (device, holders), part in missing.items()]


def restoring(problem: Problem, plan: Plan) -> Moving:
    """What `plan` reads from a checkpoint, where training goes back to one."""
    unit_bytes = _unit_bytes(problem)
    read: dict[int, float] = defaultdict(float)
    for (holder, _, weights), needs in _holdings(problem, plan).items():
        for device, start, end in needs:
            read[device] += (end - start) * unit_bytes[holder, weights]
    transfers = tuple(Transfer(device, None, num_bytes) for device, num_bytes in read.items())
    return Moving(problem, transfers, from_checkpoint=True)


def _assign_sources(problem: Problem, fetched: Iterable[tuple[int, tuple[int, ...], float]]) -> list[Transfer]:
    """A source for every part: in the same machine where one is, else the least loaded interface; large parts first."""
    cluster, network = problem.cluster, problem.cluster.network
    machine_of = cluster.machine_of
    load: dict[tuple[bool, int], float] = defaultdict(float)  # seconds of devices inside, and of interfaces
    chosen: dict[tuple[int, int], float] = defaultdict(float)
    wishes: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    for device, sources, num_bytes in fetched:
        wishes[device, sources] += num_bytes
    for (device, sources), num_bytes in sorted(wishes.items(), key=lambda item: (-item[1], item[0])):
        near = [peer for peer in sources if machine_of[peer] == machine_of[device]]
        if near:
            source = min(near, key=lambda peer: (load[True, peer], peer))
            load[True, source] += num_bytes
        else:
            source = min(sources, key=lambda peer: (load[False, network.transmit_interface(peer)], peer))
            interface = network.transmit_interface(source)
            load[False, interface] += num_bytes / float(network.capacity[interface])
        chosen[device, source] += num_bytes
    return [Transfer(device, source, num_bytes) for (device, source), num_bytes in chosen.items()]

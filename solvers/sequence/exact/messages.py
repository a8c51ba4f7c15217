"""Messages in the CP-SAT model of one skeleton: all-to-alls within groups, and keys and values from group to group.

Where heads are free and two consecutive groups have several devices each, the receivers are unknown. A message then
loads only the resources that it uses for every possible receiver, or sender.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from ortools.sat.python import cp_model

from hexiopt.cost.executors.network_load import LinkLoads
from solvers.sequence.exact.variables import Sum, Variables


@dataclass(frozen=True)
class RingMessage:
    """A ring message: the `ends` (places) that it joins, its `way` as (resource, seconds per byte), and whose key-value
    heads it carries: those of `place`, or the number `kv_heads` where that is known.
    """

    ends: tuple[int, ...]
    way: tuple[tuple[int, float], ...]
    latency_s: float
    place: int
    kv_heads: int | None


class SkeletonMessages:
    """The messages of the skeleton of `variables`; `sharers` as the `users` of `SequenceStage`.

    `exchange_s` holds, by the names used there, the seconds of the all-to-alls of every group.
    """

    def __init__(self, variables: Variables, sharers: Mapping[int, int]) -> None:
        self._v, self._sharers = variables, sharers
        self._cluster = variables.grid.problem.cluster
        places = variables.places
        self.exchange_s = self._all_to_alls() if any(len(own) > 1 for own in places) else {}
        self._flows = self._ring_flows() if len(places) > 1 else []

    def _all_to_alls(self) -> dict[str, list[cp_model.IntVar]]:
        """Seconds of the all-to-alls of every group."""
        many = self._v.grid.resolution
        pairs = [(a, b) for own in self._v.places for a, b in product(own, own) if a != b]
        senders, receivers = (np.array([self._v.devices[pair[end]] for pair in pairs]) for end in (0, 1))
        links = LinkLoads.of(self._cluster, senders, receivers).split(self._sharers)
        found = {}
        for name, of_kv, back in (
            ("qkv", 2.0, False),
            ("qkv_back", 2.0, True),
            ("out", 0.0, False),
            ("out_back", 0.0, True),
        ):
            loads: dict[int, list[Sum]] = {}
            for (a, b), row, rates in zip(pairs, links.resource.tolist(), links.s_per_byte.tolist(), strict=True):
                tokens, heads = (b, a) if back else (a, b)
                for r, rate in zip(row, rates, strict=True):
                    if rate > 0.0:
                        byte = rate * self._v.grid.head_bytes
                        amount = self._v.times_heads(
                            self._v.quanta[tokens], many, heads, byte, of_kv * byte, self._v.units
                        )
                        loads.setdefault(r, []).append(amount)
            seconds = [self._v.time() for _ in self._v.places]
            latencies: dict[tuple[int, int], float] = {}
            for (a, _), row, rates, wait in zip(
                pairs, links.resource.tolist(), links.s_per_byte.tolist(), links.latency_s.tolist(), strict=True
            ):
                for r, rate in zip(row, rates, strict=True):
                    if rate > 0.0:
                        key = (self._v.group_of[a], r)
                        latencies[key] = max(latencies.get(key, 0.0), wait)
            for (g, r), wait in latencies.items():
                self._v.model.add(seconds[g] >= sum(loads[r]) + self._v.units(wait))
            found[name] = seconds
        return found

    def _ring_flows(self) -> list[list[list[RingMessage]]]:
        """Ring messages from each group to the next [views, groups].

        One view where the rings are known; otherwise one of what is sent, whoever receives it, and one of what is
        received, whoever sent it.
        """
        count = len(self._v.places)
        if self._v.fixed is not None:
            rows = self._v.rings.place
            known = [
                [
                    self._flow([(int(a), int(b))], (int(a), int(b)), int(a), int(kv))
                    for a, b, kv in zip(rows[g], rows[(g + 1) % count], self._v.rings.kv_heads, strict=True)
                ]
                for g in range(count)
            ]
            return [known]
        views: list[list[list[RingMessage]]] = [[], []]
        for g, own in enumerate(self._v.places):
            others = self._v.places[(g + 1) % count]
            certain = None
            if len(own) == 1 or len(others) == 1:
                certain = [
                    self._flow([(a, b)], (a, b), a if len(others) == 1 else b, None) for a, b in product(own, others)
                ]
            views[0].append(certain or [self._flow([(a, b) for b in others], (a,), a, None) for a in own])
            views[1].append(certain or [self._flow([(a, b) for a in own], (b,), b, None) for b in others])
        return views[:1] if views[0] == views[1] else views

    def _flow(
        self, pairs: Sequence[tuple[int, int]], ends: tuple[int, ...], place: int, kv_heads: int | None
    ) -> RingMessage:
        """The message with the resources that all `pairs` use."""
        senders, receivers = (np.array([self._v.devices[pair[end]] for pair in pairs]) for end in (0, 1))
        network = self._cluster.network.num_resources
        size = self._cluster.num_devices
        common: dict[int, float] | None = None
        links = LinkLoads.of(self._cluster, senders, receivers).split(self._sharers)
        machine_of = self._cluster.machine_of
        for k, (a, b) in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
            inside = machine_of[a] == machine_of[b]
            own: dict[int, float] = {}
            for r, rate in zip(links.resource[k].tolist(), links.s_per_byte[k].tolist(), strict=True):
                number = int(links.network[r])
                if rate > 0.0 and number >= 0:
                    own[number] = rate
            if inside:
                rates = links.s_per_byte[k].tolist()
                own = {network + a: rates[0], network + size + b: rates[1]}
            common = own if common is None else {r: min(rate, common[r]) for r, rate in own.items() if r in common}
        return RingMessage(ends, tuple((common or {}).items()), float(links.latency_s.min()), place, kv_heads)

    def times(self, moved: Sequence[Sequence[int]]) -> list[tuple[RingMessage, cp_model.IntVar]]:
        """Seconds of the messages of one turn, in which each group sends the keys and values of the groups `moved`."""
        many, found = self._v.grid.resolution, []
        for view in self._flows:
            loads: dict[int, list[Sum]] = {}
            for flows, sources in zip(view, moved, strict=True):
                for flow in flows:
                    for r, rate in flow.way:
                        byte = 2.0 * self._v.grid.head_bytes * rate
                        for s in sources:
                            tokens = self._v.group_quanta[s]
                            if flow.kv_heads is not None:
                                amount: Sum = self._v.units(byte * flow.kv_heads) * tokens
                            else:
                                amount = self._v.times_heads(tokens, many, flow.place, 0.0, byte, self._v.units)
                            loads.setdefault(r, []).append(amount)
            totals = {r: self._v.largest([sum(parts)]) for r, parts in loads.items()}
            for flows, sources in zip(view, moved, strict=True):
                for flow in flows:
                    if sources:
                        time = self._v.time()
                        self._v.model.add(time >= self._v.units(flow.latency_s))
                        for r, _ in flow.way:
                            self._v.model.add(time >= totals[r] + self._v.units(flow.latency_s))
                        found.append((flow, time))
        return found

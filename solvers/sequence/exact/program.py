"""The CP-SAT model of one frame: tokens and heads of its devices, at least forward and backward time, within memory.

The frame says which devices form which group, in which order, under which policy. Time runs along phases as in
`hexiopt/cost/sequence_times.py`, each as a constraint "not before". With heads given, the model is the cost model but
for rounding down. With heads free, it is so too where the rings are known beforehand, and else a relaxation: key-value
heads count as fractions of query heads, and a message between two groups of several devices loads only what it crosses
whoever its receiver, or sender, is.

All numbers are whole: seconds in units of 2^-40 of the limit asked about, rounded down, so that the objective never
exceeds the true time and falls behind it by less than 1e-7.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from ortools.sat.python import cp_model

from hexiopt.cost import coefficients as c
from hexiopt.cost.wires import Wires
from hexiopt.sequence import Floats, RingTurns, kv_heads_of, members, ring_holders, uneven_kv_copies
from solvers.sequence.exact.frames import Frame, alike
from solvers.sequence.exact.grid import Grid, Term

_UNITS = 2**40
_Int = cp_model.LinearExpr | int


@dataclass(frozen=True)
class Need:
    """What a stage needs beside its frame: micro-batches in flight, bytes of states of each device, by how many a
    resource of the network is shared."""

    held: int
    states_bytes: tuple[tuple[int, float], ...]
    sharers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Choice:
    """Quanta and heads of the devices of a frame, in its order; and the model's time, at most the true one."""

    quanta: tuple[int, ...]
    heads: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Flow:
    """A message that goes with the tokens of a group: between `ends` (places), over resources [(number, seconds a
    byte)], with the key-value heads of a place, or so many."""

    ends: tuple[int, ...]
    way: tuple[tuple[int, float], ...]
    latency_s: float
    place: int
    kv_heads: int | None


class Program:
    """The model of a `frame` for less than `limit_s` seconds, forward and backward; `heads` where they are given."""

    def __init__(
        self,
        grid: Grid,
        frame: Frame,
        need: Need,
        limit_s: float,
        heads: Sequence[int] | None = None,
        *,
        memory: bool = True,
    ) -> None:
        self._grid, self._frame, self._need = grid, frame, need
        self._unit_s = limit_s / _UNITS
        self._limit = _UNITS - 1
        self._spec, self._cluster = grid.problem.model, grid.problem.cluster
        self._devices = frame.devices
        self._gpus = [grid.gpu(d) for d in self._devices]
        self._group_of = [g for g, own in enumerate(frame.groups) for _ in own]
        self._places = [[k for k, of in enumerate(self._group_of) if of == g] for g in range(len(frame.groups))]
        self._each = self._spec.num_heads // self._spec.num_kv_heads
        self._model = cp_model.CpModel()
        self._products: dict[tuple[int, int], cp_model.IntVar] = {}
        self._fixed = None if heads is None else tuple(heads)
        own = members(frame.layout([1] * len(self._devices), heads or self._any_heads()))
        self._rings = ring_holders(own, self._spec.num_heads, self._spec.num_kv_heads)
        self._kv = kv_heads_of(own, self._spec.num_heads, self._spec.num_kv_heads)
        self._copies = uneven_kv_copies(own, self._kv, self._spec.num_heads, self._spec.num_kv_heads)

        # Step 1, variables: quanta and heads of every device, quanta of every group.
        many = grid.resolution
        self.quanta = [self._model.new_int_var(1, many, f"quanta_{d}") for d in self._devices]
        self.group_quanta = [
            self._model.new_int_var(len(own), many, f"group_{g}") for g, own in enumerate(self._places)
        ]
        self.heads = (
            None if heads else [self._model.new_int_var(1, self._spec.num_heads, f"heads_{d}") for d in self._devices]
        )

        # Step 2, constraints. Devices have the quanta of their group, groups all there are, their devices all heads.
        for g, places in enumerate(self._places):
            self._model.add(self.group_quanta[g] == sum(self.quanta[k] for k in places))
            if self.heads is not None:
                self._model.add(sum(self.heads[k] for k in places) == self._spec.num_heads)
        self._model.add(sum(self.group_quanta) == many)
        if self.heads is not None:
            self._order_equals()
        if memory:
            self._fit_memory()
        self._turns = RingTurns(
            members(frame.layout([2] * len(self._devices), heads or self._any_heads())), frame.order
        )
        self._exchange_s = self._exchanges() if any(len(own) > 1 for own in self._places) else {}
        self._flows = self._ring_flows() if len(self._places) > 1 else []

        # Step 3, objective: all layers forward and backward, and what the two ends of the model add.
        host_s = grid.framework.layer_host_s
        again_s = host_s if frame.policy == "full" else 0.0
        layer = self._phase_end(self._forward(), host_s) + self._phase_end(self._backward(), host_s + again_s)
        ends = [
            self._largest([self._table(k, grid.ends(gpu)[row]) for k, gpu in enumerate(self._gpus)]) for row in range(4)
        ]
        self._model.add(self._spec.num_layers * layer + sum(ends) <= self._limit)
        self._objective = self._spec.num_layers * layer + sum(ends)
        self._model.minimize(self._objective)

    # ---------------------------------------------------------------- asking

    def below(self, limit_s: float) -> None:
        """Ask for less time from now on."""
        self._model.add(self._objective <= self._units(limit_s))

    def refute_heads(self, heads: Sequence[int]) -> None:
        """Leave these heads out."""
        assert self.heads is not None
        self._refuted([(self.heads, heads)])

    def refute(self, quanta: Sequence[int]) -> None:
        """Leave this choice of quanta out."""
        self._refuted([(self.quanta, quanta)])

    def _refuted(self, rows: Sequence[tuple[Sequence[cp_model.IntVar], Sequence[int]]]) -> None:
        differ = []
        for variables, values in rows:
            for variable, value in zip(variables, values, strict=True):
                literal = self._model.new_bool_var("")
                self._model.add(variable != value).only_enforce_if(literal)
                differ.append(literal)
        self._model.add_bool_or(differ)

    def least(self, seconds: float, deterministic_s: float) -> tuple[Choice | None, bool]:
        """The choice of least time, and whether that is proven; None and True: there is none within the limit."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = deterministic_s
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
        status = solver.solve(self._model)
        if status == cp_model.INFEASIBLE:
            return None, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, False
        chosen = self._fixed or tuple(solver.value(h) for h in self.heads or ())
        least_s = solver.best_objective_bound * self._unit_s
        return Choice(tuple(solver.value(t) for t in self.quanta), chosen, least_s), status == cp_model.OPTIMAL

    # ---------------------------------------------------------------- small parts

    def _any_heads(self) -> list[int]:
        """Some heads, where they are free and what is asked does not depend on them."""
        return [n for own in self._frame.groups for n in [*[1] * (len(own) - 1), self._spec.num_heads - len(own) + 1]]

    def _units(self, seconds: float) -> int:
        return int(seconds / self._unit_s)

    def _time(self) -> cp_model.IntVar:
        return self._model.new_int_var(0, self._limit, "")

    def _product(self, a: cp_model.IntVar, b: cp_model.IntVar, most: int) -> cp_model.IntVar:
        key = (min(a.index, b.index), max(a.index, b.index))
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self._model.new_int_var(1, most, "")
            self._model.add_multiplication_equality(found, [a, b])
        return found

    def _times_heads(
        self, amount: cp_model.IntVar, most: int, k: int, of_head: float, of_kv: float, whole: Callable[[float], int]
    ) -> _Int:
        """`amount` times what each query head and each key-value head of place k counts, in whole numbers."""
        if self._fixed is not None:
            return whole(of_head * self._fixed[k] + of_kv * int(self._kv[k])) * amount
        assert self.heads is not None
        return whole(of_head + of_kv / self._each) * self._product(amount, self.heads[k], most * self._spec.num_heads)

    def _table(self, k: int, seconds: Floats) -> cp_model.IntVar:
        """Seconds by the quanta of place k."""
        found = self._time()
        self._model.add_element(self.quanta[k], [min(self._units(s), self._limit + 1) for s in seconds.tolist()], found)
        return found

    def _largest(self, times: Sequence[_Int]) -> cp_model.IntVar:
        found = self._time()
        for time in times:
            self._model.add(found >= time)
        return found

    def _phase_end(self, now: Sequence[_Int], floor_s: float) -> cp_model.IntVar:
        found = self._largest(now)
        if floor_s:
            self._model.add(found >= self._units(floor_s))
        return found

    def _order_equals(self) -> None:
        """Of devices of a group that could change places, the first have most quanta."""
        states = dict(self._need.states_bytes)
        for places in self._places:
            for a, b in pairwise(places):
                if alike(self._grid.problem, *(self._devices[k] for k in (a, b))) and (
                    states[self._devices[a]] == states[self._devices[b]]
                ):
                    self._model.add(self.quanta[a] >= self.quanta[b])

    # ---------------------------------------------------------------- memory

    def _fit_memory(self) -> None:
        grid, many = self._grid, self._grid.resolution
        width, dim = grid.problem.workload.element_bytes, self._spec.head_dim
        largest = self._model.new_int_var(1, many, "largest")
        for total in self.group_quanta:
            self._model.add(largest >= total)
        states = dict(self._need.states_bytes)
        quantum = float(grid.size * grid.quantum)
        for k, (d, gpu) in enumerate(zip(self._devices, self._gpus, strict=True)):
            g = self._group_of[k]
            parted, ringed = len(self._places[g]) > 1, len(self._places) > 1
            each = grid.bytes_of(gpu, self._frame.policy, self._need.held, parted)
            room = int(gpu.usable_memory_bytes - states[d] - c.COMMUNICATOR_BYTES) + 1
            for variant in range(2):
                moves = each.travelling[variant]
                own = each.own[variant]
                head, kv_head = each.head[variant], each.kv_head[variant]
                if parted:
                    own += moves * dim * width * quantum * (self._spec.num_heads + 2 * self._spec.num_kv_heads)
                    head += moves * dim * width * quantum
                    kv_head += moves * dim * width * quantum * 2
                extra: _Int = 0
                if ringed:
                    head += moves * quantum * dim * c.ACCUMULATOR_BYTES
                    block = moves * 4.0 * quantum * 2 * dim * width
                    if self._fixed is not None:
                        rings = np.add.reduceat(np.tile(self._rings.kv_heads, len(self._places)), self._rings.starts)
                        extra = int(block * int(rings[k])) * largest
                    else:
                        kv_head += block
                if self._fixed is not None:
                    extra += int(each.copy[variant] * int(self._copies[k])) * self.group_quanta[g]
                self._model.add(
                    int(own) * self.quanta[k]
                    + self._times_heads(self.group_quanta[g], many, k, head, kv_head, int)
                    + extra
                    <= room
                )

    # ---------------------------------------------------------------- messages

    def _exchanges(self) -> dict[str, list[cp_model.IntVar]]:
        """Seconds of the all-to-alls of every group."""
        many = self._grid.resolution
        pairs = [(a, b) for own in self._places for a, b in product(own, own) if a != b]
        senders, receivers = (np.array([self._devices[pair[end]] for pair in pairs]) for end in (0, 1))
        wires = Wires.of(self._cluster, senders, receivers).crowded(dict(self._need.sharers))
        found = {}
        for name, of_kv, back in (
            ("qkv", 2.0, False),
            ("qkv_back", 2.0, True),
            ("out", 0.0, False),
            ("out_back", 0.0, True),
        ):
            loads: dict[int, list[_Int]] = {}
            for (a, b), row, rates in zip(pairs, wires.resource.tolist(), wires.s_per_byte.tolist(), strict=True):
                tokens, heads = (b, a) if back else (a, b)
                for r, rate in zip(row, rates, strict=True):
                    if rate > 0.0:
                        byte = rate * self._grid.head_bytes
                        amount = self._times_heads(self.quanta[tokens], many, heads, byte, of_kv * byte, self._units)
                        loads.setdefault(r, []).append(amount)
            seconds = [self._time() for _ in self._places]
            latencies: dict[tuple[int, int], float] = {}
            for (a, _), row, rates, wait in zip(
                pairs, wires.resource.tolist(), wires.s_per_byte.tolist(), wires.latency_s.tolist(), strict=True
            ):
                for r, rate in zip(row, rates, strict=True):
                    if rate > 0.0:
                        key = (self._group_of[a], r)
                        latencies[key] = max(latencies.get(key, 0.0), wait)
            for (g, r), wait in latencies.items():
                self._model.add(seconds[g] >= sum(loads[r]) + self._units(wait))
            found[name] = seconds
        return found

    def _ring_flows(self) -> list[list[list[_Flow]]]:
        """What goes from each group to the next [views, groups]: one view where the rings are known; else what is sent
        whoever receives it, and what is received whoever sent it."""
        count = len(self._places)
        if self._fixed is not None:
            rows = self._rings.place
            known = [
                [
                    self._flow([(int(a), int(b))], (int(a), int(b)), int(a), int(kv))
                    for a, b, kv in zip(rows[g], rows[(g + 1) % count], self._rings.kv_heads, strict=True)
                ]
                for g in range(count)
            ]
            return [known]
        views: list[list[list[_Flow]]] = [[], []]
        for g, own in enumerate(self._places):
            others = self._places[(g + 1) % count]
            certain = None
            if len(own) == 1 or len(others) == 1:
                certain = [
                    self._flow([(a, b)], (a, b), a if len(others) == 1 else b, None) for a, b in product(own, others)
                ]
            views[0].append(certain or [self._flow([(a, b) for b in others], (a,), a, None) for a in own])
            views[1].append(certain or [self._flow([(a, b) for a in own], (b,), b, None) for b in others])
        return views[:1] if views[0] == views[1] else views

    def _flow(self, pairs: Sequence[tuple[int, int]], ends: tuple[int, ...], place: int, kv_heads: int | None) -> _Flow:
        """What all of the pairs load."""
        senders, receivers = (np.array([self._devices[pair[end]] for pair in pairs]) for end in (0, 1))
        network = self._cluster.network.num_resources
        size = self._cluster.num_devices
        sharers = dict(self._need.sharers)
        common: dict[int, float] | None = None
        wires = Wires.of(self._cluster, senders, receivers).crowded(sharers)
        machine_of = self._cluster.machine_of
        for k, (a, b) in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
            inside = machine_of[a] == machine_of[b]
            own: dict[int, float] = {}
            for r, rate in zip(wires.resource[k].tolist(), wires.s_per_byte[k].tolist(), strict=True):
                number = int(wires.network[r])
                if rate > 0.0 and number >= 0:
                    own[number] = rate
            if inside:
                rates = wires.s_per_byte[k].tolist()
                own = {network + a: rates[0], network + size + b: rates[1]}
            common = own if common is None else {r: min(rate, common[r]) for r, rate in own.items() if r in common}
        return _Flow(ends, tuple((common or {}).items()), float(wires.latency_s.min()), place, kv_heads)

    def _message_times(self, moved: Sequence[Sequence[int]]) -> list[tuple[_Flow, cp_model.IntVar]]:
        """Seconds of the messages of a turn, in which each group sends the keys and values of the groups `moved`."""
        many, found = self._grid.resolution, []
        for view in self._flows:
            loads: dict[int, list[_Int]] = {}
            for flows, sources in zip(view, moved, strict=True):
                for flow in flows:
                    for r, rate in flow.way:
                        byte = 2.0 * self._grid.head_bytes * rate
                        for s in sources:
                            tokens = self.group_quanta[s]
                            if flow.kv_heads is not None:
                                amount: _Int = self._units(byte * flow.kv_heads) * tokens
                            else:
                                amount = self._times_heads(tokens, many, flow.place, 0.0, byte, self._units)
                            loads.setdefault(r, []).append(amount)
            totals = {r: self._largest([sum(parts)]) for r, parts in loads.items()}
            for flows, sources in zip(view, moved, strict=True):
                for flow in flows:
                    if sources:
                        time = self._time()
                        self._model.add(time >= self._units(flow.latency_s))
                        for r, _ in flow.way:
                            self._model.add(time >= totals[r] + self._units(flow.latency_s))
                        found.append((flow, time))
        return found

    # ---------------------------------------------------------------- phases

    def _forward(self) -> list[_Int]:
        return self._forward_from([0] * len(self._devices), again=False)

    def _forward_from(self, now: list[_Int], again: bool) -> list[_Int]:
        now = self._worked(now, "before_s")
        now = self._exchanged(now, "qkv")
        now = self._ringed(now, backward=False)
        now = self._exchanged(now, "out_back")
        return self._worked(now, "after_again_s" if again else "after_s")

    def _backward(self) -> list[_Int]:
        now: list[_Int] = [0] * len(self._devices)
        if self._frame.policy == "full":
            now = self._forward_from(now, again=True)
        now = self._worked(now, "after_back_s")
        now = self._exchanged(now, "out")
        if self._frame.policy == "selective":
            now = self._ringed(now, backward=False)
        now = self._ringed(now, backward=True)
        now = self._exchanged(now, "qkv_back")
        return self._worked(now, "before_back_s")

    def _worked(self, now: list[_Int], part: str) -> list[_Int]:
        tables = [getattr(self._grid.dense(gpu), part) for gpu in self._gpus]
        return [begun + self._table(k, table) for k, (begun, table) in enumerate(zip(now, tables, strict=True))]

    def _exchanged(self, now: list[_Int], name: str) -> list[_Int]:
        found = list(now)
        for g, places in enumerate(self._places):
            if len(places) > 1:
                ready = self._largest([now[k] + self._exchange_s[name][g] for k in places])
                for k in places:
                    found[k] = ready
        return found

    def _ringed(self, now: list[_Int], backward: bool) -> list[_Int]:
        count = len(self._places)
        several = count > 1
        turns = np.arange(count + (backward and several))
        causal, whole, kernels, rows = self._turns.blocks(np.arange(count))
        sizes = self._turns.tokens.astype(float)
        last_turn = self._turns.last_turn()
        for turn in turns.tolist():
            source = [(g - turn) % count for g in range(count)]
            ended: list[cp_model.IntVar] = []
            for k in range(len(self._devices)):
                g, s = self._group_of[k], source[self._group_of[k]]
                computed: _Int = 0
                if turn < count and kernels[turn, g]:
                    pairs = float(sizes[g] * sizes[s])
                    computed = self._attended(
                        k,
                        g,
                        s,
                        backward,
                        causal[turn, g] / pairs,
                        whole[turn, g] / pairs,
                        kernels[turn, g],
                        rows[turn, g] / sizes[g],
                    )
                end = self._time()
                self._model.add(end >= now[k] + computed)
                ended.append(end)
            if several:
                moved = []
                for g in range(count):
                    own = [source[g]] if turn < last_turn[source[g]] else []
                    if backward and turn:
                        own.append((g - turn + 1) % count)
                    moved.append(own)
                for flow, time in self._message_times(moved):
                    for a, b in product(flow.ends, flow.ends):
                        self._model.add(ended[a] >= now[b] + time)
            now = list(ended)
        return now

    def _attended(
        self, k: int, g: int, s: int, backward: bool, causal: float, whole: float, kernels: float, rows: float
    ) -> _Int:
        """Attention of place k at a turn, for the parts of its group's quanta times those of the source that count; and
        what sums up its parts, for the part `rows` of its group's quanta."""
        many, gpu = self._grid.resolution, self._gpus[k]
        pairs = self._product(self.group_quanta[g], self.group_quanta[s], many**2)
        found: list[_Int] = []
        for term, hidden_too in self._grid.attention(gpu, backward):
            slope = term.slope_s * (whole if hidden_too else causal)
            amount = self._times_heads(pairs, many**2, k, slope, 0.0, self._units)
            found.append(self._at_least(term, kernels, amount))
        if len(self._places) > 1:
            term, key_s = self._grid.merging(gpu, backward)
            amount = self._times_heads(self.group_quanta[g], many, k, term.slope_s * rows, 0.0, self._units)
            if key_s:
                amount += self._times_heads(self.group_quanta[s], many, k, 0.0, key_s, self._units)
            found.append(self._at_least(term, 1.0, amount))
        return sum(found)

    def _at_least(self, term: Term, kernels: float, amount: _Int) -> cp_model.IntVar:
        found = self._time()
        self._model.add(found >= self._units(term.launch_s * kernels))
        self._model.add(found >= amount)
        return found

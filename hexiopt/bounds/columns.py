"""The linear program over the chains found so far: the most sequences that they process in T seconds, and its duals.

In addition to devices, a chain uses layer slots of its machines, because layers held by several machines cost time. Let
h be the number of machines that hold a layer. Gradient sync carries (h − 1)/h of the layer's gradients through the
interface of each of them in each direction (`rings.py`, `lockstep.py`). So for a machine that holds a layers

    o = Σ 1/h,  s = a − o:   its interface syncs for s · interface_s seconds, and Σ o over all machines = L, the layers.

Every stage with a layer that another machine also holds waits for all of that after its last backward. Machines are
divided into *modes* by their s. Per kind and mode, with y machines and O = Σ o over them,

    devices:  Σ t / x       ≤ devices a machine · y
    slots:    Σ n M / B     ≤ O + most s · y      since a layer in a machine processes the batch at most once
    longest:  Σ t/x/devices · (n, or n − most s if it shares layers)  ≤ O      since o ≥ n − s for the longest stage
    modes:    Σ y ≤ machines of the kind,   ΣΣ O ≤ L

summed over chains, each one sequence of a micro-batch, and their stages of n layers. Likewise, replicas that hold a
layer wait for its ring on their own links, unless they are few: Σ 1/replicas ≤ L over all stages and layers
(*holders*).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.box_stages import Multipliers, stage_prices, sync_room_s
from hexiopt.bounds.chains import Chain
from hexiopt.bounds.stages import StageTypes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_LOW = 0.8  # share of the batch that the cluster is worth at the first prices
_SHARED = (0, 1, 3, 6, 12, 23, 46, 92)  # bounds of modes, layers


class Modes:
    """Machine modes by the number of layers that a machine shares with others, `least` to `most` [modes]."""

    def __init__(self, types: StageTypes) -> None:
        bounds = [n for n in _SHARED if n < types.num_layers]
        self.least: Floats = np.array(bounds, float)
        self.most: Floats = np.array([*bounds[1:], types.num_layers], float)
        self.tail_s: Floats = types.interface_s[:, None] * self.least  # [kinds, modes]

    def __len__(self) -> int:
        return len(self.least)


@dataclass(frozen=True, slots=True)
class BoundColumn:
    """A chain with the mode of each stage's machine, and whether the stage shares layers with other machines."""

    chain: Chain
    modes: Ints
    shares: Bools

    @property
    def key(self) -> tuple[object, ...]:
        """A key that identifies the column."""
        parts = (self.chain.types, self.chain.layers, self.chain.ahead, self.modes, self.shares)
        return (self.chain.shape.is_interleaved, *(part.tobytes() for part in parts))


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Columns with numbers of micro-batches: the sequences that they process, and their use of the program's rows."""

    micro_batches: Floats  # [columns]
    usage: Floats  # [rows, columns]


class BoundColumns:
    """The columns found so far; where `micro_batches` is given, all pipelines have that many."""

    def __init__(self, types: StageTypes, micro_batches: int | None = None) -> None:
        self.types, self.modes, self._micro_batches = types, Modes(types), micro_batches
        self._shape = (len(types.supply), len(self.modes))
        self._columns: dict[tuple[object, ...], BoundColumn] = {}
        self._stages: _ColumnStages | None = None

    def __len__(self) -> int:
        return len(self._columns)

    @cached_property
    def first_prices(self) -> Multipliers:
        """Initial prices: of devices, as they compute, and so low that many chains have a positive reduced cost."""
        types = self.types
        rate = np.zeros(len(types.supply))
        np.maximum.at(rate, types.kind, 1.0 / (types.devices * types.layer_s))
        price = _LOW * types.global_batch * rate / float(types.supply @ (types.machine_devices * rate))
        shape = self._shape
        return self._multipliers(np.repeat(price[:, None], shape[1], axis=1), np.zeros(shape), np.zeros(shape), 0.0)

    def _multipliers(self, device: Floats, slot: Floats, longest: Floats, holder: float) -> Multipliers:
        types = self.types
        return Multipliers(device, slot, longest, holder, self.modes.most, self.modes.tail_s, types.machine_devices)

    def mean_prices(self, points: Sequence[Multipliers]) -> Multipliers:
        """The mean of `points`, all scaled to the same worth: that of duals at vertices is nearer to the middle of all
        optimal duals, at which fewer columns are missing (du Merle et al., Discrete Mathematics 194, 1999)."""
        share = [self.types.global_batch / self.worth(prices) / len(points) for prices in points]
        device, slot, longest = (
            np.asarray(sum(w * getattr(prices, name) for w, prices in zip(share, points, strict=True)))
            for name in ("device", "slot", "longest")
        )
        holder = sum(w * prices.holder for w, prices in zip(share, points, strict=True))
        return self._multipliers(device, slot, longest, float(holder))

    def worth(self, prices: Multipliers) -> float:
        """The value of the cluster and its layers at `prices`, at which no chain may cost less than it processes."""
        layer = float((prices.slot + prices.longest).max()) + prices.holder
        return float(self.types.supply @ self._machine_values(prices)) + self.types.num_layers * layer

    def _machine_values(self, prices: Multipliers) -> Floats:
        """The value of one machine of each kind [kinds]."""
        machine = self.types.machine_devices[:, None] * prices.device + self.modes.most * prices.slot
        return np.asarray(machine.max(axis=1))

    def machine_shares(self, prices: Multipliers) -> dict[int, float]:
        """The value of each usable machine as a share of `worth`."""
        shares = (self._machine_values(prices) / self.worth(prices)).tolist()
        return {m: share for share, same in zip(shares, self.types.machines, strict=True) for m in same}

    def add(self, chains: Sequence[tuple[Chain, float]], prices: Multipliers, step_s: float, gain: float) -> float:
        """Keep the new ones of `chains`, which have numbers of micro-batches at which they seemed cheap, that process
        more than `gain` times their price. Returns the most that any does, as a multiple of its price; 0 if none."""
        new: dict[tuple[object, ...], BoundColumn] = {}
        for chain, m in chains:
            column = self._column(chain, m, prices, step_s)
            if column.key not in self._columns:
                new[column.key] = column
        if not new:
            return 0.0
        table = _ColumnStages(self.types, self.modes, list(new.values())).table(step_s, self._micro_batches)
        price = self._vector(prices) @ table.usage
        # the better of both numbers of micro-batches
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(table.micro_batches > 0.0, table.micro_batches / price, 0.0).reshape(2, -1).max(axis=0)
        useful = {key: column for (key, column), best in zip(new.items(), ratio.tolist(), strict=True) if best > gain}
        self._columns.update(useful)
        if useful:
            self._stages = None
        return float(ratio.max()) if useful else 0.0

    def _column(self, chain: Chain, m: float, prices: Multipliers, step_s: float) -> BoundColumn:
        """The column of `chain` in the cheapest modes with m micro-batches."""
        types, count = self.types, len(self.modes)
        exclusive, shared = np.empty(count), np.empty(count)
        rows = _ColumnStages(
            types, self.modes, [BoundColumn(chain, np.zeros(len(chain.types), np.int64), chain.types >= 0)]
        )
        slack_s = rows.sync_room_s(step_s * (1 + 1e-9), np.array([m]))
        modes, shares = [], []
        for row, n, slack in zip(chain.types.tolist(), chain.layers.tolist(), slack_s.tolist(), strict=True):
            stage_prices(
                int(types.kind[row]),
                float(types.devices[row]),
                prices,
                m / types.global_batch,
                n,
                1.0,
                exclusive,
                shared,
            )
            if not types.lockstep[row]:
                shared[self.modes.tail_s[types.kind[row]] > slack] = np.inf
            shares.append(bool(shared.min() < exclusive.min()))
            modes.append(int((shared if shares[-1] else exclusive).argmin()))
        return BoundColumn(chain, np.array(modes), np.array(shares))

    def _vector(self, prices: Multipliers) -> Floats:
        return np.concatenate([prices.device.ravel(), prices.slot.ravel(), prices.longest.ravel(), [prices.holder]])

    def most(self, step_s: float) -> tuple[float, Multipliers]:
        """The most sequences that the columns process in `step_s` seconds, and the dual prices that prove it."""
        if not self._columns:
            return 0.0, self.first_prices
        if self._stages is None:
            self._stages = _ColumnStages(self.types, self.modes, list(self._columns.values()))
        table = self._stages.table(step_s, self._micro_batches)
        if table.micro_batches.max() <= 0.0:
            return 0.0, self.first_prices
        kinds, modes = self._shape
        cells, types = kinds * modes, self.types
        count = table.usage.shape[1]
        from scipy.optimize import linprog  # here, because scipy.optimize is slow to import

        # Variables: columns; machines of each kind and mode; their O.
        matrix = np.zeros((3 * cells + 1 + kinds + 1, count + 2 * cells))
        matrix[: 3 * cells + 1, :count] = table.usage
        cell = np.arange(cells)
        matrix[cell, count + cell] = -np.repeat(types.machine_devices, modes)
        matrix[cells + cell, count + cell] = -np.tile(self.modes.most, kinds)
        matrix[cells + cell, count + cells + cell] = -1.0
        matrix[2 * cells + cell, count + cells + cell] = -1.0
        matrix[3 * cells + 1 + cell // modes, count + cell] = 1.0
        matrix[-1, count + cells :] = 1.0
        limits = np.concatenate([np.zeros(3 * cells), [types.num_layers], types.supply, [types.num_layers]])
        objective = np.concatenate([-table.micro_batches, np.zeros(2 * cells)])
        program = linprog(objective, A_ub=matrix, b_ub=limits, method="highs")
        assert program.fun is not None, "the empty solution is always feasible"
        return -float(program.fun), self._lift(np.maximum(-program.ineqlin.marginals, 0.0))

    def _lift(self, duals: Floats) -> Multipliers:
        """Prices raised as far as the `duals` of machines and layers allow, so that no column becomes cheaper."""
        (kinds, modes), types = self._shape, self.types
        cells = kinds * modes
        slot, longest = duals[cells : 2 * cells].reshape(kinds, modes), duals[2 * cells : 3 * cells]
        machine, layer = duals[3 * cells + 1 : -1], duals[-1]
        # Chains of a kind with price 0 would cost nothing; a tiny price keeps ratios finite.
        least = 1e-6 * types.global_batch / float(types.supply @ types.machine_devices)
        left = (machine[:, None] - self.modes.most * slot) / types.machine_devices[:, None]
        device = np.maximum(np.maximum(duals[:cells].reshape(kinds, modes), left), least)
        longest = np.maximum(longest.reshape(kinds, modes), layer - slot)
        return self._multipliers(device, slot, longest, float(duals[3 * cells]))


class _ColumnStages:
    """The stages of many columns, one array element per stage."""

    def __init__(self, types: StageTypes, modes: Modes, columns: Sequence[BoundColumn]) -> None:
        self._types, self._modes = types, modes
        chains = [column.chain for column in columns]
        self._sizes = np.array([len(chain.types) for chain in chains])
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        self._column = np.repeat(np.arange(len(columns)), self._sizes)
        self._row = np.concatenate([chain.types for chain in chains])
        self._n = np.concatenate([chain.layers for chain in chains])
        self._t = np.concatenate([chain.seconds for chain in chains])
        self._mode = np.concatenate([column.modes for column in columns])
        self._shares = np.concatenate([column.shares for column in columns])
        after = np.arange(len(self._row)) - self._starts[self._column]
        interleaved = np.array([chain.shape.is_interleaved for chain in chains])
        least = np.array([chain.shape.least_ranges for chain in chains])[self._column]
        most = np.array([chain.shape.most_ranges for chain in chains])[self._column]
        turns = interleaved[self._column]
        self._first = after == self._sizes[self._column] - 1
        head_s = np.where(after == 0, types.head_forward_s[self._row], 0.0)
        forward_s = np.concatenate([chain.forward_s for chain in chains])
        ahead = np.concatenate([chain.ahead for chain in chains])
        self._ahead_s = ahead * (
            types.forward_s[1, 1][self._row, -(-self._n // least)] + head_s
        )  # of its longest range
        split = np.array([chain.shape.split for chain in chains])[self._column]
        late_s = np.where(split, types.late_s[self._row], 0.0)
        shortest_s = (self._n // most) * (types.layer_s[self._row] - late_s)
        shortest_s += np.where(split & (after == 0), types.head_s[self._row], 0.0)
        self._journey_s = np.where(turns | split, shortest_s, self._t)
        self._elsewhere = np.where(split & ~self._first, types.forward_share, 1.0)
        self._ends = split | self._first  # stages that do not end before what is known of others
        self._multiple = np.where(interleaved, self._sizes, 1)  # of micro-batches
        self._inner_s = types.inner_s[self._row]
        kind = types.kind[self._row]
        self._backward_s = self._t - forward_s - head_s
        waits = self._shares & ~types.lockstep[self._row]
        self._tail_s = np.where(waits, modes.tail_s[kind, self._mode], 0.0)

    def _outside_s(self) -> Floats:
        """A lower bound on each stage's time outside its micro-batches."""
        total: Floats = np.add.reduceat(self._journey_s, self._starts)
        with np.errstate(invalid="ignore"):  # stages that do not fit take infinitely long
            return np.asarray(self._elsewhere * (total[self._column] - self._journey_s) - self._ahead_s)

    def busy_s(self, m: Floats) -> Floats:
        """A lower bound on the end of every stage with m micro-batches [columns], in seconds of the step."""
        work_s = m[self._column] * self._t
        return np.asarray(np.where(self._ends, np.maximum(work_s, work_s + self._outside_s()), work_s))

    def sync_room_s(self, step_s: float, m: Floats) -> Floats:
        """The most seconds of sync of every stage with m micro-batches [columns] in a step of `step_s`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            left_s = step_s - self.busy_s(m)
            return np.asarray(sync_room_s(left_s, self._backward_s, self._types.shown, m[self._column]))

    def _micro_batches(self, step_s: float, sync_s: Floats) -> Floats:
        """The largest number of micro-batches that leaves time for `sync_s` of each stage, two or more of them."""
        shown = self._types.shown
        tail_s = sync_s if shown >= 1.0 else np.maximum(sync_s - self._backward_s, shown * sync_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            alone = (step_s - tail_s) / self._t
            together = (step_s - np.where(self._ends, tail_s, 0.0) - self._outside_s()) / self._t
            most = np.minimum(np.minimum(alone, together), self._types.global_batch / self._types.share[self._row])
        least = np.minimum.reduceat(np.where(np.isfinite(self._t), most, 0.0), self._starts)
        return np.asarray(self._multiple * np.floor(np.maximum(least, 0.0) / self._multiple))

    def table(self, step_s: float, micro_batches: int | None) -> ColumnTable:
        """Every column twice: with the most micro-batches, and with as many as leave time for the sync of many holders.
        Where `micro_batches` is given, with that many or none."""
        counts = [
            self._micro_batches(step_s, sync_s)
            for sync_s in (self._tail_s, np.maximum(self._tail_s, self._inner_s * self._n))
        ]
        if micro_batches is not None:
            counts = [np.where(most >= micro_batches, float(micro_batches), 0.0) for most in counts]
        return ColumnTable(np.concatenate(counts), np.hstack([self._usage(step_s, m) for m in counts]))

    def _usage(self, step_s: float, m: Floats) -> Floats:
        types, kinds, modes = self._types, len(self._types.supply), len(self._modes)
        kind, count = types.kind[self._row], len(self._sizes)
        cell = kind * modes + self._mode
        usage = np.zeros((3 * kinds * modes + 1, count))
        devices = types.devices[self._row]
        np.add.at(usage, (cell, self._column), devices)
        np.add.at(usage, (kinds * modes + cell, self._column), self._n * m[self._column] / types.global_batch)
        layers = np.where(self._shares, np.maximum(0.0, self._n - self._modes.most[self._mode]), self._n)
        np.add.at(usage, (2 * kinds * modes + cell, self._column), devices / types.machine_devices[kind] * layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            alone = self._n - self.sync_room_s(step_s, m) / self._inner_s
        few = np.where((self._inner_s > 0.0) & (alone > 0.0), alone / types.share[self._row], 0.0)
        np.add.at(usage, (np.full(len(self._row), 3 * kinds * modes), self._column), few)
        usage[:, m <= 0.0] = 0.0
        return usage

"""The most sequences that one pipeline on given devices can process within a time: tables by usage vector.

Everything here leaves something out, so that no pipeline of the plan space does better. With t_s the forward and
backward of stage s for a micro-batch, f_s its forward, r the stages behind it, M micro-batches, S the sum of all t_s
and of the messages both ways, of a pipeline within T seconds:

- flat (GPipe, 1F1B, interleaved with one range a stage): S + (M−1)·t_s − min(r, M−1)·f_s ≤ T. Before its first backward
  a stage runs r + 1 forwards at most, and until then the first micro-batch passes all stages behind it twice, all
  stages before it once, and those again at the end (`hexiopt/schedules/one_f_one_b.py`).
- chunked (interleaved, two ranges or more): M·t_s + what one layer takes in each stage before ≤ T, M a multiple of the
  number of stages.
- replicated: M·t ≤ T for every replica, with the samples it takes, whatever the schedule.

Memory holds at least min(M, r + 1) micro-batches of a stage under every schedule. After its last backward a stage
synchronises gradients, if there are other pipelines, and runs the optimiser.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.executors.sites import Site
from hexiopt.cost.model import CostModel
from hexiopt.problem.space import schedules
from solvers.exact.most_sequences import most_sequences
from solvers.exact.stage_times import StageTable
from solvers.exact.usage import Lattice

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_SLACK = 1e-9  # of a time, for rounding


@dataclass(frozen=True, slots=True)
class Group:
    """A TP group of some bin of a run."""

    run: int
    site: Site


@dataclass(frozen=True, slots=True)
class Family:
    """Plans that share what memory and the end of a step depend on: pipelines at least, ZeRO stage and holders."""

    sharding: int
    holders: int
    alone: bool  # whether a parameter may have one holder only


class Floors:
    """Bounds of one problem on one lattice. Seconds."""

    def __init__(self, model: CostModel, table: StageTable, lattice: Lattice) -> None:
        self._model, self._table, self.lattice = model, table, lattice
        problem = model.problem
        self._layers, self._batch = problem.model.num_layers, problem.workload.global_batch
        self.sizes = problem.space.micro_batch_sizes(self._batch)
        self.groups = [
            Group(k, site)
            for k, run in enumerate(lattice.runs)
            for site in model.best_sites(run.machine)
            if site.tp in run.degrees
        ]
        self._interleaves = any(schedule.chunked for schedule in schedules(problem.workload))
        self._most_stages = problem.space.num_stages or min(self._layers, len(problem.usable_devices))
        self._least_hops = {size: self._hops(size) for size in self.sizes}
        self._tails: dict[tuple[Group, bool, bool, Family], Floats] = {}

    # ------------------------------------------------------------------ what any stage or message takes

    def _hops(self, size: int) -> tuple[float, float]:
        """Both messages between two stages at the least: inside a bin or between bins, and how much more between."""
        cluster = self._model.problem.cluster
        message = self._model.message_bytes(size)
        inside, between = [], []
        for run in self.lattice.runs:
            machine = cluster.machines[run.machine]
            pairs = [(i, j) for i in range(machine.num_gpus) for j in range(i)]
            most = max(run.degrees)
            if pairs:
                rate = max(machine.pair_bandwidth(i, j) for i, j in pairs) * most
                inside.append(message / rate + min(machine.pair_latency(i, j) for i, j in pairs))
            between.append(message / (machine.nic_bandwidth_bytes_per_s * machine.num_interfaces))
        latency = self._least_latency()
        across = min(between, default=0.0) + latency
        within = min([*inside, across])
        return 2 * within, 2 * max(0.0, across - within)

    def _least_latency(self) -> float:
        problem = self._model.problem
        firsts = [own[0] for own in problem.usable_by_machine.values()]
        network = problem.cluster.network
        return min((network.pair_latency(a, b) for a in firsts for b in firsts if a != b), default=0.0)

    def _tail(self, group: Group, first: bool, last: bool, family: Family) -> Floats:
        """Gradient sync and optimiser of a stage by its layers."""
        key = (group, first, last, family)
        found = self._tails.get(key)
        if found is None:
            problem, site = self._model.problem, group.site
            workload = problem.workload
            holders = family.holders if family.sharding else 1
            found = self._table.optimizer_s(site, first, last, holders)
            if not family.alone and family.sharding < 2:
                # A ring passes at least half of a device's parameters on, over its port and its interface.
                machine = problem.cluster.machines[self.lattice.runs[group.run].machine]
                pairs = [(i, j) for i in range(machine.num_gpus) for j in range(i)]
                rate = max((machine.pair_bandwidth(i, j) for i, j in pairs), default=0.0)
                rate += machine.nic_bandwidth_bytes_per_s
                params = np.arange(self._layers + 1) * (problem.model.layer_params / site.tp)
                passes = workload.stored_gradient_bytes + min(workload.stored_gradient_bytes, workload.element_bytes)
                found = found + 0.5 * params * passes / rate
            self._tails[key] = found
        return found

    # ------------------------------------------------------------------ pipelines of single groups

    def flat(self, step_s: float, size: int, count: int, family: Family) -> Bools:
        """Which vectors [vectors] may carry a flat pipeline of `count` micro-batches of `size` within `step_s`."""
        layers, lattice, shards = self._layers, self.lattice, self._shards(family)
        within, beyond = self._least_hops[size]
        limit_s = step_s * (1 + _SLACK)
        hops = np.maximum(lattice.spans - 1, 0) * beyond
        before, before_forward = self._before(size)
        done = np.zeros(len(lattice.vectors), bool)
        reached = np.full((len(lattice.vectors), layers + 1), np.inf)  # least S of the stages behind, by layers
        reached[0, 0] = 0.0
        for r in range(self._most_stages):
            held, warm = min(count, r + 1), min(r, count - 1)
            now = np.full(reached.shape, np.inf)
            alive = np.isfinite(reached).any(axis=1)
            for group in self.groups:
                for first in (False, True):
                    times = self._table.times(group.site, size, first, r == 0, held, shards)
                    tail = self._tail(group, first, r == 0, family)
                    both, forward = times.both_s, times.forward_s
                    # What n layers take beyond the first micro-batch; infinite where they do not fit.
                    finite = np.isfinite(both)
                    rest = np.where(finite, (count - 1) * np.where(finite, both, 0.0) - warm * forward, np.inf)
                    for here, there in lattice.steps(group.run, group.site.tp):
                        keep = alive[here]
                        if not keep.any():
                            continue
                        here, there = here[keep], there[keep]
                        for n in range(1, layers + 1):
                            if not rest[n] + both[n] <= limit_s:
                                break
                            if first:
                                total = reached[here, layers - n] + both[n] + hops[there] + within * (r > 0)
                                done[there] |= total + rest[n] + tail[n] <= limit_s
                                continue
                            total = reached[here, : layers - n] + both[n] + within * (r > 0)
                            left = layers - n - np.arange(layers - n)
                            ahead = np.maximum(before[left], before_forward[left] + tail[n])
                            fits = total + hops[there][:, None] + ahead[None, :] + rest[n] <= limit_s
                            target = now[there, n:layers]
                            now[there, n:layers] = np.where(fits, np.minimum(target, total), target)
            reached = now
            if not np.isfinite(reached).any():
                break
        return done

    def _before(self, size: int) -> tuple[Floats, Floats]:
        """What n > 0 layers before a stage take at least, embedding included: both ways, and forward only."""
        both, forward, embedding, ahead = [], [], [], []
        for group in self.groups:
            each = [self._model.layer_s(group.site, size, policy) for policy in self._model.policies()]
            both.append(min(sum(times) for times in each))
            forward.append(min(times[0] for times in each))
            head = self._model.ends_s(group.site, size)[0]
            embedding.append(head.forward_s + head.backward_s)
            ahead.append(head.forward_s)
        n = np.arange(self._layers + 1, dtype=np.float64)
        within = self._least_hops[size][0]
        return n * min(both) + min(embedding) + within, n * min(forward) + min(ahead) + within / 2

    def chunked(self, step_s: float, size: int, count: int, family: Family) -> Bools:
        """As `flat`, of interleaved pipelines with two layer ranges or more in every stage."""
        layers, lattice, shards = self._layers, self.lattice, self._shards(family)
        limit_s = step_s * (1 + _SLACK)
        done = np.zeros(len(lattice.vectors), bool)
        before, before_forward = self._before(size)
        one, one_forward = before[1] - before[0], before_forward[1] - before_forward[0]
        for stages in range(2, min(self._most_stages, layers // 2, count) + 1):
            if count % stages:
                continue
            most = np.full(len(lattice.vectors), -1)
            most[0] = 0
            for r in range(stages):
                held, position = min(count, 2 * r + 1, stages), stages - 1 - r
                entry = before[0] + position * one if position else 0.0
                entry_forward = before_forward[0] + position * one_forward if position else 0.0
                now = np.full(len(most), -1)
                for group in self.groups:
                    times = self._table.times(group.site, size, position == 0, r == 0, held, shards)
                    tail = self._tail(group, position == 0, r == 0, family)
                    fits = count * times.both_s + np.maximum(entry, entry_forward + tail) <= limit_s
                    room = int(np.flatnonzero(fits)[-1]) if fits.any() else 0
                    if room < 2:
                        continue
                    for here, there in lattice.steps(group.run, group.site.tp):
                        now[there] = np.maximum(now[there], np.where(most[here] >= 0, most[here] + room, -1))
                most = now
            done |= most >= layers
        return done

    def _shards(self, family: Family) -> Shards:
        return Shards(family.sharding, family.holders)

    def most_sequences(self, step_s: float, family: Family, go_on: Callable[[], bool]) -> NDArray[np.int64] | None:
        """Per vector, the most sequences that a pipeline of single groups processes within `step_s`.

        None where `go_on` says to stop.
        """

        def fits(size: int, count: int) -> NDArray[np.bool_]:
            found = self.flat(step_s, size, count, family)
            if self._interleaves and family.sharding < 2:
                found |= self.chunked(step_s, size, count, family)
            return found

        return most_sequences((len(self.lattice.vectors),), self._batch, self.sizes, fits, go_on)

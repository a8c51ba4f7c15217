"""The most sequences that a pipeline of replicated stages can process within a time, by devices of each kind.

A replica of n layers that takes x of a micro-batch's samples works M · t(n, x) seconds, whatever the schedule; the
replicas of a stage take all samples together, the stages of a pipeline hold all layers. Fill, messages, gradient sync
and where machines end are left out, so that no pipeline of the plan space does better.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from solvers.exact.most_sequences import most_sequences
from solvers.exact.stage_times import StageTable
from solvers.exact.usage import Lattice

Ints = NDArray[np.int64]
_SLACK = 1e-9  # of a time, for rounding


class ReplicatedFloors:
    """Bounds of one problem, over all counts of devices of each kind."""

    def __init__(self, model: CostModel, table: StageTable) -> None:
        problem = model.problem
        self._model, self._table = model, table
        self._runs = Lattice.of(problem, coarse=True).runs
        self._layers, self._batch = problem.model.num_layers, problem.workload.global_batch
        self.sizes = problem.space.micro_batch_sizes(self._batch)
        self._most_stages = problem.space.num_stages or min(self._layers, len(problem.usable_devices))
        self._sites = [[site for site in model.best_sites(run.machine) if site.tp in run.degrees] for run in self._runs]
        self.shape = tuple(run.size + 1 for run in self._runs)

    def most_sequences(self, step_s: float, shards: Shards, go_on: Callable[[], bool]) -> Ints | None:
        """Sequences within `step_s` seconds by devices of each kind [kinds' devices + 1, ...].

        None where `go_on` says to stop.
        """

        def fits(size: int, count: int) -> NDArray[np.bool_]:
            return self._fits(step_s, size, count, shards)

        return most_sequences(self.shape, self._batch, self.sizes, fits, go_on)

    def _fits(self, step_s: float, size: int, count: int, shards: Shards) -> NDArray[np.bool_]:
        """Where a pipeline of `count` micro-batches of `size` may end in time."""
        reached = np.full(self.shape, -1)  # most layers in the stages behind
        reached[(0,) * len(self.shape)] = 0
        done = np.zeros(self.shape, bool)
        for r in range(self._most_stages):
            room = self._room(step_s, size, count, min(count, r + 1), r == 0, shards)
            now = np.full(self.shape, -1)
            for used in np.argwhere(room > 0):
                target = tuple(slice(k, None) for k in used)
                source = tuple(slice(None, n - k) for n, k in zip(self.shape, used, strict=True))
                before = reached[source]
                more = np.where(before >= 0, before + room[tuple(used)], -1)
                now[target] = np.maximum(now[target], more)
            if (now < 0).all():
                break
            done |= now >= self._layers
            reached = now
        for axis in range(done.ndim):
            np.logical_or.accumulate(done, axis=axis, out=done)  # devices may stay unused
        return done

    def _room(self, step_s: float, size: int, count: int, held: int, last: bool, shards: Shards) -> Ints:
        """The most layers of a stage by the devices of its replicas; only where fewer devices hold fewer."""
        limit_s = step_s * (1 + _SLACK)
        samples = np.zeros((self._layers + 1, *self.shape), np.int64)
        for axis, (run, sites) in enumerate(zip(self._runs, self._sites, strict=True)):
            best = np.zeros((self._layers + 1, run.size + 1), np.int64)  # samples by layers and devices
            for site in sites:
                taken = np.zeros(self._layers + 1, np.int64)
                for x in range(1, size + 1):
                    times = self._table.times(site, x, False, last, held, shards)
                    tail = self._table.optimizer_s(site, False, last, shards.num_devices)
                    taken[count * times.both_s + tail <= limit_s] = x
                for devices in range(site.tp, run.size + 1):
                    best[:, devices] = np.maximum(best[:, devices], best[:, devices - site.tp] + taken)
            for devices in range(1, run.size + 1):
                best[:, devices] = np.maximum(best[:, devices], best[:, devices - 1])
            shape = [self._layers + 1] + [1] * len(self.shape)
            shape[axis + 1] = run.size + 1
            samples = samples + best.reshape(shape)
        fits = samples >= size
        fits[0] = False
        room = np.where(fits.any(axis=0), self._layers - np.argmax(fits[::-1], axis=0), 0)
        # A stage that holds no more than one of fewer devices need not be looked at.
        least = room.copy()
        for axis in range(room.ndim):
            fewer = np.roll(room, 1, axis=axis)
            fewer[tuple(0 if k == axis else slice(None) for k in range(room.ndim))] = 0
            least[room <= fewer] = 0
        return least

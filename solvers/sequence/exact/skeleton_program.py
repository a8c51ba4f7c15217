"""The CP-SAT model of one skeleton: tokens and heads of its devices that minimise forward and backward time within
memory.

The skeleton says which devices form which group, in which order, under which policy. The model follows the phases of
`hexiopt/cost/executors/sequence/phases.py`, each as a constraint "not before". With fixed heads it equals the cost
model up to rounding down: its objective never exceeds the true time and is less than 1e-6 below it. With free heads
this also holds where the rings are known in advance and query heads do not share key-value heads. Otherwise it is a
relaxation: key-value heads count as fractions of query heads, and rings as in `messages.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from ortools.sat.python import cp_model

from hexiopt.plan.token_layout import RingSchedule, members
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton
from solvers.sequence.exact.messages import SkeletonMessages
from solvers.sequence.exact.quanta_grid import KernelSeconds, QuantaGrid
from solvers.sequence.exact.skeleton_memory import SkeletonNeeds, fit_memory
from solvers.sequence.exact.variables import Sum, Variables


@dataclass(frozen=True)
class SolvedShares:
    """Quanta and heads of the devices of a skeleton, in its order, and the model's time, which never exceeds the true
    one.
    """

    quanta: tuple[int, ...]
    heads: tuple[int, ...]
    seconds: float


class SkeletonProgram:
    """The model of a `skeleton` for less than `limit_s` seconds, forward and backward.

    `heads` fixes the heads; without `memory`, all devices have unlimited memory.
    """

    def __init__(
        self,
        grid: QuantaGrid,
        skeleton: LayoutSkeleton,
        need: SkeletonNeeds,
        limit_s: float,
        heads: Sequence[int] | None = None,
        *,
        memory: bool = True,
    ) -> None:
        v = self._v = Variables(grid, skeleton, limit_s, heads)
        if heads is None:
            v.order_equals(dict(need.states_bytes))
        if memory:
            fit_memory(v, need)
        self._messages = SkeletonMessages(v, dict(need.sharers))
        # Times of steps are proportional to products of quanta; groups with even numbers of tokens give the factors.
        self._ring_schedule = RingSchedule(
            members(skeleton.layout([2] * len(v.devices), heads or v.any_heads())), skeleton.order
        )

        # Step 3, objective: all layers forward and backward, and what the two ends of the model add.
        host_s = grid.framework.layer_host_s
        recompute_s = host_s if skeleton.policy == "full" else 0.0
        forward = self._forward_from([0] * len(v.devices), again=False)
        layer = self._phase_end(forward, host_s) + self._phase_end(self._backward(), host_s + recompute_s)
        ends = [v.largest([v.table(k, grid.ends[gpu][row]) for k, gpu in enumerate(v.gpus)]) for row in range(4)]
        self._objective = v.spec.num_layers * layer + sum(ends)
        v.model.add(self._objective <= v.limit)
        v.model.minimize(self._objective)

    # ---------------------------------------------------------------- asking

    def below(self, limit_s: float) -> None:
        """Require less than `limit_s` seconds from now on."""
        self._v.model.add(self._objective <= self._v.units(limit_s))

    def refute_heads(self, heads: Sequence[int]) -> None:
        """Exclude this choice of heads."""
        assert self._v.heads is not None
        self._v.refute(self._v.heads, heads)

    def refute_quanta(self, quanta: Sequence[int]) -> None:
        """Exclude this choice of quanta."""
        self._v.refute(self._v.quanta, quanta)

    def least(self, seconds: float, deterministic_s: float) -> tuple[SolvedShares | None, bool]:
        """The choice with the least time, and whether that is proven; (None, True) where no choice is within the
        limit.
        """
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = deterministic_s
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
        status = solver.solve(self._v.model)
        if status == cp_model.INFEASIBLE:
            return None, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, False
        chosen = self._v.fixed or tuple(solver.value(h) for h in self._v.heads or ())
        least_s = solver.best_objective_bound * self._v.unit_s
        return SolvedShares(tuple(solver.value(t) for t in self._v.quanta), chosen, least_s), status == cp_model.OPTIMAL

    # ---------------------------------------------------------------- phases

    def _forward_from(self, now: list[Sum], again: bool) -> list[Sum]:
        now = self._work(now, "before_s")
        now = self._exchange(now, "qkv")
        now = self._ring(now, backward=False)
        now = self._exchange(now, "out_back")
        return self._work(now, "after_again_s" if again else "after_s")

    def _backward(self) -> list[Sum]:
        now: list[Sum] = [0] * len(self._v.devices)
        if self._v.skeleton.policy == "full":
            now = self._forward_from(now, again=True)
        now = self._work(now, "after_back_s")
        now = self._exchange(now, "out")
        if self._v.skeleton.policy == "selective":
            now = self._ring(now, backward=False)
        now = self._ring(now, backward=True)
        now = self._exchange(now, "qkv_back")
        return self._work(now, "before_back_s")

    def _phase_end(self, now: Sequence[Sum], lower_bound_s: float) -> cp_model.IntVar:
        found = self._v.largest(now)
        if lower_bound_s:
            self._v.model.add(found >= self._v.units(lower_bound_s))
        return found

    def _work(self, now: list[Sum], part: str) -> list[Sum]:
        tables = [getattr(self._v.grid.dense[gpu], part) for gpu in self._v.gpus]
        return [begun + self._v.table(k, table) for k, (begun, table) in enumerate(zip(now, tables, strict=True))]

    def _exchange(self, now: list[Sum], name: str) -> list[Sum]:
        found = list(now)
        for g, places in enumerate(self._v.places):
            if len(places) > 1:
                ready = self._v.largest([now[k] + self._messages.exchange_s[name][g] for k in places])
                for k in places:
                    found[k] = ready
        return found

    def _ring(self, now: list[Sum], backward: bool) -> list[Sum]:
        count = len(self._v.places)
        several = count > 1
        steps = np.arange(count + (backward and several))
        causal, whole, kernels, rows = self._ring_schedule.blocks(np.arange(count))
        sizes = self._ring_schedule.tokens.astype(float)
        last_step = self._ring_schedule.last_step()
        for step in steps.tolist():
            source = [(g - step) % count for g in range(count)]
            ended: list[cp_model.IntVar] = []
            for k in range(len(self._v.devices)):
                g, s = self._v.group_of[k], source[self._v.group_of[k]]
                computed: Sum = 0
                if step < count and kernels[step, g]:
                    pairs = float(sizes[g] * sizes[s])
                    computed = self._attend(
                        k,
                        g,
                        s,
                        backward,
                        causal[step, g] / pairs,
                        whole[step, g] / pairs,
                        kernels[step, g],
                        rows[step, g] / sizes[g],
                    )
                end = self._v.time()
                self._v.model.add(end >= now[k] + computed)
                ended.append(end)
            if several:
                moved = []
                for g in range(count):
                    own = [source[g]] if step < last_step[source[g]] else []
                    if backward and step:
                        own.append((g - step + 1) % count)
                    moved.append(own)
                for flow, time in self._messages.times(moved):
                    for a, b in product(flow.ends, flow.ends):
                        self._v.model.add(ended[a] >= now[b] + time)
            now = list(ended)
        return now

    def _attend(
        self, k: int, g: int, s: int, backward: bool, causal: float, whole: float, kernels: float, rows: float
    ) -> Sum:
        """Seconds of attention of place k in one step, over the counted fractions of its group's quanta times the
        source's.

        Includes the kernels that merge its parts, over the fraction `rows` of its group's quanta.
        """
        many, gpu = self._v.grid.resolution, self._v.gpus[k]
        pairs = self._v.product(self._v.group_quanta[g], self._v.group_quanta[s], many**2)
        found: list[Sum] = []
        for term, hidden_too in self._v.grid.attention(gpu, backward):
            slope = term.slope_s * (whole if hidden_too else causal)
            amount = self._v.times_heads(pairs, many**2, k, slope, 0.0, self._v.units)
            found.append(self._at_least(term, kernels, amount))
        if len(self._v.places) > 1:
            term, key_s = self._v.grid.merging(gpu, backward)
            amount = self._v.times_heads(self._v.group_quanta[g], many, k, term.slope_s * rows, 0.0, self._v.units)
            if key_s:
                amount += self._v.times_heads(self._v.group_quanta[s], many, k, 0.0, key_s, self._v.units)
            found.append(self._at_least(term, 1.0, amount))
        return sum(found)

    def _at_least(self, term: KernelSeconds, kernels: float, amount: Sum) -> cp_model.IntVar:
        found = self._v.time()
        self._v.model.add(found >= self._v.units(term.launch_s * kernels))
        self._v.model.add(found >= amount)
        return found

"""`shapes`: a configuration linear programme over pipeline shapes, solved by column generation.

Equal GPUs make a large cluster small: what matters is how many pipelines of which *shape* to build. A shape is a
multiset of stages (machine kind, TP degree) that together hold all layers within a period β. In a step of T seconds it
processes M(T) ≈ (T − fill) / β + 1 micro-batches. The cluster processes at most

    max Σ_s x_s · b_s · M_s(T)   subject to   Σ_s x_s · devices(s, k) ≤ devices(k) for every machine kind k.

Columns come from a knapsack over layers, for a whole grid of periods at once, under the dual prices of the devices
(Gilmore and Gomory, 1961). T is found by Newton's method, because the optimum is convex in T. An integer programme over
the generated columns rounds the solution; then TP groups are placed on machines, the stages of a pipeline close to each
other.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import default_schedule
from hexiopt.schedules.in_flight import holding
from hexiopt.solving import Pricer
from solvers.completion.completer import PlanCompleter
from solvers.completion.layers import LayerSplitter
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup
from solvers.core.search import Search
from solvers.core.zero import plain_stages
from solvers.frame.solver import SearchSolver, offer_partition
from solvers.frame.starts import chain_partitions, cut, kinds
from solvers.heuristics.random_partition import draw_partition

_PERIODS = 48  # in the geometric grid
_COLUMNS = 60  # most columns generated for one T
_MIP_S, _MIP_NODES = 1.0, 5_000  # most seconds and nodes of one rounding


@dataclass(frozen=True, slots=True)
class StageType:
    """A stage type: machine kind, TP degree, the least time of n layers (`times[n-1]`), seconds of a message inside a
    machine.
    """

    kind: int
    tp: int
    times: Floats
    message_s: float


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline shape: the number of stages of each type, period and fill in seconds, and micro-batch size."""

    counts: tuple[int, ...]
    period_s: float
    fill_s: float
    micro_batch_size: int

    def sequences(self, step_s: float) -> float:
        """Sequences that one such pipeline processes in a step of `step_s` seconds."""
        return max(0.0, self.micro_batch_size * ((step_s - self.fill_s) / self.period_s + 1.0))


class ConfigurationProgram:
    """The linear program for one problem, one ZeRO stage and one assumed number of micro-batches in flight.

    Column generation stops early once `should_continue` returns False.
    """

    def __init__(
        self,
        pricer: Pricer,
        sharding: int,
        held: int,
        same_kind: bool,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        problem = self._problem = pricer.problem
        self._pricer, self._go_on = pricer, should_continue
        self._same_kind = same_kind
        self.kinds = kinds(problem)
        self.devices = problem.usable_by_machine
        self.supply = np.array([sum(len(self.devices[m]) for m in members) for members in self.kinds], float)
        shards = StateSharding(sharding, max(1, int(self.supply.sum()) // 8))
        splitter = LayerSplitter(pricer, pricer.policies(), even=False, per_layer=problem.space.recompute_per_layer)
        self.sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)[:3]
        self.items: dict[int, list[StageType]] = {size: [] for size in self.sizes}
        cross_s = self._crossing_s()
        self._cross_s = {size: cross_s * size for size in self.sizes}
        for size in self.sizes:
            for k, members in enumerate(self.kinds):
                own = self.devices[members[0]]
                for tp in problem.space.allowed_tp(len(own)):
                    tp_group = pricer.tp_group(own[:tp])
                    options = splitter.options(frozenset([tp_group]), False, False, size, holding(held), shards)
                    message_s = 0.0
                    if 2 * tp <= len(own):
                        message_s = pricer.message_s(own[:tp], own[tp : 2 * tp], size)
                    self.items[size].append(StageType(k, tp, np.array(options.times or [np.inf]), message_s))
        self._columns: list[PipelineShape] = []
        self._known: set[tuple[tuple[int, ...], int, float]] = set()

    def _crossing_s(self) -> float:
        """Seconds of a typical message between machines for one sequence, in both directions."""
        firsts = [self.devices[members[0]] for members in self.kinds]
        ends = [own[0] for own in firsts]
        if len(ends) == 1 and len(self.kinds[0]) > 1:
            ends.append(self.devices[self.kinds[0][1]][0])
        pairs = [(a, b) for a in ends for b in ends if a != b]
        routes = [self._pricer.message_s((a,), (b,), 1) for a, b in pairs]
        return 2 * float(np.median(routes)) if routes else 0.0

    def solve(self) -> tuple[float, list[tuple[PipelineShape, float]]] | None:
        """(T, shapes with their fractional multiplicities) at which the cluster just processes the global batch; None
        where no stage fits.
        """
        batch = self._problem.workload.global_batch
        usable = [item for items in self.items.values() for item in items if np.isfinite(item.times[0])]
        if not usable:
            return None
        layers = self._problem.model.num_layers
        fastest = max(
            float(self.supply[i.kind]) / i.tp * size * len(i.times) / float(i.times[-1])
            for size, items in self.items.items()
            for i in items
            if np.isfinite(i.times[0])
        )
        step_s = 1.3 * batch * layers / fastest
        answer = None
        for _ in range(8):
            mix = self._generate(step_s)
            if not self._go_on():
                break
            if not mix:
                step_s *= 2.0
                continue
            value = sum(x * shape.sequences(step_s) for shape, x in mix)
            slope = sum(x * shape.micro_batch_size / shape.period_s for shape, x in mix)
            answer = (step_s, mix)
            change = (batch - value) / slope
            step_s = max(step_s + change, 0.3 * step_s)
            if abs(change) < 0.005 * step_s:
                break
        return answer

    def constraints(self) -> tuple[Floats, Floats]:
        """Left and right side of Σ x · usage ≤ supply: devices of each kind, and a micro-batch for every pipeline."""
        usage = [np.append(self.usage(shape), shape.micro_batch_size) for shape in self._columns]
        return np.array(usage).T, np.append(self.supply, self._problem.workload.global_batch)

    def columns(self) -> list[PipelineShape]:
        """All shapes generated."""
        return self._columns

    def _generate(self, step_s: float) -> list[tuple[PipelineShape, float]]:
        """Column generation at T = `step_s`."""
        if not self._columns:
            self._price(np.zeros(len(self.kinds)), step_s)
            for k in range(len(self.kinds)):
                duals = np.full(len(self.kinds), 1e9)
                duals[k] = 0.0
                self._price(duals, step_s)
        solution: list[tuple[PipelineShape, float]] = []
        for _ in range(_COLUMNS):
            if not self._columns or not self._go_on():
                return solution
            values = np.array([shape.sequences(step_s) for shape in self._columns])
            usage, supply = self.constraints()
            program = linprog(-values, A_ub=usage, b_ub=supply, method="highs")
            assert program.x is not None, "no pipelines at all is always possible"
            duals = -program.ineqlin.marginals[:-1]
            solution = [(s, float(x)) for s, x in zip(self._columns, program.x.tolist(), strict=True) if x > 1e-9]
            if not self._price(duals, step_s):
                break
        return solution

    def allowed(self, machine: int) -> tuple[int, ...]:
        """TP degrees in a machine."""
        return self._problem.space.allowed_tp(len(self.devices[machine]))

    def usage(self, shape: PipelineShape) -> Floats:
        """Devices of each kind that a shape takes."""
        used = np.zeros(len(self.kinds))
        for item, count in zip(self.items[shape.micro_batch_size], shape.counts, strict=True):
            used[item.kind] += item.tp * count
        return used

    def _price(self, duals: Floats, step_s: float) -> bool:
        """Add the shape with the largest reduced cost under `duals` for each micro-batch size; whether any improves."""
        gained = False
        for size in self.sizes:
            groups: list[list[int]] = [list(range(len(self.items[size])))]
            if self._same_kind:
                groups = [[i for i in groups[0] if self.items[size][i].kind == k] for k in range(len(self.kinds))]
            for members in groups:
                found = self._knapsack(size, members, duals, step_s)
                if found is None:
                    continue
                shape = found
                key = (shape.counts, size, round(shape.period_s, 9))
                worth = shape.sequences(step_s) - float(self.usage(shape) @ duals)
                if worth > 1e-6 * max(1.0, shape.sequences(step_s)) and key not in self._known:
                    self._known.add(key)
                    self._columns.append(shape)
                    gained = True
        return gained

    def _knapsack(self, size: int, members: list[int], duals: Floats, step_s: float) -> PipelineShape | None:
        """The best shape of the stage types `members`: for each period of a grid, all layers covered at least cost."""
        layers = self._problem.model.num_layers
        items = [self.items[size][i] for i in members]
        items_i = [i for i, item in zip(members, items, strict=True) if np.isfinite(item.times[0])]
        if not items_i:
            return None
        items = [self.items[size][i] for i in items_i]
        low = min(float(item.times[0]) for item in items)
        high = min(step_s, max(float(item.times[-1]) for item in items))
        if high <= low:
            return None
        periods = np.geomspace(low, high, _PERIODS)
        n = np.array([np.searchsorted(item.times, periods * (1 + 1e-12), side="right") for item in items])
        stage_s = np.array([item.times[np.maximum(m, 1) - 1] for item, m in zip(items, n, strict=True)])
        # Every stage adds its time and its message to the fill, which reduces the number of micro-batches.
        message_s = np.array([2 * item.message_s for item in items])[:, None]
        price = np.array([duals[item.kind] * item.tp for item in items])[:, None]
        loss = price + size * (stage_s + message_s) / periods
        loss = np.where(n > 0, loss, np.inf)
        best = np.zeros((layers + 1, len(periods)))
        choice = np.zeros((layers + 1, len(periods)), np.int64)
        grid = np.arange(len(periods))
        for layer in range(1, layers + 1):
            options = best[np.maximum(layer - n, 0), grid] + loss
            choice[layer] = np.argmin(options, axis=0)
            best[layer] = options[choice[layer], grid]
        worth = size * (step_s / periods + 2.0) - best[layers]
        at = int(np.argmax(worth))
        if not np.isfinite(best[layers, at]):
            return None
        counts = [0] * len(self.items[size])
        layer, fill_s, used = layers, 0.0, set()
        while layer > 0:
            pick = int(choice[layer, at])
            counts[items_i[pick]] += 1
            fill_s += float(stage_s[pick, at] + message_s[pick, 0])
            used.add(items[pick].kind)
            layer -= int(n[pick, at])
        fill_s += (len(used) - 1) * self._cross_s[size]
        return PipelineShape(tuple(counts), float(periods[at]), fill_s, size)


def rounded(program: ConfigurationProgram, step_s: float, time_limit_s: float) -> list[tuple[PipelineShape, int]]:
    """Integer multiplicities of all generated shapes that process the most sequences in `step_s` seconds."""
    columns = program.columns()
    values = np.array([shape.sequences(step_s) for shape in columns])
    usage, supply = program.constraints()
    answer = milp(
        -values,
        constraints=LinearConstraint(usage, -np.inf, supply),
        integrality=np.ones(len(columns), np.int64),
        bounds=Bounds(0, np.inf),
        options={"time_limit": time_limit_s, "node_limit": _MIP_NODES, "mip_rel_gap": 0.002},
    )
    if answer.x is None:
        return []
    return [(shape, round(x)) for shape, x in zip(columns, answer.x, strict=True) if round(x) > 0]


def laid_out(
    program: ConfigurationProgram, chosen: Sequence[tuple[PipelineShape, int]], aligned: bool
) -> list[PipelineGroup]:
    """Pipeline groups of the shapes placed on devices, the most frequent shapes first.

    Either the stages of a pipeline in one machine kind share a machine, so that messages stay inside it; or (`aligned`)
    the same stage of several pipelines does, so that a machine holds few layers and sends few gradients.
    """
    free = {m: list(own) for m, own in program.devices.items()}
    pipeline_groups = []
    for shape, count in sorted(chosen, key=lambda c: -c[1]):
        if aligned:
            pipelines = _place_aligned(program, shape, count, free)
        else:
            pipelines = [stages for stages in (_place(program, shape, free) for _ in range(count)) if stages]
        by_degrees: dict[tuple[int, ...], list[list[DeviceGroup]]] = defaultdict(list)
        for stages in pipelines:
            by_degrees[tuple(len(group) for group in stages)].append(stages)
        for same in by_degrees.values():
            pipeline_stages = tuple(tuple(stages[s] for stages in same) for s in range(len(same[0])))
            pipeline_groups.append(PipelineGroup(pipeline_stages, shape.micro_batch_size))
    return pipeline_groups


def _place_aligned(
    program: ConfigurationProgram, shape: PipelineShape, count: int, free: dict[int, list[int]]
) -> list[list[DeviceGroup]]:
    """`count` pipelines, placed stage by stage, as many at a time as a machine has groups of the largest degree."""
    items = program.items[shape.micro_batch_size]
    order = [item for item, n in zip(items, shape.counts, strict=True) for _ in range(n)]
    largest = max(len(own) for own in program.devices.values())
    together = max(1, largest // max(item.tp for item in order))
    pipelines: list[list[DeviceGroup]] = []
    while count > 0:
        width = min(count, together)
        count -= width
        stages: list[list[DeviceGroup]] = [[] for _ in range(width)]
        for item in order:
            members = sorted(program.kinds[item.kind], key=lambda m: -len(free[m]))
            machine = next((m for m in reversed(members) if len(free[m]) >= item.tp * width), members[0])
            for pipeline in stages:
                if len(free[machine]) < item.tp:
                    machine = max(members, key=lambda m: len(free[m]))
                taken = free[machine][: item.tp]
                del free[machine][: item.tp]
                if taken:  # a group that fits no machine gets a smaller degree
                    pipeline += cut(taken, max(t for t in program.allowed(machine) if t <= len(taken)))
        pipelines += [stages_of for stages_of in stages if stages_of]
    return pipelines


def _place(program: ConfigurationProgram, shape: PipelineShape, free: dict[int, list[int]]) -> list[DeviceGroup]:
    """The stages of one pipeline, slow kinds first; TP degrees that fit no machine are halved."""
    stages: list[DeviceGroup] = []
    for k, members in enumerate(program.kinds):
        degrees = sorted(
            (
                item.tp
                for item, count in zip(program.items[shape.micro_batch_size], shape.counts, strict=True)
                if item.kind == k
                for _ in range(count)
            ),
            reverse=True,
        )
        while degrees:
            total = sum(degrees)
            fitting = [m for m in members if len(free[m]) >= total]
            machine = min(fitting, key=lambda m: len(free[m])) if fitting else max(members, key=lambda m: len(free[m]))
            if not free[machine]:
                break
            left = []
            for tp in degrees:
                if len(free[machine]) >= tp:
                    stages.append(tuple(free[machine][:tp]))
                    del free[machine][:tp]
                else:
                    left.append(tp)
            if len(left) == len(degrees):
                left = [part for tp in degrees for part in ((tp // 2, tp - tp // 2) if tp > 1 else (tp,))]
            degrees = left
    return stages


def shape_partitions(search: Search, should_continue: Callable[[], bool] | None = None) -> Iterator[Partition]:
    """Partitions from the rounded linear program under several assumptions, the deepest sharding first.

    Stops once `should_continue` (by default that of `search`) returns False.
    """
    problem, should_continue = search.problem, should_continue or search.should_continue
    schedule = default_schedule(problem.workload)
    for sharding in plain_stages(problem)[::-1]:
        for held in (4, 8):
            for same_kind in (False, True):
                if not should_continue():
                    return
                program = ConfigurationProgram(search.pricer, sharding, held, same_kind, should_continue)
                answer = program.solve()
                if answer is None:
                    continue
                # Where steps are counted, the clock may end the search, not the program.
                limit_s = math.inf if search.budget.max_steps is not None else _MIP_S
                chosen = rounded(program, answer[0], limit_s)
                for aligned in (True, False):
                    pipeline_groups = laid_out(program, chosen, aligned)
                    if pipeline_groups:
                        yield Partition(tuple(pipeline_groups), schedule, sharding)
                        backwards = tuple(
                            pipeline_group.with_stages(pipeline_group.stages[::-1])
                            for pipeline_group in pipeline_groups
                        )
                        yield Partition(backwards, schedule, sharding)


class Shapes(SearchSolver):
    """Shapes of pipelines by linear programmes over what machines of each kind can form.

    Prices the rounded linear programmes; a step is one partition.

    Where the plan space allows none of them, the first rule-based or random partition that fits is the result.
    """

    name = "shapes"

    def search(self, run: Search, rng: random.Random) -> None:
        """Price the roundings."""
        problem, completer = run.problem, PlanCompleter(run.pricer)
        drawn = (draw_partition(problem, rng) for _ in itertools.count())
        others = itertools.chain(chain_partitions(problem), drawn)
        until_found = itertools.takewhile(lambda _: run.plan is None, others)
        for partition in itertools.chain(shape_partitions(run), until_found):
            if not run.step():
                break
            if partition is not None:
                offer_partition(run, completer, partition)

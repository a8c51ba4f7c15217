"""`exhaustive`: all plans of the plan space for a few devices and layers; the oracle for every other solver.

It enumerates all assignments of devices to pipelines of stages of replicas, one representative for equal devices
(`assignments.py`), completes every pipeline in all ways (`candidates.py`), and prices all plans made of those. One rule
makes it fast: adding something to a plan never shortens its step. Therefore

- the work of a stage alone bounds its pipeline, and a pipeline alone bounds its plan;
- all pipelines, each alone, followed by gradient sync, bound the plan too (`sync_bounds.py`);
- a stage recomputes as little as fits, since more adds work.

A plan is priced unless such a bound exceeds the best step time known; the most promising come first. A short
`local_search` first finds a good step time. Its plan is not used, so that a plan outside the plan space would be
noticed.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise, product
from math import prod

import numpy as np

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.holders import parameter_holders
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SHARDING_GROUPS, recompute_policies, schedules, sharding_stages
from hexiopt.solving import Budget, Capabilities
from solvers.core.search import Search
from solvers.exact.assignments import DeviceAssignment, DeviceClasses, PlacedDevices
from solvers.exact.candidates import Candidate, Candidates, leaner_stages
from solvers.exact.sample_allocation import GlobalChoices
from solvers.exact.splits import Layers, all_layer_cuts, least_longest
from solvers.exact.sync_bounds import ReplicaTail, SyncBound, tails_s
from solvers.frame.solver import SearchSolver
from solvers.heuristics.local_search import LocalSearch

MOST_DEVICES = 6
MOST_LAYERS = 8
_START_STEPS = 40  # steps of the initial local search per pair of devices
_START_SHARE = 0.2  # most of the time limit for it
_SLACK = 1e-9  # of a step time, for rounding


class Exhaustive(SearchSolver):
    """Every plan of a small problem, but for those that a bound rules out.

    A step is one plan priced.
    """

    name = "exhaustive"
    capabilities = Capabilities(kind="oracle", pricers="cost_model", max_devices=MOST_DEVICES, max_layers=MOST_LAYERS)

    def search(self, run: Search, rng: random.Random) -> None:
        """The best plan, proven if the budget suffices."""
        run.exhausted = Enumeration(run).run()


@dataclass(frozen=True)
class SearchNode:
    """The plans of an assignment with fixed layers, schedule and sharding.

    For each pipeline its `candidates`, and later the `bounded` ones: (bound of the step time, index, candidate),
    ascending.
    """

    assignment: DeviceAssignment
    global_choices: GlobalChoices
    sharding: Sharding
    candidates: tuple[Sequence[Candidate], ...]
    bounded: tuple[Sequence[tuple[float, int, Candidate]], ...] = ()


class Enumeration:
    """All plans of one search."""

    def __init__(self, search: Search) -> None:
        self.search, self.problem, self.model = search, search.problem, search.exact_pricer
        self.device_classes = DeviceClasses.of(self.problem)
        self.candidates = Candidates(self.model)
        self._batch = self.problem.workload.global_batch
        self._bar_s = float("inf")
        self._sync_bound = SyncBound(self.device_classes)
        # With infinitely fast links inside machines, the order of a ring inside a machine does not matter.
        self._loose_model = PlanPricer(_with_free_machines(self.problem))

    @property
    def limit_s(self) -> float:
        """Plans that take at least this long need not be priced."""
        return min(self.search.best_s, self._bar_s)

    def run(self) -> bool:
        """Offer all plans that may be the best; False if the budget runs out first."""
        start = self._start()
        assignments: tuple[list[DeviceAssignment], list[DeviceAssignment]] = ([], [])  # without replicas, and with
        for assignment in self.device_classes.assignments():
            if not self.search.should_continue():
                break
            assignments[any(len(stage) > 1 for placement in assignment for stage in placement)].append(assignment)
        bar_s = start.best_s * (1 + _SLACK)
        # First those without replicas, which are fewer: a good plan among them bounds the others.
        if self.search.should_continue() and all(self.examine(part, bar_s) for part in assignments):
            assert self.search.plan is not None or start.plan is None, "a plan outside of the plan space"
            return True
        if start.plan is not None and self.search.plan is None:
            self.search.offer(start.plan, start.cost)
        return False

    def _start(self) -> Search:
        """A local search, longer for more devices."""
        budget, devices = self.search.budget, len(self.problem.usable_devices)
        steps = min(_START_STEPS * devices**2, budget.max_steps or 1 << 30)
        other = self.search.child()
        share = _START_SHARE if budget.max_steps is None else 1.0  # where steps are counted, the clock has no influence
        other.budget = Budget(budget.time_limit_s * share, steps)
        LocalSearch().search(other, random.Random(self.search.seed))
        if other.stopped:
            self.search.stop()
        return other

    def examine(self, assignments: Iterable[DeviceAssignment], bar_s: float) -> bool:
        """Offer all plans of `assignments` that may be the best and take less than `bar_s`, the most promising first.

        False if the budget runs out first. Nodes are bounded, then bounded more tightly, then their plans are priced.
        """
        self._bar_s = bar_s
        left: list[tuple[float, int, SearchNode]] = []
        for assignment in assignments:
            if not self.search.should_continue():
                return False
            cuts = self._cuts(assignment)
            sync_bounds_s = self._sync_bounds_s(assignment, cuts)
            if min(own.min() for own in sync_bounds_s.values()) >= self.limit_s:
                continue
            for global_choices in self._global_choices(assignment):
                if not self.search.should_continue():
                    return False
                for bound_s, node in self._nodes(assignment, global_choices, cuts, sync_bounds_s):
                    left.append((bound_s, len(left), node))
        heapify(left)
        while left and left[0][0] < self.limit_s:
            if not self.search.should_continue():
                return False
            _, number, node = heappop(left)
            if node.bounded:
                if not self._combine(node, ()):
                    return False
                continue
            bound_s, node = self._bounded(node)
            if bound_s < self.limit_s:
                heappush(left, (bound_s, number, node))
        return True

    def _global_choices(self, assignment: DeviceAssignment) -> Iterator[GlobalChoices]:
        """All combinations of schedule, policy set and ZeRO stage."""
        workload, policies = self.problem.workload, recompute_policies(self.problem.workload)
        sets = [policies] if self.problem.space.recompute_per_stage else [(policy,) for policy in policies]
        holders = _most_holders(assignment)
        stages = sharding_stages(workload)
        # Where no parameter has two holders, the lowest ZeRO stage represents all.
        shares = holders > 1 or (self.problem.model.tied_embeddings and len(assignment[0]) > 1)
        for schedule, chosen, stage in product(schedules(workload), sets, stages if shares else stages[:1]):
            if stage < 2 or (schedule.lockstep and _in_lockstep(assignment)):
                yield GlobalChoices(schedule, chosen, stage, holders if stage else 1)

    def _shardings(self, global_choices: GlobalChoices) -> list[Sharding]:
        """All sharding groups that differ."""
        differ = global_choices.holders > 1 and len(self.problem.usable_by_machine) > 1
        differ = differ and self.problem.space.machine_sharding
        return [Sharding(global_choices.sharding, groups) for groups in (SHARDING_GROUPS if differ else ("all",))]

    def _cuts(self, assignment: DeviceAssignment) -> list[tuple[Layers, ...]]:
        """For each pipeline, all ways to divide the layers among its stages."""
        space, layers = self.problem.space, self.problem.model.num_layers
        chunks = space.max_chunks if any(one.chunked for one in schedules(self.problem.workload)) else 1
        return [all_layer_cuts(layers, len(placement), chunks, not space.uneven_layers) for placement in assignment]

    def _sync_bounds_s(self, assignment: DeviceAssignment, cuts: Sequence[Sequence[Layers]]) -> dict[str, Floats]:
        """For each kind of sharding groups, the least seconds of gradient sync for all combinations of `cuts`."""
        if len(self.problem.usable_by_machine) > 1 and _most_holders(assignment) > 1:
            return {groups: self._sync_bound.seconds(assignment, groups, cuts) for groups in SHARDING_GROUPS}
        return dict.fromkeys(SHARDING_GROUPS, np.zeros(prod(map(len, cuts))))

    def _nodes(
        self,
        assignment: DeviceAssignment,
        global_choices: GlobalChoices,
        cuts: Sequence[Sequence[Layers]],
        sync_bounds_s: dict[str, Floats],
    ) -> Iterator[tuple[float, SearchNode]]:
        """Nodes of the plans of an assignment that may be the best, by the layers of their stages, with bounds.

        A plan takes at least as long as the longest of its pipelines alone. Up to ZeRO-1, sync starts no earlier than
        when some replica of every pipeline has ended, or, where it runs beside the last backward, has begun that; and
        it takes its own time.
        """
        tables = self._by_layers(assignment, global_choices)
        if tables is None:
            return
        alone_s = self._least_s(tables, cuts, lambda one: max(one.ends_s))
        if not (alone_s < self.limit_s).any():
            return
        after = self.model.framework.gradient_sums == "after"
        first_s = self._least_s(tables, cuts, lambda one: min(one.ends_s if after else one.begins_s))
        also_plain = global_choices.schedule.chunked and global_choices.schedule.plain() in schedules(
            self.problem.workload
        )
        shape = [len(own) for own in cuts]
        for sharding in self._shardings(global_choices):
            sync_bound_s = sync_bounds_s[sharding.groups] if isinstance(sharding.groups, str) else 0.0
            bounds_s = np.maximum(alone_s, sync_bound_s + (first_s if sharding.stage < 2 else 0.0))
            for k in np.flatnonzero(bounds_s < self.limit_s).tolist():
                layers = [own[int(at)] for own, at in zip(cuts, np.unravel_index(k, shape), strict=True)]
                if also_plain and all(len(stages[0]) == 1 for stages in layers):
                    continue
                if _counts_once(assignment, layers):
                    own = tuple(table[one] for table, one in zip(tables, layers, strict=True))
                    for together in (own,) if sharding.stage < 2 else _in_turns(own):
                        yield float(bounds_s[k]), SearchNode(assignment, global_choices, sharding, together)

    def _by_layers(
        self, assignment: DeviceAssignment, global_choices: GlobalChoices
    ) -> list[dict[Layers, list[Candidate]]] | None:
        """For each pipeline, its candidates by the layers of their stages; None where they cannot process the batch."""
        alone = [self.device_classes.labeled((placement,))[0] for placement in assignment]
        tops = [
            min(
                self._batch - len(alone) + 1,
                self.candidates.most_sequences(placement, self.limit_s, global_choices.policies[0]),
            )
            for placement in alone
        ]
        spare = sum(tops) - self._batch
        if spare < 0:
            return None
        found = []
        for placement, top in zip(alone, tops, strict=True):
            table: dict[Layers, list[Candidate]] = {}
            for n in range(max(1, top - spare), top + 1):
                for one in self.candidates.of(placement, n, global_choices, self.limit_s):
                    table.setdefault(one.layers, []).append(one)
            if not table:
                return None
            found.append(table)
        return found

    def _least_s(
        self,
        tables: Sequence[dict[Layers, list[Candidate]]],
        cuts: Sequence[Sequence[Layers]],
        end: Callable[[Candidate], float],
    ) -> Floats:
        """For all combinations of layers, the least possible longest `end` of the pipelines alone; see
        `least_longest`.
        """
        seconds = []
        for table, own in zip(tables, cuts, strict=True):
            times = np.full((len(own), self._batch + 1), np.inf)
            for k, layers in enumerate(own):
                for one in table.get(layers, ()):
                    n = one.pipeline.num_sequences
                    times[k, n] = min(times[k, n], end(one))
            seconds.append(times)
        return least_longest(seconds, self._batch)

    def _bounded(self, node: SearchNode) -> tuple[float, SearchNode]:
        """The node with bounds for its candidates: after a replica ends, at least sync and the optimiser follow."""
        plan = _plan(self.device_classes.labeled(node.assignment), [own[0].pipeline for own in node.candidates], node)
        model = self._loose_model if self._labels_matter(plan) else self.model
        bounded, times = [], []
        for own, tail in zip(node.candidates, tails_s(model, plan, node.global_choices.holders), strict=True):
            promising = [one for one in own if _step_s(one, tail) < self.limit_s]
            exact = [self.candidates.exact(one, node.global_choices) for one in promising]
            each = [(_step_s(one, tail), k, one) for k, one in enumerate(exact)]
            bounded.append(sorted(item for item in each if item[0] < self.limit_s))
            least = np.full((1, self._batch + 1), np.inf)
            for bound_s, _, one in reversed(bounded[-1]):
                least[0, one.pipeline.num_sequences] = bound_s
            times.append(least)
        return float(least_longest(times, self._batch)[0]), replace(node, bounded=tuple(bounded))

    def _combine(self, node: SearchNode, chosen: tuple[Candidate, ...]) -> bool:
        """Offer the plans of `chosen` candidates for the first pipelines and any of the node's candidates for the
        others; False if the budget runs out first.
        """
        bounded = node.bounded
        if len(chosen) == len(bounded):
            self._price(node, [one.pipeline for one in chosen])
            return True
        done, more = sum(one.pipeline.num_sequences for one in chosen), bounded[len(chosen) + 1 :]
        others = [[one.pipeline.num_sequences for bound_s, _, one in own if bound_s < self.limit_s] for own in more]
        sums = _sums(others)
        for bound_s, _, one in bounded[len(chosen)]:
            if bound_s >= self.limit_s:
                return True
            if not self.search.should_continue():
                return False
            left = self._batch - done - one.pipeline.num_sequences
            if left >= 0 and sums >> left & 1 and not self._combine(node, (*chosen, one)):
                return False
        return True

    def _labels_matter(self, plan: Plan) -> bool:
        """Whether the step time may depend on which of equal devices is which."""
        machines = self.problem.usable_by_machine
        if all(len(own) == 1 for own in self.device_classes.devices):
            return False
        if len(machines) == 1 and not self.problem.cluster.machines[next(iter(machines))].intra_links:
            return False
        return any(holders.shape[1] > 2 for holders in parameter_holders(plan.pipelines, self.problem.model).holders)

    def _price(self, node: SearchNode, pipelines: Sequence[Pipeline]) -> None:
        """Offer the plans that recompute as little as fits, under all labelings of equal devices if these matter."""
        plan = _plan(self.device_classes.labeled(node.assignment), pipelines, node)
        if check(self.problem, plan):
            return
        left, seen = [plan], {plan}
        while left:
            plan = left.pop()
            cost = self._offer(plan)
            if cost.fits:
                self._relabel(plan, cost, node)
            elif cost.step_time_s < self.limit_s:
                for leaner in _leaner(plan, cost, node.global_choices.policies, self.problem.space.recompute_per_layer):
                    if leaner not in seen:
                        seen.add(leaner)
                        left.append(leaner)

    def _relabel(self, plan: Plan, cost: Cost, node: SearchNode) -> None:
        """Offer a plan of `cost` under the other labelings of equal devices if these matter."""
        if not self._labels_matter(plan):
            return
        # With states sharded within machines, labels also say who waits for whom.
        loose = plan.sharding.groups == "all" and self._loose_model.price(plan, cost.pipelines)
        if loose and loose.step_time_s * (1 + _SLACK) >= self.limit_s:
            return
        for labeled in islice(self.device_classes.labelings(node.assignment), 1, None):
            other = _plan(labeled, plan.pipelines, node)
            self.search.step()
            if self.model.price(other, cost.pipelines).step_time_s < self.limit_s:
                self.search.offer(other)

    def _offer(self, plan: Plan) -> Cost:
        self.search.step()
        return self.search.offer(plan)


def _step_s(candidate: Candidate, tails: Sequence[ReplicaTail]) -> float:
    """The least step time with a candidate whose replicas are followed by `tails`."""
    return max(tail.step_s(*times) for *times, tail in zip(candidate.ends_s, candidate.last_s, tails, strict=True))


def _most_holders(assignment: DeviceAssignment) -> int:
    """The most replicas that may hold one layer."""
    return sum(max(map(len, placement)) for placement in assignment)


def _in_lockstep(assignment: DeviceAssignment) -> bool:
    """Whether ZeRO-2 and 3 can gather stage by stage: equal numbers of stages, and one TP degree in each."""
    if len({len(placement) for placement in assignment}) > 1:
        return False
    stages = zip(*assignment, strict=True)
    return all(len({len(group) for replicas in together for group in replicas}) == 1 for together in stages)


def _in_turns(found: Sequence[Sequence[Candidate]]) -> Iterator[tuple[Sequence[Candidate], ...]]:
    """The candidates that can run together under ZeRO-2 and 3: equal layers, and equal numbers of micro-batches."""
    if len({own[0].layers for own in found}) > 1:
        return
    for count in sorted(set.intersection(*({one.pipeline.num_micro_batches for one in own} for own in found))):
        yield tuple([one for one in own if one.pipeline.num_micro_batches == count] for own in found)


def _counts_once(assignment: DeviceAssignment, layers: Sequence[Layers]) -> bool:
    """Whether equal placements are in the order of their layers, so that each combination counts once."""
    pairs = list(zip(assignment, layers, strict=True))
    return all(a[0] != b[0] or a[1] <= b[1] for a, b in pairwise(pairs))


def _sums(choices: Sequence[Sequence[int]]) -> int:
    """All sums of one number from each of `choices`, as a bit set."""
    found = 1
    for own in choices:
        reached = 0
        for n in set(own):
            reached |= found << n
        found = reached
    return found


def _plan(labeled: Sequence[PlacedDevices], pipelines: Sequence[Pipeline], node: SearchNode) -> Plan:
    """The plan of `pipelines` on the devices `labeled`."""
    return Plan(
        tuple(
            replace(
                pipeline,
                stages=tuple(
                    Stage.of_replicas(
                        tuple(
                            replace(own, devices=group) for own, group in zip(stage.replicas, stage_groups, strict=True)
                        ),
                        stage.layers,
                        stage.recompute,
                    )
                    for stage, stage_groups in zip(pipeline.stages, groups, strict=True)
                ),
            )
            for pipeline, groups in zip(pipelines, labeled, strict=True)
        ),
        node.global_choices.schedule,
        node.sharding,
    )


def _leaner(plan: Plan, cost: Cost, policies: tuple[str, ...], per_layer: bool) -> Iterator[Plan]:
    """The plans whose stages recompute one step more where they do not fit."""
    each = [
        leaner_stages(pipeline.stages, [one.excess_bytes > 0 for one in own.stages], policies, per_layer)
        for pipeline, own in zip(plan.pipelines, cost.pipelines, strict=True)
    ]
    for chosen in product(*each):
        pipelines = zip(plan.pipelines, chosen, strict=True)
        yield replace(plan, pipelines=tuple(replace(pipeline, stages=stages) for pipeline, stages in pipelines))


def _with_free_machines(problem: Problem) -> Problem:
    """The problem with infinitely fast links inside machines."""
    machines = tuple(
        replace(machine, intra_bandwidth_bytes_per_s=float("inf"), intra_links=())
        for machine in problem.cluster.machines
    )
    return replace(problem, cluster=replace(problem.cluster, machines=machines))

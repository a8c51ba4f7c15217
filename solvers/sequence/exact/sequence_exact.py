"""`sequence_exact`: the best plan of pipelines of one sequence stage each, with proof, for small clusters.

It searches jointly: how many pipelines, and which devices form each (some may stay unused); their shares of the batch
and micro-batch sizes; ZeRO-0 or 1, over all devices or those of a machine; and for every stage its recompute policy,
its groups, their order and that of the devices in them, the token order, the heads of every device, and its tokens in
whole *quanta*, of which a sequence has `resolution`. Zigzag order is considered where a quantum has an even number of
tokens. Excluded are pipelines of several stages, tensor parallelism and replicas, policies layer by layer, stated
sharding groups, ZeRO-2 and 3, a second schedule (with one stage all take equally long, and the one that needs least
memory is used), and stages a thousand times slower than shares by speed.

No plan of this space has a smaller step time than `Result.restricted_bound`, up to 2e-6 of it. `Result.bound_s` holds
for the whole plan space, so `status` is `optimal` only where it proves that. Where layouts can cross different parts of
the network (machines with several interfaces, uplinks, stated links) and several pipelines share it, the bound ignores
sharing that is not common to all layouts, and a gap may remain; as where several pipelines sum gradients beside their
last backwards, of which the bound knows only that each is within a micro-batch.

`ExactPlans` searches subspaces best first, `stage_solver.py` the skeletons of a stage by their lower bounds, and
`skeleton_program.py` is the CP-SAT model of one skeleton; where it is a relaxation, its solutions are priced and cut
off. CP-SAT has one worker and counts its work, so the same seed and steps give the same plan.
"""

import heapq
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import positions
from hexiopt.solving import Capabilities
from hexiopt.solving.result import RestrictedBound
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.sequence.exact.batch_split import BatchSplit, best_split
from solvers.sequence.exact.layout_skeletons import device_sets
from solvers.sequence.exact.quanta_grid import default_resolution
from solvers.sequence.exact.stage_solver import AGREEMENT, BestStage, StageSolver, StageWork
from solvers.sequence.grouping import DeviceGroups, Signatures

_BEGUN = 12  # number of subspaces whose plans are offered before the proof,
_BEGINNING = 0.2  # within this share of the time limit
_LONG_S = 1e6  # longer than any step


@dataclass(frozen=True, slots=True)
class PipelineTail:
    """Least seconds from the end of a pipeline to that of the step; and from before its last micro-batch, beside whose
    backward gradients may be summed, of which it is only known that it takes no longer than the micro-batch."""

    after_s: float
    from_last_s: float

    def step_s(self, batches: int, stage_s: float) -> float:
        """The least step of a pipeline of so many micro-batches of `stage_s`."""
        return max(batches * stage_s + self.after_s, (batches - 1) * stage_s + self.from_last_s)

    def stage_limit_s(self, step_s: float, batches: int) -> float:
        """The longest micro-batch, of so many, within a step of `step_s`; below 0 where there is none."""
        left_s = step_s - self.from_last_s
        limit_s = left_s / (batches - 1) if batches > 1 else inf if left_s > 0 else -1.0
        return min((step_s - self.after_s) / batches, limit_s)


@dataclass(frozen=True)
class Subspace:
    """A part of the plan space: the devices of each pipeline, the sharding, the policies allowed, what follows each
    pipeline, and by how many pipelines the network resources are shared that all of its layouts cross.
    """

    sets: DeviceGroups
    sharding: Sharding
    policies: tuple[str, ...]
    tails: tuple[PipelineTail, ...]
    sharers: tuple[tuple[int, int], ...]


class ExactPlans:
    """The search for one problem at a `resolution` in quanta per sequence."""

    def __init__(self, search: Search, resolution: int) -> None:
        self._search, self._model, self._problem = search, search.exact_pricer, search.problem
        self._signatures = Signatures(search.problem)
        self._resolution = resolution
        self._stages = StageSolver(self._model, resolution, search.should_continue, search.step, search.left_s)
        self._schedule = default_schedule(self._problem.workload)
        self._known: dict[tuple[object, StageWork], BestStage] = {}
        self._begun: dict[tuple[object, StageWork], BestStage] = {}
        self._open_s = float("inf")  # the least bound of subspaces whose plan does not attain it
        self.bound_s = 0.0

    def run(self) -> bool:
        """Offer plans until the best is proven (True) or the budget is spent; `bound_s` always holds for all plans of
        the space.
        """
        search, order = self._search, count()
        waiting: list[tuple[float, int, Subspace]] = []
        begun = False
        for subspace in self._subspaces():
            if (
                waiting and not begun and not search.should_continue(_BEGINNING / 2)
            ):  # with many subspaces, first find a plan
                begun = True
                self._begin([subspace for _, _, subspace in heapq.nsmallest(_BEGUN, waiting)])
            if begun and not search.should_continue():
                return False
            split = self._split(subspace)
            if split is not None:
                heapq.heappush(waiting, (split.end_s, next(order), subspace))
        if not begun:
            self._begin([subspace for _, _, subspace in heapq.nsmallest(_BEGUN, waiting)])
        while waiting:
            bound_s, _, subspace = waiting[0]
            self.bound_s = max(self.bound_s, min(bound_s, search.best_s, self._open_s))
            if bound_s >= search.best_s * (1 - AGREEMENT):
                break
            if not search.should_continue():
                return False
            split = self._split(subspace)
            if split is not None and split.end_s <= bound_s:
                place = self._first_open(subspace, split)
                if place is None:
                    self._finish(subspace, split)
                    heapq.heappop(waiting)
                    continue
                done = self._solve(subspace, split, place)
                self._offer(subspace, split)  # not yet known to be the best of the subspace
                if not done:
                    return False
                split = self._split(subspace)
            if split is None:
                heapq.heappop(waiting)
            else:
                heapq.heapreplace(waiting, (split.end_s, next(order), subspace))
        self.bound_s = min(search.best_s, self._open_s)
        return self._open_s >= search.best_s * (1 - AGREEMENT)

    # ---------------------------------------------------------------- parts

    def _subspaces(self) -> Iterator[Subspace]:
        problem, space = self._problem, self._problem.space
        devices, batch = problem.usable_devices, problem.workload.global_batch
        counts = range(1, min(len(devices), batch) + 1) if space.num_pipelines is None else (space.num_pipelines,)
        policies = recompute_policies(problem.workload)
        choices = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        for pipelines in counts:
            for sets in device_sets(self._signatures, devices, pipelines, min(len(devices), self._resolution)):
                if not space.uneven_structure and len(set(map(len, sets))) > 1:
                    continue
                for sharding in self._shardings(sets):
                    tails, sharers = self._tails(sets, sharding), self._sharers(sets)
                    for own in choices:
                        yield Subspace(sets, sharding, own, tails, sharers)

    def _shardings(self, sets: DeviceGroups) -> Iterator[Sharding]:
        """ZeRO-0, ZeRO-1 over all holders, and, where that differs, ZeRO-1 over those of a machine."""
        machines = {int(self._problem.cluster.machine_of[d]) for own in sets for d in own}
        for stage in sharding_stages(self._problem.workload):
            if stage < 2:
                yield Sharding(stage)
            if stage == 1 and len(machines) > 1 and self._problem.space.machine_sharding:
                yield Sharding(stage, "machine")

    def _tails(self, sets: DeviceGroups, sharding: Sharding) -> tuple[PipelineTail, ...]:
        """The least time from the end of each pipeline, and of all its micro-batches but one, to the end of the step.

        It does not depend on the layout, since all devices hold all parameters.
        """
        plan = self._plan(
            tuple((self._equal(own), "none") for own in sets), BatchSplit(((1, 1),) * len(sets), 0.0), sharding
        )
        costs = self._model.pipelines(plan)

        def tail_s(p: int, last_s: float) -> float:
            """The step where pipeline p ends at 0 with a backward of `last_s`, all others having ended long before."""
            ended = []
            for q, cost in enumerate(costs):
                (stage,), end_s = cost.stages, 0.0 if q == p else -_LONG_S
                one = stage.executors[0].with_times(0.0, last_s if q == p else 0.0)
                ended.append(
                    replace(cost, stages=(replace(stage, executors=(one,)),), executor_end_s=(end_s,), end_s=end_s)
                )
            return self._model.price(plan, ended).step_time_s

        return tuple([PipelineTail(tail_s(p, _LONG_S), tail_s(p, 0.0)) for p in range(len(sets))])

    def _sharers(self, sets: DeviceGroups) -> tuple[tuple[int, int], ...]:
        """Network resources that every layout of several pipelines crosses, with the number of those pipelines.

        For pipelines that span machines, these are the interfaces of machines with only one. (If no message left a
        machine, its devices would not be joined with the others.)
        """
        cluster, network = self._problem.cluster, self._problem.cluster.network
        users: dict[int, int] = {}
        for own in sets:
            machines = {int(cluster.machine_of[d]) for d in own}
            crossed = {
                int(ports[d])
                for d in own
                for ports in (network.transmitters, network.receivers)
                if len(machines) > 1 and cluster.machines[int(cluster.machine_of[d])].num_interfaces == 1
            }
            for r in crossed:
                users[r] = users.get(r, 0) + 1
        return tuple(sorted((r, n) for r, n in users.items() if n > 1))

    # ---------------------------------------------------------------- splits

    def _split(self, subspace: Subspace) -> BatchSplit | None:
        """The best split of the batch by the current bounds of the stages."""
        batch, space = self._problem.workload.global_batch, self._problem.space
        seconds = []
        for p in range(len(subspace.sets)):
            own = {}
            for size in space.micro_batch_sizes(batch):
                for n in range(1, batch // size + 1):
                    stage_s = self._best(subspace, p, size, n).bound_s
                    if stage_s < float("inf"):
                        own[size, n] = subspace.tails[p].step_s(n, stage_s)
            seconds.append(own)
        return best_split(seconds, batch, space.uneven_batch)

    def _key(self, subspace: Subspace, p: int, size: int, batches: int) -> tuple[object, StageWork]:
        """A key, equal for stages with equal times and memory."""
        work = self._work(subspace, p, size, batches)
        devices = subspace.sets[p]
        crossed = set(dict(work.sharers))
        alike: object = devices if crossed else self._signatures.of(devices)
        return alike, work

    def _work(self, subspace: Subspace, p: int, size: int, batches: int) -> StageWork:
        machine_of = self._problem.cluster.machine_of
        used = [d for own in subspace.sets for d in own]
        together = subspace.sharding.groups == "machine"
        holders = tuple(
            sum(machine_of[d] == machine_of[e] for e in used) if together else len(used) for d in subspace.sets[p]
        )
        held = most_in_flight(self._schedule, positions(1, batches)[0])
        several = len({int(machine_of[d]) for d in subspace.sets[p]}) > 1
        return StageWork(
            size, held, subspace.sharding.stage, holders, subspace.policies, subspace.sharers if several else ()
        )

    def _best(self, subspace: Subspace, p: int, size: int, batches: int) -> BestStage:
        """The bound and, where known, the layout of a stage."""
        key = alike, work = self._key(subspace, p, size, batches)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = BestStage(self._stages.lower_bound_s(subspace.sets[p], size))
        relaxed = self._known.get((alike, self._widest(work)))
        if relaxed is not None and relaxed.bound_s > found.bound_s:
            found = self._known[key] = replace(found, bound_s=relaxed.bound_s)
        return found

    def _widest(self, work: StageWork) -> StageWork:
        """The same work with its states sharded as widely as possible."""
        zero = max(stage for stage in sharding_stages(self._problem.workload) if stage < 2)
        return replace(work, zero=zero, holders=(len(self._problem.usable_devices),) * len(work.holders))

    def _first_open(self, subspace: Subspace, split: BatchSplit) -> int | None:
        """The first pipeline of the split whose stage is not solved yet; None where all are."""
        stages = (self._best(subspace, p, *batches) for p, batches in enumerate(split.batches))
        return next((p for p, best in enumerate(stages) if not best.is_exact), None)

    def _solve(self, subspace: Subspace, split: BatchSplit, p: int) -> bool:
        """Solve the stage of pipeline p; False where the budget runs out first."""
        (size, batches), devices = split.batches[p], subspace.sets[p]
        self._best(subspace, p, size, batches)
        alike, work = self._key(subspace, p, size, batches)
        limit_s = subspace.tails[p].stage_limit_s(self._search.best_s, batches)
        # First with the widest sharding: that bound holds for all subspaces, and suffices where the layout fits anyway.
        for wider in dict.fromkeys((self._widest(work), work)):
            known = self._known.get((alike, wider), BestStage(0.0))
            if not known.is_exact and known.bound_s < limit_s:
                found = self._stages.best(devices, wider, limit_s)
                if found.layout is not None:
                    found = replace(found, layout=_relabel(found.layout, {d: k for k, d in enumerate(devices)}))
                known = self._known[alike, wider] = replace(found, bound_s=max(found.bound_s, known.bound_s))
            if not self._search.should_continue():
                return False
            if known.layout is None and known.bound_s >= limit_s:
                break
            if known.layout is not None:
                layout = _relabel(known.layout, dict(enumerate(devices)))
                if self._stages.fits(layout, known.policy, work):
                    self._known[alike, work] = known
                    break
        return True

    def _begin(self, subspaces: Sequence[Subspace]) -> None:
        """Offer plans of good, unproven stages for some subspaces."""
        for subspace in subspaces:
            if not self._search.should_continue(_BEGINNING):
                return
            split = self._split(subspace)
            assert split is not None, "it waits"
            stages = []
            for p, (batches, devices) in enumerate(zip(split.batches, subspace.sets, strict=True)):
                alike, work = self._key(subspace, p, *batches)
                if (alike, work) not in self._begun:
                    best = self._stages.good(devices, work)
                    if best.layout is not None:
                        best = replace(best, layout=_relabel(best.layout, {d: k for k, d in enumerate(devices)}))
                    self._begun[alike, work] = best
                stages.append(self._begun[alike, work])
            self._offer_stages(subspace, split, stages)

    def _finish(self, subspace: Subspace, split: BatchSplit) -> None:
        """Offer the best plan of a solved subspace."""
        if self._offer(subspace, split) > split.end_s * (1 + 3 * AGREEMENT):
            # Its layouts share network resources that not all layouts share, so others may be faster.
            self._open_s = min(self._open_s, split.end_s)

    def _offer(self, subspace: Subspace, split: BatchSplit) -> float:
        """Offer the plan of a split if every pipeline has a layout; returns its step time, else infinity."""
        return self._offer_stages(
            subspace, split, [self._best(subspace, p, *own) for p, own in enumerate(split.batches)]
        )

    def _offer_stages(self, subspace: Subspace, split: BatchSplit, stages: Sequence[BestStage]) -> float:
        chosen = []
        for best, devices in zip(stages, subspace.sets, strict=True):
            if best.layout is None:
                return float("inf")
            chosen.append((_relabel(best.layout, dict(enumerate(devices))), best.policy))
        return self._search.offer(self._plan(tuple(chosen), split, subspace.sharding)).step_time_s

    # ---------------------------------------------------------------- plans

    def _plan(self, stages: tuple[tuple[SequenceParallel, str], ...], split: BatchSplit, sharding: Sharding) -> Plan:
        layers = ((0, self._problem.model.num_layers),)
        return Plan(
            tuple(
                Pipeline((Stage(layout, layers, (policy,)),), batches, size)
                for (layout, policy), (size, batches) in zip(stages, split.batches, strict=True)
            ),
            self._schedule,
            sharding,
        )

    def _equal(self, devices: tuple[int, ...]) -> SequenceParallel:
        """A ring of shards that are as equal as possible."""
        seq_len, many = self._problem.workload.seq_len, len(devices)
        heads = self._problem.model.num_heads
        return SequenceParallel(
            tuple(
                SequenceGroup((d,), (seq_len // many + (k < seq_len % many),), (heads,)) for k, d in enumerate(devices)
            )
        )


def _relabel(layout: SequenceParallel, to: Mapping[int, int]) -> SequenceParallel:
    """The layout with its devices renumbered."""
    groups = (replace(own, devices=tuple(to[d] for d in own.devices)) for own in layout.groups)
    return replace(layout, groups=tuple(groups))


MOST_DEVICES = 6


@dataclass(frozen=True)
class SequenceExact(SearchSolver):
    """Sequence layouts of a small problem, proved optimal on a grid of tokens.

    `resolution`: quanta per sequence, a divisor of its length; None takes the largest up to 16 for which a quantum
    has an even number of tokens. A step is one CP-SAT model solved.
    """

    resolution: int | None = None

    name = "sequence_exact"
    capabilities = Capabilities(kind="oracle", sequence="only", pricers="cost_model", max_devices=MOST_DEVICES)

    def __post_init__(self) -> None:
        given = self.resolution
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise InputError(f"solver.resolution: {given!r} is not a number of quanta; choose a whole number from 1")

    def search(self, run: Search, rng: random.Random) -> None:
        """Raises InputError for a resolution that does not divide a sequence, and for a workload that must be in ZeRO-2
        or 3."""
        problem, resolution = run.problem, self._resolution(run.problem)
        zero = sharding_stages(problem.workload)[0]
        if zero > 1:
            raise InputError(
                f"workload: optimizer_sharding: {zero} does not work with the sequence layouts of solver={self.name}; "
                "choose auto, 0 or 1"
            )
        run.remedy = "it plans pipelines of one sequence stage, so try solver=portfolio"
        plans = ExactPlans(run, resolution)
        if problem.space.num_stages in (None, 1):
            plans.run()
        space = f"plans whose pipelines have one stage each, with tokens in multiples of 1/{resolution} of a sequence"
        run.restricted_bound = RestrictedBound(max(run.bound_s, plans.bound_s), space)

    def _resolution(self, problem: Problem) -> int:
        seq_len = problem.workload.seq_len
        if self.resolution is None:
            return default_resolution(seq_len, len(problem.usable_devices))
        if seq_len % self.resolution:
            raise InputError(
                f"solver.resolution: {self.resolution} quanta do not divide a sequence of {seq_len} tokens; "
                "choose a divisor"
            )
        return self.resolution

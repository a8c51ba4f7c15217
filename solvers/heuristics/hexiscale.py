"""`hexiscale`: HexiScale's hierarchical graph partition (arXiv 2409.01143, section 4), both phases iterating.

Phase 1 partitions the GPUs into one group per pipeline. Weights are a mix of reciprocal bandwidth (fat links
fall between pipelines, where gradients travel) and bandwidth (they stay inside, for activations); the mix and
the number of groups are iterated. Phase 2 builds each pipeline: a secondary partition on true bandwidth collects
GPUs with fat links; inside each part, per machine, TP degrees are searched; parts are ordered along fat links,
exactly where they are few. Where the paper is silent: TP degrees are improved one machine at a time by the
pipeline's rate, and most iterations partition the GPUs of some pipelines of the best plan again, at times with those
that it leaves unused, into as many pipelines, one more or one fewer.
"""

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.problem import Problem
from hexiopt.reading import whole_in
from hexiopt.solving import Capabilities
from solvers.completion.completer import PlanCompleter
from solvers.completion.layers import LayerSplitter
from solvers.completion.pricing import PricedPlan
from solvers.core.interleaving import draw_schedule
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup, devices_by_machine
from solvers.core.search import Search
from solvers.core.zero import LOCKSTEP, draw_sharding_groups, draw_zero_stage
from solvers.frame.solver import SearchSolver, offer_partition
from solvers.frame.starts import cut
from solvers.heuristics.graph import DeviceGraph, device_graph, partition_graph
from solvers.heuristics.incumbents import Incumbent, Style
from solvers.heuristics.local_search import known_partitions
from solvers.heuristics.stage_order import MOST_TAU, best_order

_WHOLE_CLUSTER = 0.25  # share of iterations that partition the whole cluster
_NEXT_BEST = 0.4  # chance to pass over a number of pipelines for the next best one
_MOST_PIPELINES = 64
_SOME_MACHINES = 0.2  # share of new partitions that leave machines unused
_SEARCHED_BLOCKS = 3  # machines of a pipeline whose TP degrees an iteration searches
_FROM_GOOD_PLAN = 0.8  # chance to begin with the TP degrees of a good plan
_OTHER_STYLE = 0.25  # share of iterations with another micro-batch size, schedule, sharding or order of kinds
_OTHER_POLICIES = 0.4  # share of iterations that may begin with more recomputation, where all stages have one policy
_IDLE = 0.3  # chance that new pipelines also take the GPUs that a good plan leaves unused
_UNEVEN = 0.5  # share of partitions into unequal pipelines
_EXPONENTS = (1.0, 1.0, 0.5, 0.0)  # of a GPU's speed, in its weight
_TIE = 1e-3  # how little the order of kinds weighs against the time of a message
LARGEST_GRAPH = 1024  # GPUs; a complete graph beyond this takes METIS longer than a search should


def compositions(count: int, allowed: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to cut `count` GPUs of a machine into TP groups, as evenly as the degrees allow, from wide to narrow."""
    found = []
    for degree in allowed:
        parts, rest = [degree] * (count // degree), count % degree
        while rest:
            parts.append(max(t for t in allowed if t <= rest))
            rest -= parts[-1]
        if parts and sum(parts) == count and tuple(parts) not in found:
            found.append(tuple(parts))
    return found[::-1]


@dataclass(frozen=True)
class Phases:
    """The parts of the algorithm that run. Raises InputError for a `tau` below 1 or above 64."""

    partition: bool = True
    construction: bool = True
    iteration: bool = True
    tau: int | None = None

    def __post_init__(self) -> None:
        if self.tau is not None:
            whole_in(self.tau, "solver.tau", at_least=1, at_most=MOST_TAU)


BOTH_PHASES = Phases()


class HierarchicalPartition:
    """The two phases on one problem."""

    def __init__(
        self, search: Search, completer: PlanCompleter, rng: random.Random, phases: Phases = BOTH_PHASES
    ) -> None:
        self.search, self.completer, self.rng, self.phases = search, completer, rng, phases
        self.problem: Problem = search.problem
        numbers: dict[Hashable, int] = {}
        self._kind_of = [numbers.setdefault(m.kind, len(numbers)) for m in self.problem.cluster.machines]
        self._graph = device_graph(self.problem)
        with np.errstate(divide="ignore"):
            self._reciprocal = 1.0 / self._graph.bandwidth
        np.fill_diagonal(self._reciprocal, 0.0)
        self._reciprocal /= self._reciprocal.max() or 1.0
        self._direct = self._graph.bandwidth / (self._graph.bandwidth.max() or 1.0)
        # Of each set of recompute policies, from the fastest to the leanest, by number of pipelines.
        self._best: list[dict[int, Incumbent]] = [{} for _ in completer.splitters]
        self._good_degrees: dict[tuple[int, int], tuple[int, ...]] = {}

    def iterate(self) -> None:
        """One pass of both phases: over the whole cluster, or over some pipelines of a good plan."""
        at = self._policies()
        base = self._base(self._best[at])
        style = self._style(base)
        parts, kept = self._phase_one(base, style)
        if style.sharding >= LOCKSTEP:
            groups = self._aligned(parts, style)
        else:
            groups = self._separate_groups(parts, kept, style, self.completer.splitters[at])
            while not groups and at + 1 < len(self._best):  # it may fit with more recomputation
                at += 1
                groups = self._separate_groups(parts, kept, style, self.completer.splitters[at])
        if not groups:
            return
        partition = Partition(tuple(groups), style.schedule, style.sharding, style.chunks, style.groups)
        rival = self._best[at].get(len(parts))
        least = rival.step_time_s if rival else float("inf")
        priced = self.offer(partition, least)
        if priced is not None and priced.cost.objective < least:
            self._best[at][len(parts)] = Incumbent(priced.cost.objective, parts, partition, style)
            if style.sharding < LOCKSTEP:
                self._remember_degrees(partition)

    def begin_at(self, partition: Partition) -> None:
        """Count a known partition among the good ones that iterations work on. One in lockstep is left alone."""
        if partition.sharding >= LOCKSTEP:
            return
        alone = partition.with_pipeline_groups(one for group in partition.pipeline_groups for one in group.pipelines())
        priced = self.offer(alone, float("inf"))
        if priced is not None and priced.cost.fits:
            at = {device: i for i, device in enumerate(self._graph.devices)}
            parts = tuple(tuple(sorted(at[d] for d in own.devices())) for own in alone.pipeline_groups)
            style = Style.of(alone, self._kind, max(self._kind_of) + 1)
            self._best[0][len(parts)] = Incumbent(priced.cost.objective, parts, alone, style)

    def offer(self, partition: Partition, limit_s: float) -> PricedPlan | None:
        """The plan of a partition, offered to the search; as `offer_partition`."""
        return offer_partition(self.search, self.completer, partition, limit_s)

    def _policies(self) -> int:
        """The set of recompute policies by which an iteration first judges pipelines: mostly the fastest.

        Where all stages have one policy, each has plans of its own to work on: what fits only with much recomputation
        would else lead away from fewer devices without.
        """
        count = len(self._best)
        if count == 1 or self.rng.random() > _OTHER_POLICIES:
            return 0
        found = [(one.step_time_s, at) for at, own in enumerate(self._best) for one in own.values()]
        return self.rng.choice((min(found, default=(0.0, 0))[1], self.rng.randrange(count)))

    def _separate_groups(
        self,
        parts: tuple[tuple[int, ...], ...],
        kept: dict[tuple[int, ...], PipelineGroup],
        style: Style,
        splitter: LayerSplitter,
    ) -> list[PipelineGroup]:
        """One pipeline group for every part; empty where a part has no pipeline that fits."""
        # The number of holders in a machine is not yet known.
        shards = StateSharding(style.sharding, len(parts) if style.groups == "all" else 1)
        pipeline_groups = []
        for part in parts:
            old = kept.get(part) or self._pipeline(self._graph.subset(list(part)), style, shards, splitter)
            if old is None:
                return []
            pipeline_groups.append(replace(old, micro_batch_size=style.size))
        return pipeline_groups

    def _aligned(self, parts: tuple[tuple[int, ...], ...], style: Style) -> list[PipelineGroup]:
        """One pipeline group with a pipeline for every part, all of equally many stages and one TP degree; empty where
        a part is too small.
        """
        machine_of, space = self.problem.cluster.machine_of, self.problem.space
        devices = [[self._graph.devices[i] for i in part] for part in parts]
        tp = self.rng.choice(space.allowed_tp(max(len(own) for own in self.problem.usable_by_machine.values())))
        pipelines = []
        for own in devices:
            machines = sorted({int(machine_of[d]) for d in own}, key=lambda m: (style.ranks[self._kind_of[m]], m))
            pipelines.append([group for m in machines for group in cut([d for d in own if machine_of[d] == m], tp)])
        most = min(*map(len, pipelines), self.problem.model.num_layers)
        count = space.num_stages or self.rng.randint(min(1, most), most)
        if not 0 < count <= most:
            return []
        return [PipelineGroup(tuple(zip(*(pipeline[:count] for pipeline in pipelines), strict=True)), style.size)]

    def _base(self, best: Mapping[int, Incumbent]) -> Incumbent | None:
        """The plan to work on: one of the best per number of pipelines, better ones with higher probability."""
        if not best or not self.phases.iteration or self.rng.random() < _WHOLE_CLUSTER:
            return None
        ranked = sorted(best.values(), key=lambda found: found.step_time_s)
        at = 0
        while at + 1 < len(ranked) and self.rng.random() < _NEXT_BEST:
            at += 1
        return ranked[at]

    def _phase_one(
        self, base: Incumbent | None, style: Style
    ) -> tuple[tuple[tuple[int, ...], ...], dict[tuple[int, ...], PipelineGroup]]:
        """The GPUs of every pipeline, and the pipelines that are kept."""
        rng, fixed = self.rng, self.problem.space.num_pipelines
        gpus = len(self._graph.devices)
        if base is None:
            most = max(1, min(gpus // 2, self.problem.workload.global_batch, _MOST_PIPELINES))
            # Few pipelines are likelier: numbers are drawn evenly on a logarithmic scale.
            count = fixed or round(most ** rng.random())
            return self._partition(self._used(count), count), {}
        if style.ranks != base.style.ranks:
            return base.parts, {}  # reorder all pipelines, so that they stay aligned
        kept = {} if style.sharding >= LOCKSTEP else dict(zip(base.parts, base.partition.pipeline_groups, strict=True))
        chosen = rng.sample(base.parts, min(len(base.parts), rng.choice((1, 2, 2, 3))))
        rest = tuple(part for part in base.parts if part not in chosen)
        union = tuple(sorted({position for part in chosen for position in part} | self._some_idle(base.parts)))
        change = 0 if fixed else rng.choice((-1, 0, 0, 0, 0, 1))
        count = len(chosen) if fixed else min(max(1, len(chosen) + change), max(1, len(union) // 2))
        return rest + self._partition(union, count), {part: kept[part] for part in rest if part in kept}

    def _some_idle(self, parts: Sequence[tuple[int, ...]]) -> set[int]:
        """The GPUs of no part, or none."""
        idle = set(range(len(self._graph.devices))).difference(*parts)
        return idle if idle and self.rng.random() < _IDLE else set()

    def _used(self, count: int) -> tuple[int, ...]:
        """The GPUs to partition: usually all, sometimes those of some machines, which pays on slow networks."""
        gpus = range(len(self._graph.devices))
        machines = sorted({int(self.problem.cluster.machine_of[d]) for d in self._graph.devices})
        if len(machines) < 2 or self.rng.random() > _SOME_MACHINES:
            return tuple(gpus)
        kept = set(self.rng.sample(machines, self.rng.randint(1, len(machines) - 1)))
        found = tuple(i for i in gpus if int(self.problem.cluster.machine_of[self._graph.devices[i]]) in kept)
        return found if len(found) >= count else tuple(gpus)

    def _partition(self, positions: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
        """METIS on some of the GPUs. Edge weights mix reciprocal and true bandwidth; pipelines have equal or unequal
        weights; GPUs are weighted by a power of their speed. Without phase 1, random parts of nearly equal size.
        """
        if not self.phases.partition:
            shuffled = self.rng.sample(positions, len(positions))
            return tuple(tuple(sorted(shuffled[k::count])) for k in range(count))
        mix = self.rng.choice((1.0, 1.0, 0.75, 0.5, 0.0))
        graph = self._graph.subset(list(positions))
        at = np.ix_(positions, positions)
        weights = mix * self._reciprocal[at] + (1 - mix) * self._direct[at]
        shares = None
        if self.rng.random() < _UNEVEN:
            drawn = [self.rng.uniform(0.4, 1.6) for _ in range(count)]
            shares = [share / sum(drawn) for share in drawn]
        exponent = self.rng.choice(_EXPONENTS)
        parts = partition_graph(graph, count, weights, self.rng.randrange(1 << 30), shares=shares, exponent=exponent)
        return tuple(tuple(positions[i] for i in part) for part in parts)

    def _style(self, base: Incumbent | None) -> Style:
        """A new style, or that of `base`, sometimes with one element changed."""
        rng, workload = self.rng, self.problem.workload
        sizes = self.problem.space.micro_batch_sizes(workload.global_batch)[:3]
        ranks = list(range(max(self._kind_of) + 1))
        rng.shuffle(ranks)
        size, (schedule, chunks) = rng.choice(sizes), draw_schedule(self.problem, rng)
        sharding = draw_zero_stage(self.problem, rng, aligned=False)
        new = Style(size, schedule, sharding, tuple(ranks), chunks, draw_sharding_groups(self.problem, rng, sharding))
        if base is None:
            return new
        if rng.random() > _OTHER_STYLE:
            return base.style
        changed = rng.choice(("size", "schedule", "sharding", "ranks", "ranks", "ranks"))
        if changed == "schedule":
            return replace(base.style, schedule=schedule, chunks=chunks)
        if changed == "sharding":
            return replace(base.style, sharding=sharding, groups=new.groups)
        return replace(base.style, **{changed: getattr(new, changed)})

    def _pipeline(
        self, graph: DeviceGraph, style: Style, shards: StateSharding, splitter: LayerSplitter
    ) -> PipelineGroup | None:
        """Phase 2 for the GPUs of one pipeline."""
        cluster = self.problem.cluster
        blocks = self._blocks(graph)
        choices = [
            compositions(
                len(own),
                self.problem.space.allowed_tp(cluster.machines[int(cluster.machine_of[own[0]])].num_gpus),
            )
            for own in blocks
        ]
        order = self._order(blocks, style) if self.phases.construction else list(range(len(blocks)))
        sequences = self.problem.workload.global_batch * float(graph.speed.sum() / self._graph.speed.sum())

        def stages(chosen: list[int]) -> list[DeviceGroup]:
            found = [group for at in order for group in _groups(blocks[at], choices[at][chosen[at]])]
            return found[: self.problem.space.num_stages or self.problem.model.num_layers]

        if not self.phases.construction:
            widest = stages([0] * len(blocks))
            return PipelineGroup(tuple((group,) for group in widest), style.size)
        chosen = [self._first_option(block, options) for block, options in zip(blocks, choices, strict=True)]

        def seconds(chosen: list[int]) -> float:
            return self.completer.finish_s(
                stages(chosen), style.size, style.schedule, shards, sequences, style.chunks, splitter
            )

        best_s = seconds(chosen)
        for at in self.rng.sample(order, min(len(order), _SEARCHED_BLOCKS)):
            for option in range(len(choices[at])):
                if option == chosen[at]:
                    continue
                trial = [*chosen[:at], option, *chosen[at + 1 :]]
                trial_s = seconds(trial)
                if trial_s < best_s:
                    best_s, chosen = trial_s, trial
        return PipelineGroup(tuple((group,) for group in stages(chosen)), style.size) if math.isfinite(best_s) else None

    def _blocks(self, graph: DeviceGraph) -> list[list[int]]:
        """The GPUs of one machine in one part of the secondary partition; without phase 2, those of one machine."""
        blocks, parts = list[list[int]](), [list(range(len(graph.devices)))]
        if self.phases.construction:
            parts = partition_graph(graph, self._secondary(graph), graph.bandwidth, self.rng.randrange(1 << 30))
        for part in parts:
            by_machine = devices_by_machine(self.problem.cluster, [graph.devices[i] for i in part])
            blocks += [devices for _, devices in sorted(by_machine.items())]
        return blocks

    def _first_option(self, block: list[int], options: list[tuple[int, ...]]) -> int:
        """The TP degrees of such a block in a good plan, or random ones."""
        known = self._good_degrees.get((self._kind(block[0]), len(block))) if self.phases.iteration else None
        if known in options and self.rng.random() < _FROM_GOOD_PLAN:
            return options.index(known)
        return self.rng.randrange(len(options))

    def _kind(self, device: int) -> int:
        return self._kind_of[int(self.problem.cluster.machine_of[device])]

    def _remember_degrees(self, partition: Partition) -> None:
        """Remember the TP degrees of a good plan by machine kind and number of GPUs."""
        machine_of = self.problem.cluster.machine_of
        for pipeline_group in partition.pipeline_groups:
            blocks: dict[int, list[DeviceGroup]] = {}
            for (group,) in pipeline_group.stages:
                blocks.setdefault(int(machine_of[group[0]]), []).append(group)
            for groups in blocks.values():
                degrees = tuple(sorted((len(group) for group in groups), reverse=True))
                self._good_degrees[self._kind(groups[0][0]), sum(degrees)] = degrees

    def _secondary(self, graph: DeviceGraph) -> int:
        """The number of parts of the secondary partition: from one for all GPUs to one for each machine."""
        machines = len({int(self.problem.cluster.machine_of[d]) for d in graph.devices})
        return self.rng.randint(1, machines)

    def _order(self, blocks: list[list[int]], style: Style) -> list[int]:
        """The order of blocks along fat links; between equal links, kinds follow the order of the style, as in all
        pipelines.
        """
        network, heads = self.problem.cluster.network, [block[0] for block in blocks]
        message = float(style.size * self.problem.workload.seq_len * self.problem.model.hidden_size)
        rank = np.array([style.ranks[self._kind(head)] for head in heads])
        machines = self.problem.cluster.machine_of[heads]
        pairs = np.ix_(machines, machines)
        bandwidth, latency_s = network.bandwidth[pairs], network.latency_s[pairs]
        for i, j in np.argwhere(machines[:, None] == machines).tolist():
            bandwidth[i, j] = network.pair_bandwidth(heads[i], heads[j])
            latency_s[i, j] = network.pair_latency(heads[i], heads[j])
        routes = message / bandwidth * (1 + _TIE * abs(rank[:, None] - rank)) + latency_s
        order = best_order(routes.tolist(), self.phases.tau)
        return order if rank[order[0]] <= rank[order[-1]] else order[::-1]


def _groups(block: list[int], degrees: tuple[int, ...]) -> list[DeviceGroup]:
    """The GPUs of a block cut into TP groups of `degrees`."""
    found, start = [], 0
    for degree in degrees:
        found.append(tuple(block[start : start + degree]))
        start += degree
    return found


@dataclass(frozen=True)
class HexiScale(Phases, SearchSolver):
    """HexiScale's two phases: a graph partition of the devices, then a plan for each part.

    Iterates the two phases until the budget is spent; a step is one pass of both phases.

    For ablations, each part can be turned off. Without `partition`, the GPUs of each pipeline are drawn at random.
    Without `construction`, the GPUs of a pipeline in one machine become as few stages as TP allows, in the order of the
    cluster. Without `iteration`, every pass begins anew instead of with the best plans so far. `tau` orders stages by
    the top-τ greedy search; by default they are ordered exactly where they are few.
    """

    name = "hexiscale"
    capabilities = Capabilities(max_devices=LARGEST_GRAPH, requires=("pymetis",))

    def search(self, run: Search, rng: random.Random) -> None:
        """Iterate."""
        hierarchy = HierarchicalPartition(run, PlanCompleter(run.pricer), rng, self)
        for partition in known_partitions(run):
            hierarchy.begin_at(partition)
        while run.step():
            hierarchy.iterate()

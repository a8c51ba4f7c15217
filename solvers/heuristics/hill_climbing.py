"""Hill climbing on a finished plan: single layers, micro-batches, recompute policies, samples of replicas, sharding.

The builder balances every pipeline by itself; moving a layer so that stages of several pipelines hold the same
layers in one machine keeps gradients off the network, which only the whole price shows.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from math import lcm

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import Shards
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, held_by, irregular, misaligned
from hexiopt.problem.space import layer_ranges, lean_first, sharding_stages
from hexiopt.problem.workload import RECOMPUTE_POLICIES
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.schedule import StagePosition
from solvers.completion.completer import Builder
from solvers.completion.replicas import Share
from solvers.core.interleaving import multiple_of
from solvers.core.partition import Misfit, Structure
from solvers.core.search import Pricer, Search
from solvers.core.zero import LOCKSTEP, holders_of, sharding_groups

_TWICE = 0.1  # of the steps change two things at once


class Polisher:
    """Improves one plan step by step."""

    def __init__(self, search: Search, builder: Builder, rng: random.Random) -> None:
        self.search, self.builder, self.rng = search, builder, rng
        self._pricer: Pricer = search.pricer
        self._policies = search.pricer.policies()
        self._machine_of: list[int] = search.problem.cluster.machine_of.tolist()
        self._climbed: set[float] = set()

    def begin(self, starts: Iterable[Structure], until: float) -> None:
        """Improve the plans of `starts`, as long as the fraction `until` of the budget is not spent: what is best with
        the builder's layers may be far from what it is with its own, and then nobody would come back to it."""
        for structure in starts:
            if not self._has(until):
                return
            self._improve(structure, until)

    def finish(self, ranked: Iterable[Structure] = ()) -> None:
        """Improve the search's best plan, and the same plan with micro-batches of twice and half the size.

        With few micro-batches another size may win, but only with other layers. As long as budget is left, so are
        the plans of the structures `ranked`: with other layers a worse one may become the best.
        """
        plan = self.search.plan
        if plan is None:
            return
        for start in (plan, self._resized(plan, 2.0), self._resized(plan, 0.5)):
            if start is not None:
                self._climb(start)
        for structure in ranked:
            if not self._has(1.0):
                return
            self._improve(structure)

    def _has(self, until: float) -> bool:
        """Whether less than a fraction of the budget is spent."""
        search, most = self.search, self.search.budget.max_steps
        return search.go_on(until) and (most is None or search.steps < until * most)

    def _improve(self, structure: Structure, until: float = 1.0) -> None:
        self.search.step()
        built = self.builder.build(structure) if self.builder.allowed(structure) else None
        if built is not None and not isinstance(built, Misfit):
            self._climb(built[0], until)

    def _climb(self, plan: Plan, until: float = 1.0) -> None:
        """Take steps that help until many in a row brought nothing: ten for every stage of the plan."""
        search, idle = self.search, 0
        patience = 30 + 10 * min(30, sum(len(pipeline.stages) for pipeline in plan.pipelines))
        cost = search.offer(plan)
        if cost.objective in self._climbed:  # most likely the same plan, equal devices in another order
            return
        self._climbed.add(cost.objective)
        while idle < patience and self._has(until):
            search.step()
            idle += 1
            trial = self._neighbour(plan, cost)
            if trial is None:
                continue
            priced = self.builder.price_built(trial, cost.objective)
            if priced is not None and priced[1].objective < cost.objective * (1 - 1e-9):
                (plan, cost), idle = priced, 0

    def _resized(self, plan: Plan, factor: float) -> Plan | None:
        """All micro-batches `factor` times as large, where sizes and counts allow it."""
        sizes = self.search.problem.space.micro_batch_sizes(self.search.problem.workload.global_batch)
        pipelines = []
        for pipeline in plan.pipelines:
            size, count = int(pipeline.micro_batch_size * factor), pipeline.num_micro_batches / factor
            if size not in sizes or count != int(count) or count % multiple_of(pipeline.stages):
                return None
            stages = tuple(_resampled(stage, factor) for stage in pipeline.stages)
            resized = replace(pipeline, stages=stages, micro_batch_size=size, num_micro_batches=int(count))
            if irregular(resized, plan.schedule) is not None:
                return None
            pipelines.append(resized)
        sequences = [pipeline.num_sequences for pipeline in pipelines]
        # An even batch may differ by one micro-batch, which may now be smaller.
        apart = max(sequences) - min(sequences) > max(pipeline.micro_batch_size for pipeline in pipelines)
        if apart and not self.search.problem.space.uneven_batch:
            return None
        return replace(plan, pipelines=tuple(pipelines))

    def _neighbour(self, plan: Plan, cost: Cost) -> Plan | None:
        """Changed once, or twice: another ZeRO stage may pay with other layers only."""
        trial = self._change(plan, cost)
        return self._change(trial, cost) if trial is not None and self.rng.random() < _TWICE else trial

    def _change(self, plan: Plan, cost: Cost) -> Plan | None:
        space = self.search.problem.space
        kinds = []
        if space.uneven_layers:
            kinds += [self._shift_layer] * 3
        if space.recompute_per_stage and len(self._policies) > 1:
            kinds.append(self._other_policy)
        if space.uneven_batch and len(plan.pipelines) > 1 and plan.sharding.stage < LOCKSTEP:
            kinds.append(self._shift_batch)
        if len(sharding_groups(self.search.problem, plan.sharding.stage)) > 1 and len(plan.pipelines) > 1:
            kinds.append(self._other_groups)
        replicated = any(len(stage.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages)
        if replicated:
            kinds.append(self._shift_sample)
        if len(sharding_stages(self.search.problem.workload)) > 1 and (replicated or len(plan.pipelines) > 1):
            kinds.append(self._other_stage)
        return self.rng.choice(kinds)(plan, cost) if kinds else None

    def _shift_layer(self, plan: Plan, cost: Cost) -> Plan | None:
        """A layer crosses a boundary, in one pipeline or in all that are cut there; policies follow memory."""
        rng = self.rng
        p = rng.randrange(len(plan.pipelines))
        if len(plan.pipelines[p].stages) < 2:
            return None
        s = rng.randrange(len(plan.pipelines[p].stages) - 1)
        change = rng.choice((-1, 1))
        if rng.random() < 0.3:  # aim at a boundary of another pipeline
            other = rng.choice(plan.pipelines)
            ends = [stage.layers[0][1] for stage in other.stages[:-1]]
            here = plan.pipelines[p].stages[s].layers[0][1]
            if ends:
                change = min((end - here for end in ends), key=abs) or change
        chosen = [p]
        together = not self.search.problem.space.uneven_structure or plan.sharding.stage >= LOCKSTEP
        if together or rng.random() < 0.4:
            shape = [stage.layers for stage in plan.pipelines[p].stages]
            chosen = [k for k, q in enumerate(plan.pipelines) if [stage.layers for stage in q.stages] == shape]
        pipelines = list(plan.pipelines)
        for k in chosen:
            moved = self._with_boundary(plan, pipelines[k], s, change)
            if moved is None:
                return None
            pipelines[k] = moved
        return replace(plan, pipelines=tuple(pipelines))

    def _with_boundary(self, plan: Plan, pipeline: Pipeline, s: int, change: int) -> Pipeline | None:
        """`pipeline` with `change` layers more in stage s and fewer in the next; all ranges follow if interleaved."""
        chunks, counts = pipeline.num_chunks, [stage.num_layers for stage in pipeline.stages]
        counts[s], counts[s + 1] = counts[s] + change, counts[s + 1] - change
        if min(counts) < chunks:
            return None
        ranges = layer_ranges(counts, chunks)
        stages = [replace(stage, layers=own) for stage, own in zip(pipeline.stages, ranges, strict=True)]
        for at in (s, s + 1):
            fitted = self._fitted(plan, pipeline, at, stages[at])
            if fitted is None:
                return None
            stages[at] = fitted
        return replace(pipeline, stages=tuple(stages))

    def _fitted(self, plan: Plan, pipeline: Pipeline, s: int, stage: Stage) -> Stage | None:
        """`stage` with the fastest policies whose memory fits (its own alone where policies may not differ)."""
        count = len(pipeline.stages)
        at = StagePosition(s, count, pipeline.num_micro_batches, pipeline.num_chunks)
        held = in_flight(plan.schedule, at)
        holders = holders_of(plan, self._machine_of)
        if plan.sharding.groups == "all":
            holders += len(stage.replicas) - 1
        shards = Shards(plan.sharding.stage, holders)
        size = pipeline.micro_batch_size
        sites = frozenset(
            site if samples == size else Share(site, samples)
            for site, samples in zip(map(self._pricer.site, stage.executors), stage.samples(size), strict=True)
        )
        splitter = self.builder.splitter(stage.policy)
        options = splitter.options(sites, s == 0, s == count - 1, size, held, shards)
        if len(options.times) < stage.num_layers:
            return None
        return replace(stage, recompute=options.recompute[stage.num_layers - 1])

    def _other_policy(self, plan: Plan, cost: Cost) -> Plan | None:
        """Another policy for a stage, or for one layer more of it."""
        rng = self.rng
        p = rng.randrange(len(plan.pipelines))
        pipeline = plan.pipelines[p]
        s = rng.randrange(len(pipeline.stages))
        stage, policy = pipeline.stages[s], rng.choice(self._policies)
        recompute: tuple[str, ...] = (policy,)
        if self.search.problem.space.recompute_per_layer and rng.random() < 0.5:
            recompute = _with_one(stage.recompute, policy, stage.num_layers)
        if recompute == stage.recompute:
            return None
        stages = (*pipeline.stages[:s], replace(stage, recompute=recompute), *pipeline.stages[s + 1 :])
        return replace(
            plan, pipelines=(*plan.pipelines[:p], replace(pipeline, stages=stages), *plan.pipelines[p + 1 :])
        )

    def _other_groups(self, plan: Plan, cost: Cost) -> Plan | None:
        """Sharding inside machines instead of over all holders, or back."""
        groups = "all" if plan.sharding.groups == "machine" else "machine"
        return replace(plan, sharding=replace(plan.sharding, groups=groups))

    def _other_stage(self, plan: Plan, cost: Cost) -> Plan | None:
        """Another ZeRO stage: which is best depends on where the layers are."""
        stage = self.rng.choice(sharding_stages(self.search.problem.workload))
        other = replace(plan, sharding=Sharding(stage, plan.sharding.groups if stage else "all"))
        return None if other == plan or misaligned(other) else other

    def _shift_sample(self, plan: Plan, cost: Cost) -> Plan | None:
        """A sample of each micro-batch goes from one replica of a stage to another."""
        places = [
            (p, s)
            for p, pipeline in enumerate(plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if len(stage.replicas) > 1
        ]
        p, s = self.rng.choice(places)
        pipeline = plan.pipelines[p]
        replicas = list(pipeline.stages[s].replicas)
        given = list(pipeline.stages[s].samples(pipeline.micro_batch_size))
        a, b = self.rng.sample(range(len(replicas)), 2)
        if given[a] == 1:
            return None
        for at, change in ((a, -1), (b, 1)):
            replicas[at] = replace(replicas[at], samples=given[at] + change)
        stages = list(pipeline.stages)
        stages[s] = replace(stages[s], parallelism=held_by(tuple(replicas)))
        pipelines = list(plan.pipelines)
        pipelines[p] = replace(pipeline, stages=tuple(stages))
        return replace(plan, pipelines=tuple(pipelines))

    def _shift_batch(self, plan: Plan, cost: Cost) -> Plan | None:
        """A micro-batch, or as many as interleaving needs, goes from the latest pipeline to another of its size."""
        ends = [priced.end_s for priced in cost.pipelines]
        a = max(range(len(ends)), key=ends.__getitem__)
        b = self.rng.randrange(len(ends))
        giver, taker = plan.pipelines[a], plan.pipelines[b]
        moved = lcm(multiple_of(giver.stages), multiple_of(taker.stages))
        if a == b or giver.num_micro_batches <= moved or giver.micro_batch_size != taker.micro_batch_size:
            return None
        pipelines = list(plan.pipelines)
        pipelines[a] = replace(giver, num_micro_batches=giver.num_micro_batches - moved)
        pipelines[b] = replace(taker, num_micro_batches=taker.num_micro_batches + moved)
        return replace(plan, pipelines=tuple(pipelines))


def _resampled(stage: Stage, factor: float) -> Stage:
    """The stage with `factor` times as many samples for each replica; for `irregular` to refuse where none are left."""
    if len(stage.replicas) == 1:
        return stage
    replicas = (replace(replica, samples=int((replica.samples or 0) * factor)) for replica in stage.replicas)
    return replace(stage, parallelism=held_by(tuple(replicas)))


def _with_one(recompute: tuple[str, ...], policy: str, num_layers: int) -> tuple[str, ...]:
    """What `num_layers` recompute where one more of them has `policy`; where they have two others, unchanged."""
    lean, rich = recompute[0], recompute[-1]
    num_lean = recompute.count(lean) if lean != rich else 0
    if lean == rich:
        ranks = {name: k for k, name in enumerate(RECOMPUTE_POLICIES)}
        if ranks[policy] > ranks[rich]:
            return lean_first(policy, 1, rich, num_layers)
        return lean_first(lean, num_layers - 1, policy, num_layers)
    if policy == lean:
        return lean_first(lean, num_lean + 1, rich, num_layers)
    return lean_first(lean, num_lean - 1, rich, num_layers) if policy == rich else recompute

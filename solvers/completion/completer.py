"""Completes what a search moves into plans."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Pricer
from solvers.completion.batches import split_batch
from solvers.completion.layers import LayerSplitter
from solvers.completion.pipelines import Line, LineMaker, Terms
from solvers.completion.pricing import PricedPlan, price_plan
from solvers.core.interleaving import multiple_of
from solvers.core.partition import Bundle, Group, Misfit, Structure
from solvers.core.zero import LOCKSTEP, fewest_holders


@dataclass(frozen=True, slots=True)
class CompletedPlan:
    """A plan, and an estimate of the seconds of its longest pipeline, without gradient sync and optimiser."""

    plan: Plan
    estimate_s: float


class PlanCompleter:
    """Completes partitions into plans: layers, recompute, micro-batches per pipeline; knows the problem and what prices
    its plans, not the search. Keeps what it computed."""

    def __init__(self, pricer: Pricer, *, replicates: bool = True) -> None:
        """`replicates`: whether stages may have replicas, where the plan space has them and the pricer knows them."""
        self.pricer, self.problem = pricer, pricer.problem
        space, policies = self.problem.space, pricer.policies()
        sets = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        self.splitters = tuple(
            LayerSplitter(pricer, chosen, not space.uneven_layers, space.recompute_per_layer) for chosen in sets
        )
        self._lines = LineMaker(pricer)
        self._machine_of: list[int] = self.problem.cluster.machine_of.tolist()
        self.replicates = replicates and space.replicas and isinstance(pricer, CostModel)

    def splitter(self, policy: str) -> LayerSplitter:
        """Whoever gives layers to stages where one has `policy`."""
        return next(own for own in self.splitters if policy in own.policies)

    def allowed(self, structure: Structure) -> bool:
        """Whether the structure obeys the switches and constraints of the plan space."""
        return self.distance(structure) == 0

    def distance(self, structure: Structure) -> int:
        """How far the structure is from obeying the switches and constraints of the plan space; 0 if it does."""
        space, bundles = self.problem.space, structure.bundles
        pipelines, most = structure.num_pipelines, self.problem.workload.global_batch
        far = max(0, pipelines - most) + (not bundles)
        far += sum(max(0, len(b.stages) - self.problem.model.num_layers) for b in bundles)
        if space.num_pipelines is not None:
            far += 10 * abs(pipelines - space.num_pipelines)
        if space.num_stages is not None:
            far += sum(abs(len(b.stages) - space.num_stages) for b in bundles)
        if not space.uneven_structure:
            far += max(0, len(bundles) - 1)
        if not space.uneven_tp:
            far += len({len(group) for b in bundles for slot in b.stages for group in slot}) - 1
        if not space.uneven_batch:
            far += len({b.micro_batch_size for b in bundles}) - 1
        if not self.replicates:
            far += sum(b.replicated for b in bundles)
        if structure.sharding >= LOCKSTEP:
            far += sum(len({len(group) for group in slot}) - 1 for b in bundles if b.replicated for slot in b.stages)
            far += max(0, len(bundles) - 1) + (not structure.schedule.lockstep)
            far += sum(most % (b.width * b.micro_batch_size) != 0 for b in bundles)
        return far

    def complete(self, structure: Structure) -> CompletedPlan | Misfit:
        """The completion of `structure` that is estimated best over the sets of recompute policies."""
        found = [self._complete(structure, splitter) for splitter in self.splitters]
        fitting = [one for one in found if not isinstance(one, Misfit)]
        if fitting:
            return min(fitting, key=lambda one: one.estimate_s)
        return Misfit(min(one.missing for one in found if isinstance(one, Misfit)))

    def price(self, completed: CompletedPlan, limit_s: float = math.inf) -> PricedPlan | None:
        """The plan and its cost; None, without the whole price, where it certainly exceeds `limit_s`."""
        return price_plan(self.pricer, completed.plan, limit_s)

    def rate(self, structure: Structure, shards: Shards) -> float:
        """Estimated sequences per second of `structure` alone, states spread as `shards`; 0 where it does not fit.

        With the best set of recompute policies. Of a wide bundle, first, middle and last pipeline stand for all.
        """
        expected = max(1, self.problem.workload.global_batch // max(structure.num_pipelines, int(shards.num_devices)))
        thin = structure.with_bundles(map(_thinned, structure.bundles))
        trips = self._lines.trips_s(thin)
        terms = [self._terms(few, structure, shards, expected) for few in thin.bundles]

        def per_second(splitter: LayerSplitter) -> float:
            total = 0.0
            for bundle, few, own, trips_s in zip(structure.bundles, thin.bundles, terms, trips, strict=True):
                made = self._lines.made(few, own, splitter, trips_s)
                if isinstance(made, Misfit):
                    return 0.0
                total += sum(few.micro_batch_size / line.rhythm.beat_s for line in made) * bundle.width / few.width
            return total

        return max(map(per_second, self.splitters))

    def finish_s(
        self, groups: Sequence[Group], size: int, schedule: Schedule, shards: Shards, sequences: float, chunks: int = 1
    ) -> float:
        """Estimated seconds in which one pipeline of stages `groups` processes `sequences`; infinite if none fits.

        With the best set of recompute policies.
        """
        bundle = Bundle(tuple((group,) for group in groups), size)
        alone = Structure((bundle,), schedule, shards.stage, chunks)
        [trips_s] = self._lines.trips_s(alone)
        terms = self._terms(bundle, alone, shards, sequences)
        each = (self._lines.made(bundle, terms, splitter, trips_s) for splitter in self.splitters)
        rhythms = [made[0].rhythm for made in each if not isinstance(made, Misfit)]
        return min((own.fill_s + sequences / size * own.beat_s for own in rhythms), default=math.inf)

    def _complete(self, structure: Structure, splitter: LayerSplitter) -> CompletedPlan | Misfit:
        schedule, batch = structure.schedule, self.problem.workload.global_batch
        shards = self._shards(structure)
        expected = max(1, -(-batch // structure.num_pipelines))
        lines: list[Line] = []
        sizes: list[int] = []
        missing = 0
        for bundle, trips_s in zip(structure.bundles, self._lines.trips_s(structure), strict=True):
            made = self._lines.made(bundle, self._terms(bundle, structure, shards, expected), splitter, trips_s)
            if isinstance(made, Misfit):
                missing += made.missing * bundle.width
            else:
                lines += made
                sizes += [bundle.micro_batch_size] * bundle.width
        if missing:
            return Misfit(missing)
        fills, beats = [line.rhythm.fill_s for line in lines], [line.rhythm.beat_s for line in lines]
        together = structure.sharding >= LOCKSTEP
        even = together or not self.problem.space.uneven_batch
        multiples = [multiple_of(line.stages) for line in lines]
        counts = split_batch(fills, beats, sizes, batch, even=even, multiples=multiples)
        if counts is None or (together and len(set(counts)) > 1):
            return Misfit(1)
        longest = max(f + b * c for f, b, c in zip(fills, beats, counts, strict=True))
        pipelines = tuple(
            Pipeline(line.stages, count, size) for line, count, size in zip(lines, counts, sizes, strict=True)
        )
        return CompletedPlan(Plan(pipelines, schedule, Sharding(structure.sharding, structure.groups)), longest)

    def _shards(self, structure: Structure) -> Shards:
        """How states are spread, at least."""
        if structure.groups == "all":
            return Shards(structure.sharding, structure.num_pipelines)
        slots = (slot for bundle in structure.bundles for slot in bundle.stages)
        return Shards(structure.sharding, fewest_holders(slots, self._machine_of))

    def _terms(self, bundle: Bundle, structure: Structure, shards: Shards, expected: float) -> Terms:
        """On which a bundle gets its layers, where each pipeline processes `expected` sequences."""
        schedule, p = structure.schedule, len(bundle.stages)
        chunks = self._lines.chunks(bundle, structure)
        batches = max(1, int(expected // bundle.micro_batch_size))
        batches = min(batches, schedule.saturates_at(p, chunks) or batches)
        return Terms(schedule, chunks, shards, structure.groups == "all", batches)


def _thinned(bundle: Bundle) -> Bundle:
    """Of a wide bundle, the first, the middle and the last pipeline."""
    width = bundle.width
    if width <= 3:
        return bundle
    return bundle.with_stages(tuple(slot[k] for k in (0, width // 2, width - 1)) for slot in bundle.stages)

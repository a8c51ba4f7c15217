"""Completes what a search moves into plans."""

from collections.abc import Sequence
from dataclasses import replace

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from solvers.completion.batches import split_batch
from solvers.completion.layers import LayerSplitter
from solvers.completion.pipelines import Line, LineMaker, Terms
from solvers.core.interleaving import multiple_of
from solvers.core.partition import Bundle, Group, Misfit, Structure
from solvers.core.search import Pricer, Search
from solvers.core.zero import LOCKSTEP, fewest_holders
from solvers.heuristics.chains import ChainMaker


class Builder:
    """Completes structures into plans: layers, recompute, micro-batches per pipeline. Keeps what it computed."""

    def __init__(self, search: Search, replicates: bool = True) -> None:
        self.search = search
        self.problem: Problem = search.problem
        self.pricer: Pricer = search.pricer
        space, policies = self.problem.space, search.pricer.policies()
        sets = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        self._splitters = [
            LayerSplitter(search.pricer, chosen, not space.uneven_layers, space.recompute_per_layer) for chosen in sets
        ]
        self._lines = LineMaker(search.pricer)
        self.chains = ChainMaker(search.pricer, self._splitters[0])
        self._machine_of: list[int] = self.problem.cluster.machine_of.tolist()
        # Other pricers need not know of replicas.
        self.replicates = replicates and space.replicas and isinstance(search.pricer, CostModel)

    def splitter(self, policy: str) -> LayerSplitter:
        """Whoever gives layers to stages where one has `policy`."""
        return next(own for own in self._splitters if policy in own.policies)

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

    def build(self, structure: Structure) -> tuple[Plan, float] | Misfit:
        """The best completion of `structure` over the recompute choices, and an estimate of its longest pipeline.

        The estimate is without gradient sync and optimiser.
        """
        best: tuple[float, Plan] | None = None
        missing = 1 << 30
        for splitter in self._splitters:
            found = self._build(structure, splitter)
            if isinstance(found, Misfit):
                missing = min(missing, found.missing)
            elif best is None or found[0] < best[0]:
                best = found
        return (best[1], best[0]) if best else Misfit(missing)

    def price(self, structure: Structure, limit_s: float = float("inf")) -> tuple[Plan, Cost] | Misfit | None:
        """Plan and cost of `structure`. None, without the whole price, where it certainly exceeds `limit_s`."""
        built = self.build(structure)
        return built if isinstance(built, Misfit) else self.price_built(built[0], limit_s)

    def price_built(self, plan: Plan, limit_s: float = float("inf")) -> tuple[Plan, Cost] | None:
        """`plan`, its batch split once more by the priced times where that helps, and its cost; None as above."""
        priced = self.pricer.pipelines(plan)
        again = self.rebalance(plan, priced)
        if again is not None:
            second = self.pricer.pipelines(again)
            if max(p.end_s for p in second) < max(p.end_s for p in priced):
                plan, priced = again, second
        if max(p.end_s for p in priced) > limit_s:
            return None
        return plan, self.search.offer(plan, self.pricer.price(plan, priced))

    def rate(self, structure: Structure, shards: Shards) -> float:
        """Estimated sequences per second of `structure` alone, states spread as `shards`; 0 where it does not fit.

        Of a wide bundle, first, middle and last pipeline stand for all.
        """
        total = 0.0
        expected = max(1, self.problem.workload.global_batch // max(structure.num_pipelines, int(shards.num_devices)))
        thin = structure.with_bundles(map(_thinned, structure.bundles))
        for bundle, few, trips_s in zip(structure.bundles, thin.bundles, self._lines.trips_s(thin), strict=True):
            terms = self._terms(few, structure, shards, expected)
            made = self._lines.made(few, terms, self._splitters[0], trips_s)
            if isinstance(made, Misfit):
                return 0.0
            total += sum(few.micro_batch_size / line.rhythm.beat_s for line in made) * bundle.width / few.width
        return total

    def finish_s(
        self, groups: Sequence[Group], size: int, schedule: Schedule, shards: Shards, sequences: float, chunks: int = 1
    ) -> float:
        """Estimated seconds in which one pipeline of stages `groups` processes `sequences`; infinite if none fits."""
        bundle = Bundle(tuple((group,) for group in groups), size)
        alone = Structure((bundle,), schedule, shards.stage, chunks)
        [trips_s] = self._lines.trips_s(alone)
        terms = self._terms(bundle, alone, shards, sequences)
        made = self._lines.made(bundle, terms, self._splitters[0], trips_s)
        if isinstance(made, Misfit):
            return float("inf")
        rhythm = made[0].rhythm
        return rhythm.fill_s + sequences / size * rhythm.beat_s

    def rebalance(self, plan: Plan, priced: Sequence[PipelineCost]) -> Plan | None:
        """`plan` with micro-batches by the priced times of its pipelines; None where nothing would change."""
        ends = [cost.end_s for cost in priced]
        fixed = not self.problem.space.uneven_batch or plan.sharding.stage >= LOCKSTEP
        if len(ends) < 2 or fixed or plan.schedule.saturates_at(1, 1) is None:
            return None
        if max(ends) - sum(ends) / len(ends) < 0.002 * max(ends):
            return None
        fills, beats = [], []
        for pipeline, cost in zip(plan.pipelines, priced, strict=True):
            stages = [s.forward_s + s.backward_s for s in cost.stages]
            chunks = pipeline.num_chunks
            fill = (sum(stages) + (chunks - 1) * max(stages)) / chunks
            fill += sum(cost.send_forward_s) + sum(cost.send_backward_s)
            more = pipeline.num_micro_batches - 1
            beat = max((cost.end_s - fill) / more if more else 0.0, max(stages))
            fills.append(cost.end_s - (more + 1) * beat)
            beats.append(beat)
        sizes = [pipeline.micro_batch_size for pipeline in plan.pipelines]
        multiples = [multiple_of(pipeline.stages) for pipeline in plan.pipelines]
        counts = split_batch(fills, beats, sizes, self.problem.workload.global_batch, multiples=multiples)
        if counts is None or counts == [pipeline.num_micro_batches for pipeline in plan.pipelines]:
            return None
        return replace(plan, pipelines=tuple(map(_with_count, plan.pipelines, counts)))

    def _build(self, structure: Structure, splitter: LayerSplitter) -> tuple[float, Plan] | Misfit:
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
        return longest, Plan(pipelines, schedule, Sharding(structure.sharding, structure.groups))

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


def _with_count(pipeline: Pipeline, count: int) -> Pipeline:
    return replace(pipeline, num_micro_batches=count)


def _thinned(bundle: Bundle) -> Bundle:
    """Of a wide bundle, the first, the middle and the last pipeline."""
    width = bundle.width
    if width <= 3:
        return bundle
    return bundle.with_stages(tuple(slot[k] for k in (0, width // 2, width - 1)) for slot in bundle.stages)

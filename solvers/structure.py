"""What a search moves: which devices form which stages; the rest of a plan is computed from it.

A *bundle* is a set of pipelines with the same stages: `stages[s][k]` is the TP group of its pipeline k in stage s.
Bundles of one pipeline say anything a plan can say; wider ones keep pipelines aligned, so that their layers meet
the same machines, and move as one. In a *replicated* bundle the groups are not pipelines beside each other but the
replicas of the stages of one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hexiopt.cost.boundary import sample_overlaps
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.cost.schedule import beat_s, interleaved_beat_s
from hexiopt.plan import Pipeline, Plan, Replica, Sharding, Stage
from hexiopt.problem import Problem
from hexiopt.space import layer_ranges
from solvers.base import Pricer, Search
from solvers.batches import split_batch
from solvers.interleaving import multiple_of, possible_chunks
from solvers.layers import Choice, LayerSplitter
from solvers.replicas import Share, dealt_samples
from solvers.zero import LOCKSTEP, fewest_holders

Group = tuple[int, ...]  # devices of a TP group


@dataclass(frozen=True, slots=True)
class Bundle:
    """Pipelines of equal stages, and their micro-batch size in sequences; or one pipeline of replicated stages.

    `replicated`: each `stages[s]` has the replicas of one stage, as many as it likes, several somewhere.
    """

    stages: tuple[tuple[Group, ...], ...]
    micro_batch_size: int = 1
    replicated: bool = False

    @classmethod
    def line(cls, stages: Sequence[tuple[Group, ...]], micro_batch_size: int) -> "Bundle":
        """One pipeline, of replicated stages where they have several groups."""
        return cls(tuple(stages), micro_batch_size, any(len(slot) > 1 for slot in stages))

    @property
    def width(self) -> int:
        """Pipelines of the bundle."""
        return 1 if self.replicated else len(self.stages[0])

    @property
    def most_replicas(self) -> int:
        """The most replicas of a stage; a micro-batch has a sample for each."""
        return max(map(len, self.stages)) if self.replicated else 1

    def with_stages(self, stages: Iterable[tuple[Group, ...]]) -> "Bundle":
        """The bundle with other stages."""
        kept = tuple(stages)
        return Bundle.line(kept, self.micro_batch_size) if self.replicated else Bundle(kept, self.micro_batch_size)


@dataclass(frozen=True, slots=True)
class Structure:
    """Bundles, and what is chosen once for the plan."""

    bundles: tuple[Bundle, ...]
    schedule: str
    sharding: int
    chunks: int = 1  # layer ranges a stage where interleaved; fewer in pipelines that cannot have as many
    groups: str = "all"  # sharding groups

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the plan."""
        return sum(bundle.width for bundle in self.bundles)

    def with_bundles(self, bundles: Iterable[Bundle]) -> "Structure":
        """The structure with other bundles."""
        return replace(self, bundles=tuple(bundles))

    def devices(self) -> set[int]:
        """All devices used."""
        return {d for b in self.bundles for slot in b.stages for group in slot for d in group}


@dataclass(frozen=True, slots=True)
class Misfit:
    """A structure that no plan follows: so many layers (or sequences) found no place."""

    missing: int


class Builder:
    """Completes structures into plans: layers, recompute, micro-batches per pipeline. Keeps what it computed."""

    def __init__(self, search: Search, replicates: bool = True) -> None:
        self.search = search
        self.problem: Problem = search.problem
        self.pricer: Pricer = search.pricer
        space, policies = self.problem.space, search.pricer.policies()
        sets = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        self._splitters = [LayerSplitter(search.pricer, chosen, not space.uneven_layers) for chosen in sets]
        self._laid: dict[tuple[Any, ...], list[_Line] | Misfit] = {}
        self._machine_of: list[int] = self.problem.cluster.machine_of.tolist()
        # Other pricers need not know of replicas.
        self.replicates = replicates and space.replicas and isinstance(search.pricer, CostModel)

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
            far += max(0, len(bundles) - 1) + (structure.schedule == "interleaved")
            far += sum(most % (b.width * b.micro_batch_size) != 0 for b in bundles)
        return far

    def build(self, structure: Structure) -> tuple[Plan, float] | Misfit:
        """The best completion of `structure` over the recompute choices, and an estimate of its longest pipeline.

        The estimate is for an idle network, without gradient sync and optimiser.
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
        for bundle in structure.bundles:
            width = bundle.width
            if width > 3:
                chosen = (0, width // 2, width - 1)
                bundle = bundle.with_stages(tuple(slot[k] for k in chosen) for slot in bundle.stages)
            laid = self._lay(bundle, structure, shards, expected, self._splitters[0])
            if isinstance(laid, Misfit):
                return 0.0
            total += sum(bundle.micro_batch_size / one.beat_s for one in laid) * width / bundle.width
        return total

    def finish_s(
        self, groups: Sequence[Group], size: int, schedule: str, shards: Shards, sequences: float, chunks: int = 1
    ) -> float:
        """Estimated seconds in which one pipeline of stages `groups` processes `sequences`; infinite if none fits."""
        batches = max(1, round(sequences / size))
        chunks = possible_chunks(chunks, len(groups), self.problem.model.num_layers)
        sites = [frozenset((self.pricer.site(group),)) for group in groups]
        split = self._splitters[0].split(
            sites, size, schedule, batches, shards, self._sends_s([(g,) for g in groups], size), chunks
        )
        if isinstance(split, int):
            return float("inf")
        fill_s, beat_s = self._rhythm(groups, size, split, chunks)
        return fill_s + sequences / size * beat_s

    def rebalance(self, plan: Plan, priced: Sequence[PipelineCost]) -> Plan | None:
        """`plan` with micro-batches by the priced times of its pipelines; None where nothing would change."""
        ends = [cost.end_s for cost in priced]
        fixed = not self.problem.space.uneven_batch or plan.sharding.stage >= LOCKSTEP
        if len(ends) < 2 or fixed or plan.schedule == "gpipe":
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
        lines: list[_Line] = []
        sizes: list[int] = []
        missing = 0
        for bundle in structure.bundles:
            laid = self._lay(bundle, structure, shards, expected, splitter)
            if isinstance(laid, Misfit):
                missing += laid.missing * bundle.width
            else:
                lines += laid
                sizes += [bundle.micro_batch_size] * bundle.width
        if missing:
            return Misfit(missing)
        fills, beats = [line.fill_s for line in lines], [line.beat_s for line in lines]
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

    def _lay(
        self, bundle: Bundle, structure: Structure, shards: Shards, expected: int, splitter: LayerSplitter
    ) -> list["_Line"] | Misfit:
        """The bundle's pipelines with layers and policies; `expected` sequences each."""
        size, p, schedule = bundle.micro_batch_size, len(bundle.stages), structure.schedule
        chunks = structure.chunks if schedule == "interleaved" else 1
        chunks = possible_chunks(chunks, p, self.problem.model.num_layers)
        batches = max(1, expected // size)
        if schedule != "gpipe":
            batches = min(batches, p * (3 if chunks > 1 else 1))
        key = (bundle, schedule, chunks, shards, batches, splitter)
        found = self._laid.get(key)
        if found is None:
            if len(self._laid) > 50_000:
                self._laid.clear()
            if bundle.replicated:
                found = self._lay_replicas(bundle, structure, shards, batches, splitter, chunks)
            else:
                sites = [frozenset(self.pricer.site(group) for group in slot) for slot in bundle.stages]
                added_s = self._sends_s(bundle.stages, size)
                split = splitter.split(sites, size, schedule, batches, shards, added_s, chunks)
                if isinstance(split, int):
                    found = Misfit(split)
                else:
                    lines = [tuple(slot[k] for slot in bundle.stages) for k in range(bundle.width)]
                    found = [self._line(line, size, split, chunks) for line in lines]
            self._laid[key] = found
        return found

    def _lay_replicas(
        self,
        bundle: Bundle,
        structure: Structure,
        shards: Shards,
        batches: int,
        splitter: LayerSplitter,
        chunks: int,
    ) -> list["_Line"] | Misfit:
        """The pipeline of a replicated bundle; samples by the speed of the replicas."""
        pricer, slots, size = self.pricer, bundle.stages, bundle.micro_batch_size
        if bundle.most_replicas > size:
            return Misfit(bundle.most_replicas - size)
        samples = [self._samples(slots, s, size) for s in range(len(slots))]
        shares = [
            [Share(pricer.site(group), n) for group, n in zip(slot, own, strict=True)]
            for slot, own in zip(slots, samples, strict=True)
        ]
        hop_s = [
            max(
                pricer.hop_s(one[a], two[b], common) + pricer.hop_s(two[b], one[a], common)
                for a, b, common in sample_overlaps(*given)
            )
            for (one, two), given in zip(pairwise(slots), pairwise(samples), strict=True)
        ]
        # Replicas hold the same layers and share their states, all of them or those of a machine.
        more = tuple(len(slot) - 1 if structure.groups == "all" else 0 for slot in slots)
        split = splitter.split(
            [frozenset(own) for own in shares], size, structure.schedule, batches, shards, (), chunks, more
        )
        if isinstance(split, int):
            return Misfit(split)
        last = len(slots) - 1
        stage_s = [
            max(sum(pricer.stage_s(site, n, s == 0, s == last, given, policy)) for site, given in own)
            for s, (own, (n, policy)) in enumerate(zip(shares, split, strict=True))
        ]
        stages = tuple(
            Stage(tuple(map(Replica, slot, own)) if len(slot) > 1 else (Replica(slot[0]),), ranges, (policy,))
            for slot, own, ranges, (_, policy) in zip(
                slots, samples, layer_ranges([n for n, _ in split], chunks), split, strict=True
            )
        )
        return [_Line(stages, *_rhythm(stage_s, hop_s, chunks))]

    def _samples(self, slots: Sequence[tuple[Group, ...]], s: int, size: int) -> tuple[int, ...]:
        """Samples for the replicas of stage s; an equal share of the layers stands for its own."""
        last, policy = len(slots) - 1, self.pricer.policies()[0]
        layers = max(1, self.problem.model.num_layers // len(slots))

        def seconds(site: Any) -> Callable[[int], float]:
            return lambda samples: sum(self.pricer.stage_s(site, layers, s == 0, s == last, samples, policy))

        return dealt_samples([seconds(self.pricer.site(group)) for group in slots[s]], size)

    def _sends_s(self, stages: Sequence[tuple[Group, ...]], size: int) -> tuple[float, ...]:
        """What each stage spends on its messages to the next, both directions, where senders wait for them."""
        if not self.pricer.sends_occupy_stages:
            return ()
        hop_s = self.pricer.hop_s
        waits = [
            max(hop_s(a, b, size) + hop_s(b, a, size) for a, b in zip(one, two, strict=True))
            for one, two in pairwise(stages)
        ]
        return (*waits, 0.0)

    def _line(self, groups: tuple[Group, ...], size: int, split: tuple[Choice, ...], chunks: int) -> "_Line":
        """One pipeline on an idle network."""
        stages = tuple(
            Stage((Replica(group),), ranges, (policy,))
            for group, ranges, (_, policy) in zip(
                groups, layer_ranges([n for n, _ in split], chunks), split, strict=True
            )
        )
        return _Line(stages, *self._rhythm(groups, size, split, chunks))

    def _rhythm(
        self, groups: Sequence[Group], size: int, split: tuple[Choice, ...], chunks: int = 1
    ) -> tuple[float, float]:
        """(fill, beat) in seconds of one pipeline on an idle network: m micro-batches take about fill + m · beat."""
        pricer, last = self.pricer, len(groups) - 1
        stage_s = [
            sum(pricer.stage_s(pricer.site(group), n, s == 0, s == last, size, policy))
            for s, (group, (n, policy)) in enumerate(zip(groups, split, strict=True))
        ]
        hop_s = [pricer.hop_s(a, b, size) + pricer.hop_s(b, a, size) for a, b in pairwise(groups)]
        return _rhythm(stage_s, hop_s, chunks)


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline's stages; m micro-batches take about fill + m · beat seconds."""

    stages: tuple[Stage, ...]
    fill_s: float
    beat_s: float


def _rhythm(stage_s: Sequence[float], hop_s: Sequence[float], chunks: int) -> tuple[float, float]:
    """(fill, beat) of a pipeline whose stages and messages take so long, forward and backward together."""
    beat = beat_s(stage_s, hop_s) if chunks == 1 else interleaved_beat_s(stage_s, hop_s, chunks)
    return max(0.0, (sum(stage_s) - beat) / chunks + sum(hop_s)), beat


def _with_count(pipeline: Pipeline, count: int) -> Pipeline:
    return replace(pipeline, num_micro_batches=count)

"""What a search moves: which devices form which stages; the rest of a plan is computed from it.

A *bundle* is a set of pipelines with the same stages: `stages[s][k]` is the TP group of its pipeline k in stage s.
Bundles of one pipeline say anything a plan can say; wider ones keep pipelines aligned, so that their layers meet
the same machines, and move as one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem import Problem
from solvers.base import Pricer, Search
from solvers.batches import beat_s, split_batch
from solvers.layers import Choice, LayerSplitter

Group = tuple[int, ...]  # devices of a TP group


@dataclass(frozen=True, slots=True)
class Bundle:
    """Pipelines of equal stages, and their micro-batch size in sequences."""

    stages: tuple[tuple[Group, ...], ...]
    micro_batch_size: int = 1

    @property
    def width(self) -> int:
        """Pipelines of the bundle."""
        return len(self.stages[0])

    def with_stages(self, stages: Iterable[tuple[Group, ...]]) -> "Bundle":
        """The bundle with other stages."""
        return Bundle(tuple(stages), self.micro_batch_size)


@dataclass(frozen=True, slots=True)
class Structure:
    """Bundles, and what is chosen once for the plan."""

    bundles: tuple[Bundle, ...]
    schedule: str
    sharding: int

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the plan."""
        return sum(bundle.width for bundle in self.bundles)

    def with_bundles(self, bundles: Iterable[Bundle]) -> "Structure":
        """The structure with other bundles."""
        return Structure(tuple(bundles), self.schedule, self.sharding)

    def devices(self) -> set[int]:
        """All devices used."""
        return {d for b in self.bundles for slot in b.stages for group in slot for d in group}


@dataclass(frozen=True, slots=True)
class Misfit:
    """A structure that no plan follows: so many layers (or sequences) found no place."""

    missing: int


class Builder:
    """Completes structures into plans: layers, recompute, micro-batches per pipeline. Keeps what it computed."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.problem: Problem = search.problem
        self.pricer: Pricer = search.pricer
        space, policies = self.problem.space, search.pricer.policies()
        sets = [policies] if space.recompute_per_stage else [(policy,) for policy in policies]
        self._splitters = [LayerSplitter(search.pricer, chosen, not space.uneven_layers) for chosen in sets]
        self._rhythms: dict[tuple[Any, ...], tuple[float, float]] = {}

    def allowed(self, structure: Structure) -> bool:
        """Whether the structure obeys the switches and constraints of the plan space."""
        space = self.problem.space
        bundles = structure.bundles
        if not bundles or structure.num_pipelines > self.problem.workload.global_batch:
            return False
        if space.num_pipelines is not None and structure.num_pipelines != space.num_pipelines:
            return False
        if space.num_stages is not None and any(len(b.stages) != space.num_stages for b in bundles):
            return False
        if any(len(b.stages) > self.problem.model.num_layers for b in bundles):
            return False
        if not space.uneven_structure and len(bundles) > 1:
            return False
        if not space.uneven_tp and len({len(slot[0]) for b in bundles for slot in b.stages}) > 1:
            return False
        return space.uneven_batch or len({b.micro_batch_size for b in bundles}) == 1

    def build(self, structure: Structure) -> Plan | Misfit:
        """The best completion of `structure`, by estimated step time over the splitters."""
        best: tuple[float, Plan] | None = None
        missing = 1 << 30
        for splitter in self._splitters:
            found = self._build(structure, splitter)
            if isinstance(found, Misfit):
                missing = min(missing, found.missing)
            elif best is None or found[0] < best[0]:
                best = found
        return best[1] if best else Misfit(missing)

    def price(self, structure: Structure) -> tuple[Plan, Cost] | Misfit:
        """Plan and cost of `structure`; the batch split once more by the priced times where that helps."""
        plan = self.build(structure)
        if isinstance(plan, Misfit):
            return plan
        cost = self.search.offer(plan)
        again = self.rebalance(plan, cost)
        if again is not None:
            second = self.search.offer(again)
            if second.objective < cost.objective:
                return again, second
        return plan, cost

    def rate(self, structure: Structure, sharding: int) -> float:
        """Estimated sequences per second of `structure` alone under a ZeRO stage; 0 where it does not fit."""
        total = 0.0
        for bundle in structure.bundles:
            found = self._layout(bundle, structure.schedule, bundle.width if sharding else 1, 1 << 20)
            if isinstance(found, Misfit):
                return 0.0
            total += sum(bundle.micro_batch_size / self._rhythm(bundle, k, found)[1] for k in range(bundle.width))
        return total

    def rebalance(self, plan: Plan, cost: Cost) -> Plan | None:
        """`plan` with micro-batches by the priced times of its pipelines; None where nothing would change."""
        ends = [priced.end_s for priced in cost.pipelines]
        if len(ends) < 2 or not self.problem.space.uneven_batch or plan.schedule == "gpipe":
            return None
        if max(ends) - sum(ends) / len(ends) < 0.002 * cost.step_time_s:
            return None
        fills, beats = [], []
        for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
            stages = [s.forward_s + s.backward_s for s in priced.stages]
            fill = sum(stages) + sum(priced.send_forward_s) + sum(priced.send_backward_s)
            more = pipeline.num_micro_batches - 1
            beat = max((priced.end_s - fill) / more if more else 0.0, max(stages))
            fills.append(priced.end_s - (more + 1) * beat)
            beats.append(beat)
        sizes = [pipeline.micro_batch_size for pipeline in plan.pipelines]
        counts = split_batch(fills, beats, sizes, self.problem.workload.global_batch)
        if counts is None or counts == [pipeline.num_micro_batches for pipeline in plan.pipelines]:
            return None
        return replace(plan, pipelines=tuple(map(_with_count, plan.pipelines, counts)))

    def _layout(
        self, bundle: Bundle, schedule: str, shards: int, num_micro_batches: int, splitter: LayerSplitter | None = None
    ) -> tuple[Choice, ...] | Misfit:
        """Layers and policies of a bundle's stages."""
        sites = [frozenset(self.pricer.site(group) for group in slot) for slot in bundle.stages]
        splitter = splitter or self._splitters[0]
        split = splitter.split(sites, bundle.micro_batch_size, schedule, num_micro_batches, shards)
        return Misfit(split) if isinstance(split, int) else split

    def _build(self, structure: Structure, splitter: LayerSplitter) -> tuple[float, Plan] | Misfit:
        schedule, batch = structure.schedule, self.problem.workload.global_batch
        shards = structure.num_pipelines if structure.sharding else 1
        expected = max(1, -(-batch // structure.num_pipelines))
        choices: list[tuple[Choice, ...]] = []
        missing = 0
        for bundle in structure.bundles:
            layout = self._layout(bundle, schedule, shards, max(1, expected // bundle.micro_batch_size), splitter)
            if isinstance(layout, Misfit):
                missing += layout.missing * bundle.width
            else:
                choices.append(layout)
        if missing:
            return Misfit(missing)
        fills, beats, sizes = [], [], []
        for bundle, split in zip(structure.bundles, choices, strict=True):
            for k in range(bundle.width):
                fill, beat = self._rhythm(bundle, k, split)
                fills.append(fill)
                beats.append(beat)
                sizes.append(bundle.micro_batch_size)
        counts = split_batch(fills, beats, sizes, batch, even=not self.problem.space.uneven_batch)
        if counts is None:
            return Misfit(1)
        pipelines, at = [], 0
        for bundle, split in zip(structure.bundles, choices, strict=True):
            for k in range(bundle.width):
                stages, layer = [], 0
                for slot, (n, policy) in zip(bundle.stages, split, strict=True):
                    stages.append(Stage.of(slot[k], layer, layer + n, policy))
                    layer += n
                pipelines.append(Pipeline(tuple(stages), counts[at], bundle.micro_batch_size))
                at += 1
        longest = max(f + b * c for f, b, c in zip(fills, beats, counts, strict=True))
        return longest, Plan(tuple(pipelines), schedule, Sharding(structure.sharding))

    def _rhythm(self, bundle: Bundle, k: int, split: tuple[Choice, ...]) -> tuple[float, float]:
        """(fill beyond a beat per micro-batch, beat) of pipeline k, on an idle network."""
        key = (tuple(slot[k] for slot in bundle.stages), bundle.micro_batch_size, split)
        found = self._rhythms.get(key)
        if found is None:
            if len(self._rhythms) > 200_000:
                self._rhythms.clear()
            pricer, size, p = self.pricer, bundle.micro_batch_size, len(bundle.stages)
            groups = [slot[k] for slot in bundle.stages]
            stage_s = [
                sum(pricer.stage_s(pricer.site(group), n, s == 0, s == p - 1, size, policy))
                for s, (group, (n, policy)) in enumerate(zip(groups, split, strict=True))
            ]
            hop_s = [
                pricer.hop_s(a, b, size) + pricer.hop_s(b, a, size) for a, b in zip(groups, groups[1:], strict=False)
            ]
            beat = beat_s(stage_s, hop_s)
            found = self._rhythms[key] = (max(0.0, sum(stage_s) + sum(hop_s) - beat), beat)
        return found


def _with_count(pipeline: Pipeline, count: int) -> Pipeline:
    return replace(pipeline, num_micro_batches=count)

"""All pipelines on one placement of TP groups that take less than a limit when alone on an otherwise idle cluster.

A candidate never takes longer alone than inside a plan, where it shares the network and waits for others, and where its
states are spread over no more holders. A stage recomputes as little as fits, along each of the chains of increasing
recomputation (`recompute_chains`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import Replica, Replicated, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.space import Recompute, recompute_chains
from hexiopt.schedules.in_flight import holding
from solvers.exact.assignments import PlacedDevices
from solvers.exact.sample_allocation import GlobalChoices, ReplicaSeconds, SampleAllocation
from solvers.exact.splits import Layers, layer_cuts

_SLACK = 1e-9  # of a limit, for rounding


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline, and when each of its replicas ends if it runs alone, stage by stage: seconds, `exact` or a lower
    bound. `last_s` are those of the backward that each ends with.
    """

    pipeline: Pipeline
    ends_s: tuple[float, ...]
    last_s: tuple[float, ...]
    exact: bool

    @property
    def begins_s(self) -> tuple[float, ...]:
        """When each replica begins its last backward, likewise."""
        return tuple([end_s - own_s for end_s, own_s in zip(self.ends_s, self.last_s, strict=True)])

    @property
    def layers(self) -> Layers:
        """The layer ranges of each stage."""
        return tuple(stage.layers for stage in self.pipeline.stages)


class Candidates:
    """The candidates of all placements in a search; caches what it computes."""

    def __init__(self, model: PlanPricer) -> None:
        self._model = model
        self._problem = model.problem
        self._sizes = self._problem.space.micro_batch_sizes(self._problem.workload.global_batch)
        self._found: dict[tuple[GlobalChoices, PlacedDevices, int], tuple[float, list[Candidate]]] = {}
        self._seconds = ReplicaSeconds(model)

    def most_sequences(self, groups: PlacedDevices, limit_s: float, policy: str) -> int:
        """The most sequences of the batch whose layers alone keep the devices busy for less than `limit_s`."""
        rate = sum(
            max(
                size / sum(self._model.stages.layer_s(self._model.tp_group(group), size, policy))
                for size in range(1, self._sizes[-1] + 1)
            )
            for stage in groups
            for group in stage
        )
        most = limit_s * (1 + _SLACK) * rate / self._problem.model.num_layers
        return int(min(self._problem.workload.global_batch, most))

    def of(
        self, groups: PlacedDevices, num_sequences: int, global_choices: GlobalChoices, limit_s: float
    ) -> list[Candidate]:
        """The candidates that process `num_sequences` and may take less than `limit_s`, the most promising first."""
        if global_choices.sharding and self._always_fits(groups, num_sequences, global_choices):
            global_choices = replace(global_choices, sharding=0, holders=1)
        key = (global_choices, groups, num_sequences)
        known = self._found.get(key)
        if known is None or known[0] < limit_s:
            made = list(self._make(groups, num_sequences, global_choices, limit_s))
            plain = global_choices.schedule.plain()
            if global_choices.schedule.chunked:  # with one layer range
                made += self.of(groups, num_sequences, replace(global_choices, schedule=plain), limit_s)
            known = self._found[key] = (limit_s, sorted(made, key=lambda one: max(one.ends_s)))
        if known[0] > limit_s:
            known = self._found[key] = (limit_s, [one for one in known[1] if max(one.ends_s) < limit_s])
        return known[1]

    def exact(self, candidate: Candidate, global_choices: GlobalChoices) -> Candidate:
        """The candidate with its exact ends, from the cost model."""
        if candidate.exact:
            return candidate
        cost = self._model.pipelines(Plan((candidate.pipeline,), global_choices.schedule))[0]
        return replace(candidate, ends_s=cost.executor_end_s, exact=True)

    def _make(
        self, groups: PlacedDevices, num_sequences: int, global_choices: GlobalChoices, limit_s: float
    ) -> Iterator[Candidate]:
        """The candidates in any order; with an interleaved schedule, only those with several layer ranges per stage."""
        least = max(map(len, groups))  # every replica needs a sample
        for size in self._sizes:
            count, left = divmod(num_sequences, size)
            if left or size < least:
                continue
            allocation = SampleAllocation(self._seconds, groups, size, count, global_choices, limit_s)
            for layers in self._layers(len(groups), count, global_choices.schedule.chunked):
                for allocated, ends_s, last_s in allocation.allocations(layers):
                    stages = tuple(
                        _stage(replicas, ranges, given, recompute)
                        for replicas, ranges, (given, recompute) in zip(groups, layers, allocated, strict=True)
                    )
                    yield Candidate(Pipeline(stages, count, size), ends_s, last_s, False)

    def _layers(self, num_stages: int, num_micro_batches: int, several: bool) -> Iterator[Layers]:
        """Every way to cut the model's layers into one range per stage or, with `several`, into several ranges, equally
        many each.
        """
        total, space = self._problem.model.num_layers, self._problem.space
        counts = range(1, 2)
        if several:
            turns = num_stages > 1 and num_micro_batches % num_stages == 0
            counts = range(2, min(space.max_chunks, total // num_stages) + 1) if turns else range(0)
        for chunks in counts:
            yield from layer_cuts(total, num_stages, chunks, not space.uneven_layers)

    def _always_fits(self, groups: PlacedDevices, num_sequences: int, global_choices: GlobalChoices) -> bool:
        """Whether every stage fits in any case: all layers, the fastest policy, all sequences in flight, unsharded."""
        total = self._problem.model.num_layers
        return all(
            self._model.stages.memory_model(tp_group, size)
            .stage(total, True, True, global_choices.policies[0], holding(held))
            .total
            <= tp_group.gpu.usable_memory_bytes
            for tp_group in {self._model.tp_group(group) for stage in groups for group in stage}
            for size in self._sizes
            if (held := num_sequences // size)
        )


def leaner_stages(
    stages: Sequence[Stage], full: Sequence[bool], policies: tuple[str, ...], per_layer: bool
) -> Iterator[tuple[Stage, ...]]:
    """`stages` in which the `full` ones recompute one step more, in every way; nothing where one of them cannot."""
    yield from product(
        *(_leaner(stage, policies, per_layer) if over else [stage] for stage, over in zip(stages, full, strict=True))
    )


def _leaner(stage: Stage, policies: tuple[str, ...], per_layer: bool) -> list[Stage]:
    """The stage with the next policies in every chain that contains its own."""
    chains = recompute_chains(policies, stage.num_layers, per_layer)
    after = {b: None for chain in chains for a, b in pairwise(chain) if a == stage.recompute}
    return [replace(stage, recompute=recompute) for recompute in after]


def _stage(
    replicas: Sequence[tuple[int, ...]], ranges: tuple[tuple[int, int], ...], given: Sequence[int], recompute: Recompute
) -> Stage:
    if len(replicas) == 1:
        return Stage(TensorParallel(replicas[0]), ranges, recompute)
    return Stage(Replicated(tuple(map(Replica, replicas, given))), ranges, recompute)

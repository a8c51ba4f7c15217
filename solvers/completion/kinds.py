"""Ranges of layers where layers are of several kinds: searches split the mean layer, and their plans' layers are split
again here by what each layer takes and holds.

Seconds and bytes of a range grow with it, so that for a bottleneck each stage in turn takes the longest range within
it, and bisection finds the least bottleneck at which the last stage reaches the end (chains on chains; Pinar and
Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning", section 3).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hexiopt.cost.context import PipelineContext, plan_context
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.plan.holdings import sharding_groups
from hexiopt.plan.parallelism import SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.space import Recompute, recompute_policies
from hexiopt.schedules.in_flight import InFlight, stages_in_flight
from solvers.core.zero import LOCKSTEP

_NO_TIME_S = 1e-12
_BISECTIONS = 20  # the bottleneck is known to a millionth of what it was


def split_by_kind(plan: Plan, stages: StageModel) -> Plan | None:
    """`plan` with its layers split by their kinds; None where nothing would change, or no split fits memory, or where
    pipelines must have the same layers and would not."""
    problem = stages.problem
    if not problem.space.uneven_layers or any(pipeline.num_chunks > 1 for pipeline in plan.pipelines):
        return None
    contexts = plan_context(plan, sharding_groups(plan, problem.cluster), stages)
    pipelines, known = list[Pipeline](), dict[Hashable, Pipeline | None]()
    for pipeline, context in zip(plan.pipelines, contexts, strict=True):
        splitter = _Splitter(pipeline, plan, context, stages)
        kind = splitter.kind
        if kind not in known:
            known[kind] = splitter.split()
        split = known[kind]
        if split is None:
            return None
        pairs = zip(pipeline.stages, split.stages, strict=True)
        like = [replace(stage, layers=other.layers, recompute=other.recompute) for stage, other in pairs]
        pipelines.append(replace(pipeline, stages=tuple(like)))
    together = plan.sharding.stage >= LOCKSTEP or not problem.space.uneven_structure
    if together and len({tuple([stage.layers for stage in pipeline.stages]) for pipeline in pipelines}) > 1:
        return None
    return None if tuple(pipelines) == plan.pipelines else replace(plan, pipelines=tuple(pipelines))


@dataclass
class _Splitter:
    """Splits the layers of one pipeline."""

    pipeline: Pipeline
    plan: Plan
    context: PipelineContext
    stages: StageModel
    _known: dict[tuple[int, int, int], Stage | None] = field(default_factory=dict)

    @property
    def kind(self) -> Hashable:
        """Equal for pipelines whose layers are split alike: what their stages take and hold for any layers."""
        pipeline = self.pipeline
        places = [_place(stage, self.stages, pipeline.micro_batch_size) for stage in pipeline.stages]
        recompute = [stage.recompute for stage in pipeline.stages]
        spread = tuple(tuple(of_stage) for of_stage in self._holders)
        counts = pipeline.num_micro_batches, pipeline.micro_batch_size, tuple(pipeline.depths)
        return tuple(places), tuple(recompute), spread, counts

    def split(self) -> Pipeline | None:
        """The pipeline with the least bottleneck; None where memory has no room for all layers."""
        best, high_s = self._within(float("inf")), 0.0
        if best is None:
            return None
        high_s = max(self._seconds(s, stage) for s, stage in enumerate(best))
        low_s = 0.0
        for _ in range(_BISECTIONS):
            middle_s = 0.5 * (low_s + high_s)
            split = self._within(middle_s)
            if split is None:
                low_s = middle_s
            else:
                best, high_s = split, middle_s
        return replace(self.pipeline, stages=tuple(best))

    def _within(self, limit_s: float) -> list[Stage] | None:
        """Stages of the longest ranges that fit memory within `limit_s`; None where layers are left."""
        end, num_layers, count = 0, self.stages.problem.model.num_layers, len(self.pipeline.stages)
        split = list[Stage]()
        for s in range(count):
            stage = self._longest(s, end, num_layers - (count - s - 1), limit_s)
            if stage is None:
                return None
            split.append(stage)
            end = stage.layers[0][1]
        return split if end == num_layers else None

    def _longest(self, s: int, start: int, most: int, limit_s: float) -> Stage | None:
        """Stage s with the most layers from `start` on, up to layer `most`; None where not one is possible."""
        low, high, best = start, most, None
        while low < high:  # the longest possible range ends at or after `low`, no later than `high`
            middle = min(high, max(low + 1, (low + high + 1) // 2))
            at = s, start, middle
            if at not in self._known:
                self._known[at] = self._fastest(*at)
            stage = self._known[at]
            if stage is not None and self._seconds(s, stage) <= limit_s:
                low, best = middle, stage
            else:
                high = middle - 1
        return best

    def _fastest(self, s: int, start: int, end: int) -> Stage | None:
        """Stage s with layers `start` to `end` under the fastest recompute policies that fit; None where none do."""
        policies, space = recompute_policies(self.stages.problem.workload), self.stages.problem.space
        if not space.recompute_per_stage:
            policies = self.pipeline.stages[s].recompute
        candidates = [self._with(s, start, end, (policy,)) for policy in dict.fromkeys(policies)]
        candidates.sort(key=lambda stage: self._seconds(s, stage))
        fitting = [stage for stage in candidates if self._fits(s, stage)]
        if not fitting:
            return None
        if not space.recompute_per_layer or not space.recompute_per_stage:
            return fitting[0]
        faster = candidates[: candidates.index(fitting[0])]  # some of whose layers may have a policy that fits
        mixed = [self._least_recomputed(s, stage, other.recompute[0]) for stage in fitting for other in faster]
        return min((fitting[0], *mixed), key=lambda stage: self._seconds(s, stage))

    def _least_recomputed(self, s: int, stage: Stage, faster: str) -> Stage:
        """`stage`, whose one policy fits, with that policy for as few layers as fit, the others under `faster`: first
        for those of the kinds that free most bytes a second."""
        start, end = stage.layers[0]
        smaller = stage.recompute[0]
        depth = self.stages.problem.model.depth
        order = sorted(range(start, end), key=lambda n: -self._freed(s, faster, smaller)[depth[n]])

        def mixed(count: int) -> Stage:
            recomputed = set(order[:count])
            each = [smaller if n in recomputed else faster for n in range(start, end)]
            return self._with(s, start, end, tuple(each))

        return mixed(_least(1, end - start, lambda count: self._fits(s, mixed(count))))

    def _freed(self, s: int, faster: str, smaller: str) -> tuple[float, ...]:
        """Bytes that a layer of each kind frees for a second more, where it has the policy `smaller` [kinds]."""
        parallelism = self.pipeline.stages[s].parallelism
        devices, samples = parallelism.executors[0], parallelism.samples(self.pipeline.micro_batch_size)[0]
        group, model = self.stages.tp_group(devices), self.stages
        freed = list[float]()
        for kind, sizes in enumerate(model.memory_model(group, samples).of_kind):
            seconds = [sum(model.layer_s(group, samples, policy, kind)) for policy in (faster, smaller)]
            saved = sizes.layer_bytes(faster) - sizes.layer_bytes(smaller)
            freed.append(saved / max(seconds[1] - seconds[0], _NO_TIME_S))
        return tuple(freed)

    def _with(self, s: int, start: int, end: int, recompute: Recompute) -> Stage:
        return replace(self.pipeline.stages[s], layers=((start, end),), recompute=recompute)

    def _seconds(self, s: int, stage: Stage) -> float:
        return max(executor.forward_s + executor.backward_s for executor in self._price(s, stage))

    def _fits(self, s: int, stage: Stage) -> bool:
        return all(executor.excess_bytes <= 0 for executor in self._price(s, stage))

    def _price(self, s: int, stage: Stage) -> Sequence[ExecutorCost]:
        first, last = s == 0, s == len(self.pipeline.stages) - 1
        at = StagePlace(first, last, self._in_flight[s], self.plan.sharding.stage)
        return self.stages.executors(stage, self.pipeline.micro_batch_size, at, self._holders[s])

    @cached_property
    def _holders(self) -> list[tuple[tuple[float], ...]]:
        """By how many devices the states of each copy are spread at least [stages][copies]."""
        copies = [len(stage.parallelism.parameter_copies) for stage in self.pipeline.stages]
        spread = [self.context.sharding.holders(s, count) for s, count in enumerate(copies)]
        return [tuple([(min(of_copy),) for of_copy in of_stage]) for of_stage in spread]

    @cached_property
    def _in_flight(self) -> Sequence[InFlight]:
        pipeline = self.pipeline
        count, batches = len(pipeline.stages), pipeline.num_micro_batches
        return stages_in_flight(self.plan.schedule, count, batches, 1, pipeline.depths)


def _place(stage: Stage, stages: StageModel, micro_batch_size: int) -> Hashable:
    """Equal for stages whose devices take and hold the same for any layers."""
    parallelism = stage.parallelism
    if isinstance(parallelism, SequenceParallel):
        return parallelism
    degree = parallelism.degree if isinstance(parallelism, TensorParallel) else None
    groups = [(stages.tp_group(replica.devices), replica.heads) for replica in parallelism.replicas]
    return tuple(groups), degree, parallelism.samples(micro_batch_size), stage.in_flight


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` that `holds`, which `high` does, and all after the least."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

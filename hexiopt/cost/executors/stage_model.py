"""Seconds and bytes of single stages on their devices, and the routes of messages to the next stage.

Results that recur are memoised, routes by their ends.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple, assert_never

import numpy as np

from hexiopt.cost.executors.executor import ExecutorCost, ForwardLayers, Unit, units_of
from hexiopt.cost.executors.experts.stage import ExpertParallelStage
from hexiopt.cost.executors.group_model import GroupModel
from hexiopt.cost.executors.memory import Holders, StateSharding, most_together
from hexiopt.cost.executors.network_load import LinkTable
from hexiopt.cost.executors.ranges import Ints, LayerRanges, RangeBytes, counts_by_kind
from hexiopt.cost.executors.routes import Routes
from hexiopt.cost.executors.sequence.context_parallel import ContextParallel
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.executors.states import Layers
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers.frameworks import Framework
from hexiopt.plan.parallelism import ExpertParallel, Replicated, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute
from hexiopt.schedules.in_flight import InFlight

_MEMO_SIZE = 50_000  # prices of stages

Contention = tuple[tuple[int, int], ...]
"""Network resources shared by more than one sequence-parallel stage, each with the number of stages that share it."""


class StagePlace(NamedTuple):
    """What the cost of a stage depends on besides the stage: whether it is the first or the last of its pipeline, its
    micro-batches in flight, the ZeRO stage, and the messages `queued` beyond those of any stage."""

    first: bool
    last: bool
    in_flight: InFlight
    zero_stage: int = 0
    queued: int = 0


class _GroupStage(NamedTuple):
    tp_group: TpGroup
    layers: tuple[tuple[int, int], ...]
    recompute: Recompute
    samples: int
    place: StagePlace
    holders: Holders


class _LayoutStage(NamedTuple):
    layout: SequenceParallel
    policies: Recompute
    micro_batch_size: int
    place: StagePlace
    holders: tuple[Holders, ...]
    contention: Contention


class _ExpertStage(NamedTuple):
    group: ExpertParallel
    layers: tuple[tuple[int, int], ...]
    recompute: Recompute
    place: StagePlace
    holders: tuple[Holders, ...]


RangesKey = tuple[tuple[TpGroup, int], ...] | ExpertParallel
"""TP groups and the sequences that each takes, or replicas that share experts."""


class _LayoutKey(NamedTuple):
    layout: SequenceParallel
    micro_batch_size: int
    shared: Contention


class StageModel(GroupModel):
    """Prices single stages of a problem. Raises InputError as `GroupModel`."""

    def __init__(
        self, problem: Problem, framework: Framework | None = None, context: ContextParallel | None = None
    ) -> None:
        super().__init__(problem, framework, context)
        self.routes = Routes(problem)
        self._sequence_stages = Memo(self._new_sequence_stage, 4096)
        self._group_costs = Memo(self._price_group, _MEMO_SIZE)
        self._layout_costs = Memo(self._price_layout, _MEMO_SIZE)
        self._expert_stages = Memo(partial(ExpertParallelStage, self), 4096)
        self._expert_costs = Memo(self._price_experts, _MEMO_SIZE)
        self._links = LinkTable(problem.cluster)

    def spreads_over_ends(self, zero_stage: int) -> bool:
        """Whether the states of a tied matrix are spread over all that hold it, not those of a first or last stage."""
        return zero_stage == 1 and self.framework.spreads_over_ends and self.problem.parameters.tied_params > 0

    def sequence_stage(
        self, layout: SequenceParallel, micro_batch_size: int, contention: Contention = ()
    ) -> SequenceStage:
        """The price of a stage with a sequence layout, which shares the resources of `contention` that it uses."""
        alone = self._sequence_stages[_LayoutKey(layout, micro_batch_size, ())]
        shared = tuple([(resource, count) for resource, count in contention if resource in alone.network_resources])
        return self._sequence_stages[_LayoutKey(layout, micro_batch_size, shared)] if shared else alone

    def _new_sequence_stage(self, key: _LayoutKey) -> SequenceStage:
        layout, micro_batch_size, shared = key
        return SequenceStage(self.problem, self.framework, layout, micro_batch_size, dict(shared), self._links)

    def executors(
        self,
        stage: Stage,
        micro_batch_size: int,
        place: StagePlace,
        holders: Sequence[Holders],
        contention: Contention = (),
    ) -> tuple[ExecutorCost, ...]:
        """The cost of each executor of a stage [executors].

        The states of a parameter copy are spread over `holders` [copies].
        """
        match stage.parallelism:
            case SequenceParallel() as layout:
                (policies,) = stage.policies()
                key = _LayoutStage(layout, policies, micro_batch_size, place, tuple(holders), contention)
                return (self._layout_costs[key],)
            case TensorParallel(devices) as group:
                layers, cell = self._priced_layers(stage), self.tp_groups.of(devices)
                cell = self.tp_groups.with_degree(cell, group.degree or len(devices))
                only = _GroupStage(cell, layers, stage.recompute, micro_batch_size, place, holders[0])
                return (self._group_costs[only],)
            case Replicated() as groups:
                layers = self._priced_layers(stage)
                return tuple(
                    [
                        self._group_costs[
                            _GroupStage(self.whole_group(devices), layers, stage.recompute, samples, place, spread)
                        ]
                        for devices, samples, spread in zip(
                            groups.executors, groups.samples(micro_batch_size), holders, strict=True
                        )
                    ]
                )
            case ExpertParallel() as group:
                shared = _ExpertStage(group, stage.layers, stage.recompute, place, tuple(holders))
                return (self._expert_costs[shared],)
            case never:
                assert_never(never)

    def ranges_key(self, stage: Stage, micro_batch_size: int) -> RangesKey:
        """On what `ranges` of a stage depend besides its place."""
        match stage.parallelism:
            case TensorParallel(devices) as group:
                cell = self.tp_groups.with_degree(self.tp_groups.of(devices), group.degree or len(devices))
                return ((cell, micro_batch_size),)
            case Replicated() as groups:
                samples = groups.samples(micro_batch_size)
                return tuple([(self.whole_group(d), n) for d, n in zip(groups.executors, samples, strict=True)])
            case ExpertParallel() as group:
                return group
            case _:
                raise InputError("plan: stages with sequence layouts have layers of one kind")

    def ranges(
        self, key: RangesKey, place: StagePlace, holders: Sequence[Holders], policies: tuple[str, ...]
    ) -> LayerRanges:
        """The stage of `ranges_key` with any range of layers, all under one of `policies`; arguments as of `executors`,
        one layer range, and one number of `holders` for all layers."""
        first, last, ((in_flight,),), zero_stage, _ = place
        kinds = range(len(self.problem.model.kinds))
        if isinstance(key, ExpertParallel):
            shared = self.expert_stage(key)
            layer_s = [[sum(shared.layer_s(kind, policy)) for kind in kinds] for policy in policies]
            ends_s, models = sum(shared.range_s([Counter()] * len(kinds), first, last)), shared.memory_models
        else:
            layer_s = [
                [max(sum(self.layer_s(group, n, policy, kind)) for group, n in key) for kind in kinds]
                for policy in policies
            ]
            ends_s = max(sum(self.stage_s(group, 0, first, last, n, ("none",))) for group, n in key)
            models = [(self.memory_model(group, n), group.gpu) for group, n in key]
            if len(models) == 1:  # whose replicas share experts
                models *= len(holders)
        copies = dict.fromkeys(zip(models, holders, strict=True))
        bytes_of = [
            RangeBytes.of(
                model, gpu.usable_memory_bytes, policies, (first, last), in_flight, StateSharding(zero_stage, n, tied)
            )
            for (model, gpu), ((n,), tied) in copies
        ]
        return LayerRanges(policies, self._kind_counts, np.array(layer_s), ends_s, tuple(bytes_of))

    @cached_property
    def _kind_counts(self) -> Ints:
        return counts_by_kind(self.problem.model)

    def _priced_layers(self, stage: Stage) -> tuple[tuple[int, int], ...]:
        """The layer ranges on which a price depends: where all layers are equal, on their lengths alone."""
        several = len(self.problem.model.kinds) > 1
        return stage.layers if several else tuple([(0, end - start) for start, end in stage.layers])

    def _price_group(self, key: _GroupStage) -> ExecutorCost:
        tp_group, layers, recompute, samples, place, holders = key
        lengths = [end - start for start, end in layers]
        first, last, in_flight, zero_stage, queued = place
        model, final = self.memory_model(tp_group, samples), len(lengths) - 1
        ranges = [recompute] * (final + 1)
        if len(recompute) > 1:
            ranges = [recompute[start:end] for start, end in pairwise([0, *accumulate(lengths)])]
        sharding = model.sharding(zero_stage, holders, first, last)
        ends = [(first and k == 0, last and k == final) for k in range(final + 1)]
        together = most_together(ranges)
        num_layers: Layers
        if len(self.problem.model.kinds) > 1:
            kinds = [self.count_by_kind(span, policies) for span, policies in zip(layers, ranges, strict=True)]
            chunk_s = [self._stage_of_kinds_s(tp_group, row, *at, samples) for row, at in zip(kinds, ends, strict=True)]
            memory = model.stage_of_kinds(kinds, first, last, in_flight, sharding, together)
            num_layers = tuple([sum([counts.total() for counts in column]) for column in zip(*kinds, strict=True)])
        else:
            work = list(zip(lengths, ends, ranges, strict=True))
            chunk_s = [self.stage_s(tp_group, count, *at, samples, policies) for count, at, policies in work]
            counts = [{policies[0]: n} if len(policies) == 1 else Counter(policies) for n, _, policies in work]
            memory = model.stage_of_ranges(counts, first, last, in_flight, sharding, together)
            num_layers = sum(lengths)
        memory = memory.with_buffers(queued * model.activations.message)
        units: tuple[Unit, ...] = ()
        if zero_stage >= 2:
            layer_policies = recompute * sum(lengths) if len(recompute) == 1 else recompute
            layer_s = partial(self.layer_s, tp_group, samples)
            units = units_of(
                self.problem.model, tp_group.tp, self.ends_s(tp_group, samples), layer_s, layer_policies, first, last
            )
        message_s = (2 * len(lengths) - first - last) * self.quantization_s(tp_group, samples)
        copy = self.copy_of(model, memory, tp_group.gpu, num_layers, (first, last), sharding)
        forward_s, _ = self.layer_s(tp_group, samples, recompute[0])
        forwards = ForwardLayers(sum(lengths), forward_s, together)
        return ExecutorCost(tuple(chunk_s), (copy,) * tp_group.replicas, units, message_s, layers=forwards)

    def _price_layout(self, key: _LayoutStage) -> ExecutorCost:
        layout, policies, size, place, holders, contention = key
        first, last, in_flight, zero_stage, queued = place
        ((count,),) = in_flight
        stage = self.sequence_stage(layout, size, contention)
        spread = {same: stage.alone.sharding(zero_stage, same, first, last) for same in set(holders)}
        memories = {
            shards: stage.memory.per_device(stage.memory.stage((policies,), first, last, (count,), shards))
            for shards in set(spread.values())
        }
        alone = [self.tp_group((device,)) for device in layout.devices]
        message_bytes = stage.memory.activations.message.tolist()
        copies = tuple(
            [
                self.copy_of(
                    self.memory_model(alone[k], 1),
                    memories[shards][k].with_buffers(queued * message_bytes[k]),
                    alone[k].gpu,
                    len(policies),
                    (first, last),
                    shards,
                )
                for k, shards in enumerate(map(spread.__getitem__, holders))
            ]
        )
        units: tuple[Unit, ...] = ()
        if zero_stage >= 2:
            units = units_of(self.problem.model, 1, stage.ends_s, stage.layer_s, policies, first, last)
        message_s = (2 - first - last) * stage.quantization_s
        layers = ForwardLayers(len(policies), stage.layer_s(policies[0])[0], most_together([policies]))
        return ExecutorCost((stage.stage_s(policies, first, last),), copies, units, message_s, layers=layers)

    def expert_stage(self, group: ExpertParallel) -> "ExpertParallelStage":
        """The times and bytes of a stage whose replicas share experts."""
        return self._expert_stages[group]

    def _price_experts(self, key: _ExpertStage) -> ExecutorCost:
        group, layers, recompute, place, holders = key
        ranges = [recompute] * len(layers)
        if len(recompute) > 1:
            ranges = [recompute[at:to] for at, to in pairwise([0, *accumulate(end - start for start, end in layers)])]
        counts = [self.count_by_kind(span, policies) for span, policies in zip(layers, ranges, strict=True)]
        return self.expert_stage(group).cost(counts, most_together(ranges), recompute[0], place, holders)

    def forget_stages(self) -> None:
        """Free the memory of the prices of whole stages; layers, routes and memory models stay."""
        self._group_costs.clear()
        self._layout_costs.clear()
        self._expert_costs.clear()

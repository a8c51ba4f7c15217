"""Maps a plan to ranks: what each runs, sends and receives, and which ranks hold the same parameters. Pure.

Ranks follow the cluster's devices in order, so that the ranks of a machine stand together, whatever a plan makes of
them. An *executor* is one replica of a stage: the ranks of a TP group, or of a sequence layout. Activations between
stages are cut along the sequence over the ranks of either side, and along samples over replicas
(`hexiopt/plan/messages.py`): each pair of ranks whose parts overlap exchanges what both have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from typing import assert_never

from hexiopt.cost.executors.communicators import Channels
from hexiopt.plan.holdings import sharding_groups, slices
from hexiopt.plan.messages import messages_of
from hexiopt.plan.parallelism import ExpertParallel, Replicated, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.plan.token_layout import common, token_ranges
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.space import recompute_groups
from hexiopt.schedules.schedule import Depths, StagePosition, positions
from runtime.mapping.adapters import Adapters, with_adapters
from runtime.mapping.model_parts import stage_parts
from runtime.mapping.parts import ExpertCell, ParameterPart, Range, RankShard, layer_of, shards, split


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of layers of a stage, its number among the virtual stages of the pipeline, and a policy per layer."""

    number: int
    layers: Range
    recompute: tuple[str, ...]
    first: bool
    last: bool

    @property
    def groups(self) -> list[Range]:
        """Runs of its layers that the backward takes one at a time: each layer, with those joined to it."""
        return list(pairwise(accumulate(recompute_groups(self.recompute), initial=self.layers[0])))


@dataclass(frozen=True, slots=True)
class RankExecutor:
    """One replica of a stage: its ranks, ascending, and the samples of each micro-batch that it takes.

    They are a TP group, or, with `sequence`, hold the stage's parameters whole; its groups name ranks, not devices. The
    executors of a stage may share a `cell`, whose ranks bring tokens to each other's experts; a rank that hosts experts
    alone is an executor without samples.
    """

    pipeline: int
    stage: int
    replica: int
    ranks: tuple[int, ...]
    shards: tuple[RankShard, ...]
    samples: Range
    chunks: tuple[Chunk, ...]
    sequence: SequenceParallel | None = None

    def tokens(self, seq_len: int) -> tuple[tuple[Range, ...], ...]:
        """The tokens that each rank has between layers, in ascending runs.

        Those of a TP group are as equal as whole tokens allow. Its first ranks take more, as they do of heads and
        columns: so the first one is the fullest, as the memory model counts it.
        """
        match self.sequence:
            case None:
                return tuple((run,) for run in split(seq_len, len(self.ranks)))
            case layout:
                of_rank = {
                    rank: runs
                    for group, shards_of in zip(layout.groups, token_ranges(layout), strict=True)
                    for rank, runs in zip(group.devices, shards_of, strict=True)
                }
                return tuple(of_rank[rank] for rank in self.ranks)

    @property
    def cell(self) -> ExpertCell | None:
        """Who shares the experts of its layers, if several ranks do."""
        return self.shards[0].cell

    @property
    def together(self) -> tuple[int, ...]:
        """The ranks that run every operation at the same time, as there are collectives in it."""
        return self.ranks if self.cell is None else self.cell.ranks

    @property
    def num_samples(self) -> int:
        """The samples of each micro-batch that it takes."""
        return self.samples[1] - self.samples[0]

    @property
    def parts_tokens(self) -> bool:
        """Whether each rank has tokens of its own from the embedding to the loss, as with a sequence layout."""
        return self.sequence is not None

    def reads(self, rank: int, seq_len: int) -> tuple[Range, ...]:
        """The tokens that `rank` embeds, and after which it has the labels: all of them under tensor parallelism."""
        return self.tokens(seq_len)[self.ranks.index(rank)] if self.parts_tokens else ((0, seq_len),)

    def groups(self) -> Iterator[tuple[int, ...]]:
        """The ranks that communicate within the executor: all, those of each all-to-all group, those of its cell."""
        groups = self.sequence.groups if self.sequence else ()
        if len(groups) != 1:
            yield self.ranks
        for group in groups:
            yield tuple(sorted(group.devices))
        if self.cell is not None:
            yield self.cell.ranks

    def parts(self, model: ModelSpec, rank: int, adapters: Adapters | None = None) -> Iterator[ParameterPart]:
        """The parts of parameters that `rank` holds, with those of `adapters`, if any."""
        first, last = self.chunks[0].first, self.chunks[-1].last
        shard, layers = self.shards[self.ranks.index(rank)], [chunk.layers for chunk in self.chunks]
        return with_adapters(stage_parts(model, layers, shard, first, last), adapters)


@dataclass(frozen=True, slots=True)
class MessageRoute:
    """The part of a micro-batch's hidden states that `sender` has and `receiver` needs: runs of tokens, and samples."""

    sender: int
    receiver: int
    tokens: tuple[Range, ...]
    samples: Range

    def ends(self, backward: bool) -> tuple[int, int]:
        """Who sends and who receives, also of gradients, which go back."""
        return (self.receiver, self.sender) if backward else (self.sender, self.receiver)


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """A pipeline: its stages' executors, its micro-batches, the first of its samples in the global batch, and the
    micro-batches in flight that its stages state."""

    stages: tuple[tuple[RankExecutor, ...], ...]
    num_micro_batches: int
    micro_batch_size: int
    first_sample: int
    depths: Depths = ()

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage."""
        return len(self.stages[0][0].chunks)

    def positions(self) -> tuple[StagePosition, ...]:
        """The positions of its stages, in order."""
        return positions(len(self.stages), self.num_micro_batches, self.num_chunks, self.depths)

    def routes(self, chunk: int, seq_len: int) -> list[MessageRoute]:
        """From virtual stage `chunk` to the next one. Backward, every route is taken the other way round."""
        count = len(self.stages)
        stages = [[executor for executor in stage if executor.num_samples] for stage in self.stages]
        sizes = tuple([tuple([executor.num_samples for executor in stage]) for stage in stages])
        return [
            MessageRoute(a, b, tokens, (message.first_sample, message.first_sample + message.samples))
            for message in messages_of(sizes, self.num_chunks > 1)
            if not message.backward and message.stage == chunk % count
            for sender in [stages[message.stage][message.sender]]
            for receiver in [stages[message.target(count)][message.receiver]]
            for a, here in zip(sender.ranks, sender.tokens(seq_len), strict=True)
            for b, there in zip(receiver.ranks, receiver.tokens(seq_len), strict=True)
            if (tokens := common(here, there))
        ]


@dataclass(frozen=True, slots=True)
class HeldParts:
    """Parts of parameters that the same `ranks` (ascending) hold; `groups` are those ranks by sharding group."""

    ranks: tuple[int, ...]
    parts: tuple[ParameterPart, ...]
    groups: tuple[tuple[int, ...], ...]

    def between(self) -> list[tuple[tuple[int, ...], int, int, int]]:
        """Who holds the same share in each sharding group: (ranks, first, end, units) of all units of the elements.

        Groups of different sizes cut the elements into different shares; the pieces are those of all cuts.
        """
        if len(self.groups) == 1:
            return []
        sizes = tuple(map(len, self.groups))
        unit, at = lcm(*sizes), 0
        pieces = []
        for width, members in zip(*slices(sizes), strict=True):
            end = at + round(width * unit)
            ranks = sorted(group[k] for group, k in zip(self.groups, members, strict=True))
            pieces.append((tuple(ranks), at, end, unit))
            at = end
        return pieces


@dataclass(frozen=True)
class Layout:
    """The processes of a plan. `devices` by rank; `line_of` and `executor_of` by rank."""

    devices: tuple[int, ...]
    lines: tuple[PipelineLayout, ...]
    line_of: tuple[PipelineLayout, ...]
    executor_of: tuple[RankExecutor, ...]
    held: tuple[HeldParts, ...]
    """Every element of every parameter that is trained once, those of the last layers first."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.devices)

    def pairs(self, seq_len: int) -> list[tuple[int, int]]:
        """Who sends messages to whom, in an order that every rank agrees on."""
        routes = [
            route
            for line in self.lines
            for boundary in range(len(line.stages) * line.num_chunks - 1)
            for route in line.routes(boundary, seq_len)
        ]
        return sorted({route.ends(backward) for route in routes for backward in (False, True)})

    def groups(self) -> list[tuple[int, ...]]:
        """All groups of several ranks that communicate collectively, in an order that every rank agrees on."""
        return sorted(self._inside() | self._summing())

    def _inside(self) -> set[tuple[int, ...]]:
        """The groups of executors."""
        return {ranks for executor in self.executor_of for ranks in executor.groups() if len(ranks) > 1}

    def _summing(self) -> set[tuple[int, ...]]:
        """The groups that sum gradients."""
        same = {ranks for held in self.held for ranks in held.groups}
        across = {ranks for held in self.held for ranks, *_ in held.between()}
        return {ranks for ranks in same | across if len(ranks) > 1}

    def channels(self, seq_len: int) -> Channels:
        """The bounds of the channels of all groups and pairs."""
        layouts = {ranks for executor in self.executor_of if executor.sequence for ranks in executor.groups()}
        return Channels.of(layouts, self._summing() - self._inside(), self.pairs(seq_len))


def layout_of(plan: Plan, model: ModelSpec, cluster: Cluster | None = None, adapters: Adapters | None = None) -> Layout:
    """The processes of a plan that has passed the check, which train the model, or `adapters` of it; without a cluster,
    stated sharding groups are left out.

    Raises InputError where heads are not the model's.
    """
    devices = tuple(sorted(plan.devices()))
    rank_of = {device: rank for rank, device in enumerate(devices)}
    lines, line_of, executor_of = [], dict[int, PipelineLayout](), dict[int, RankExecutor]()
    first_sample = 0
    for p, pipeline in enumerate(plan.pipelines):
        count, ranges = len(pipeline.stages), pipeline.num_chunks
        stages = []
        for s, stage in enumerate(pipeline.stages):
            chunks = tuple(
                Chunk(c * count + s, layers, policies, s == 0 == c, s == count - 1 and c == ranges - 1)
                for c, (layers, policies) in enumerate(zip(stage.layers, stage.policies(), strict=True))
            )
            stages.append(tuple(_executors(p, s, stage, pipeline.micro_batch_size, chunks, model, rank_of)))
        batch = pipeline.num_micro_batches, pipeline.micro_batch_size, first_sample
        line = PipelineLayout(tuple(stages), *batch, pipeline.depths)
        first_sample += pipeline.num_sequences
        lines.append(line)
        for executors in stages:
            for executor in executors:
                for rank in executor.ranks:
                    line_of[rank], executor_of[rank] = line, executor
    ranks = range(len(devices))
    rank_executors = tuple(executor_of[rank] for rank in ranks)
    groups = None if cluster is None else sharding_groups(plan, cluster)
    if cluster is None and plan.sharding.stage >= 2:
        group_of = [executor.stage for executor in rank_executors]
    else:
        group_of = [0 if groups is None else groups[device] for device in devices]
    held = _parts_by_holders(rank_executors, model, group_of, adapters)
    return Layout(devices, tuple(lines), tuple(line_of[rank] for rank in ranks), rank_executors, held)


def _executors(
    p: int,
    s: int,
    stage: Stage,
    micro_batch_size: int,
    chunks: tuple[Chunk, ...],
    model: ModelSpec,
    rank_of: Mapping[int, int],
) -> Iterator[RankExecutor]:
    match stage.parallelism:
        case SequenceParallel() as layout:
            groups = [replace(group, devices=tuple(rank_of[d] for d in group.devices)) for group in layout.groups]
            sequence = replace(layout, groups=tuple(groups))
            ranks = tuple(sorted(rank for group in groups for rank in group.devices))
            yield RankExecutor(p, s, 0, ranks, (RankShard(),) * len(ranks), (0, micro_batch_size), chunks, sequence)
        case TensorParallel(degree=int()) as group if group.num_replicas > 1:
            size = micro_batch_size // group.num_replicas
            members: list[tuple[Sequence[int], int]] = [(devices, size) for devices in group.parameter_copies]
            yield from _sharing(p, s, members, chunks, model, rank_of)
        case TensorParallel() | Replicated() as held:
            ends = [0, *accumulate(held.samples(micro_batch_size))]
            for r, (replica, samples) in enumerate(zip(held.replicas, pairwise(ends), strict=True)):
                group_ranks, heads = [rank_of[device] for device in replica.devices], replica.heads
                cell = ExpertCell.of(group_ranks) if model.shares_experts and len(group_ranks) > 1 else None
                yield RankExecutor(
                    p, s, r, *_in_rank_order(group_ranks, shards(model, len(group_ranks), heads), cell), samples, chunks
                )
        case ExpertParallel() as group:
            members = [*zip(group.parameter_copies, group.samples_of_copies, strict=True)]
            yield from _sharing(p, s, members, chunks, model, rank_of, group.experts)
        case never:
            assert_never(never)


def _sharing(
    p: int,
    s: int,
    members: Sequence[tuple[Sequence[int], int]],
    chunks: tuple[Chunk, ...],
    model: ModelSpec,
    rank_of: Mapping[int, int],
    experts: Sequence[int] = (),
) -> Iterator[RankExecutor]:
    """The executors of a stage whose `members`, devices and samples, share experts: so many of each device, or equally
    many."""
    cell = ExpertCell.of([rank_of[device] for devices, _ in members for device in devices], experts)
    ends = [0, *accumulate(samples for _, samples in members)]
    for r, ((devices, samples), bounds) in enumerate(zip(members, pairwise(ends), strict=True)):
        ranks = [rank_of[device] for device in devices]
        of_ranks = shards(model, len(ranks)) if samples else (RankShard(hosts=True),)
        yield RankExecutor(p, s, r, *_in_rank_order(ranks, of_ranks, cell), bounds, chunks)


def _in_rank_order(
    ranks: Sequence[int], of_ranks: Sequence[RankShard], cell: ExpertCell | None
) -> tuple[tuple[int, ...], tuple[RankShard, ...]]:
    """Process groups number their ranks in ascending order, whatever the order of a plan's devices. Each of the shards
    is that of its rank in the `cell` too."""
    order = sorted(range(len(ranks)), key=lambda k: ranks[k])
    if cell is not None:
        of_ranks = [
            replace(shard, cell=cell, place=cell.ranks.index(rank)) for rank, shard in zip(ranks, of_ranks, strict=True)
        ]
    return tuple(ranks[k] for k in order), tuple(of_ranks[k] for k in order)


def _parts_by_holders(
    executor_of: Sequence[RankExecutor], model: ModelSpec, group_of: Sequence[int], adapters: Adapters | None
) -> tuple[HeldParts, ...]:
    holders: dict[str, list[tuple[ParameterPart, int]]] = {}
    for rank, executor in enumerate(executor_of):
        for part in executor.parts(model, rank, adapters):
            if part.trained:
                holders.setdefault(part.name, []).append((part, rank))
    by_ranks: dict[tuple[int, ...], list[ParameterPart]] = {}
    for name in sorted(holders, key=lambda name: (backward_turn(name), name)):
        shares = holders[name]
        whole = shares[0][0]
        cuts = sorted({end for part, _ in shares for end in (part.start, part.end)})
        for start, end in pairwise(cuts):
            ranks = tuple(sorted(rank for part, rank in shares if part.start <= start and end <= part.end))
            by_ranks.setdefault(ranks, []).append(replace(whole, start=start, end=end))

    def by_group(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(rank for rank in ranks if group_of[rank] == group) for group in sorted({group_of[r] for r in ranks})
        )

    return tuple(HeldParts(ranks, tuple(parts), by_group(ranks)) for ranks, parts in by_ranks.items())


def backward_turn(name: str) -> int:
    """When a backward through all layers comes to a parameter, the less, the earlier: head and final norm, then the
    last layer first, then the embedding."""
    if (layer := layer_of(name)) is not None:
        return -layer
    return 1 if "embed_tokens" in name else -(10**9)

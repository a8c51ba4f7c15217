"""`megatron`: Megatron-LM as an engineer tunes it (Narayanan et al., SC 2021, arXiv 2104.04473).

Can express: a symmetric grid of tensor, pipeline and data parallelism over the machines in any order, or over some
of them where slow ones are better left out (every launched machine runs the same number of processes, or one for
each of its GPUs); ranks in the order tp-dp-pp or, with `--use-tp-pp-dp-mapping`, tp-pp-dp; one micro-batch size;
one recompute policy, or full recompute of the first N layers of every layer range and none of the others
(`--recompute-method block --recompute-num-layers N`); the distributed optimizer (ZeRO-1) on or off; 1F1B, and
interleaved 1F1B with v chunks a stage; equal layers in all stages, or another number in the first and the last
(`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`).

Cannot: unequal TP degrees, pipelines, micro-batch counts or policies; layers by speed other than at the two ends;
GPipe; heads or MLP columns that TP does not divide; a global batch that pipelines times micro-batch size does not.

Megatron-LM has no planner and so no estimate of its own: the ranking here is ours, from the times of our cost model
(`estimate.py`), and stands for the engineer's trials.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, TensorParallel
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, recompute_policies, schedules, sharding_stages
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from solvers.baselines.estimate import Estimates, Sites, one_f_one_b_s, synced_s
from solvers.baselines.frame import Candidate, Rival
from solvers.baselines.grid import (
    Grid,
    divides_model,
    draw_grid,
    follows_ranks,
    grids,
    machine_orders,
    rank_groups,
    tp_degrees,
)
from solvers.core.search import Search

Ranges = tuple[tuple[int, int], ...]  # layers of a stage
_ORDERS = 400  # orders of machines
_BOUNDING = 0.25  # share of the time limit for bounds on grids
_BLOCKS = 6  # lengths tried, of layers of a range that recompute
_SPLITS = 3  # layer splits kept of each choice of everything else
_SLACK = 1.25  # grids whose bound is this much above the best estimate are left out


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of the first, of every middle and of the last stage, in `chunks` ranges each; of one stage in `first`."""

    first: int
    middle: int
    last: int
    chunks: int = 1

    def per_stage(self, stages: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.first,) if stages == 1 else (self.first, *[self.middle] * (stages - 2), self.last)


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What all stages recompute: a policy of all layers, or of the first `block` of every range, none of the others."""

    policy: str
    block: int | None = None

    def of(self, layers: Ranges) -> Recompute:
        """The policies of a stage."""
        if self.block is None:
            return (self.policy,)
        each = [k < self.block for start, end in layers for k in range(end - start)]
        return (self.policy,) if all(each) else tuple(self.policy if own else "none" for own in each)


def splits(num_layers: int, stages: int, chunks: int = 1) -> Iterator[Layers]:
    """All splits that Megatron-LM accepts: every stage's layers divide into `chunks`."""
    total, rest = divmod(num_layers, chunks)
    if rest or total < stages:
        return
    if stages == 1:
        yield Layers(num_layers, 0, 0, chunks)
        return
    for middle in range(1, total if stages > 2 else 2):
        ends = total - middle * (stages - 2)
        for first in range(1, ends):
            yield Layers(first * chunks, middle * chunks if stages > 2 else 0, (ends - first) * chunks, chunks)


class Megatron(Rival):
    """Every grid in the order of a bound on it, every choice within a grid by its estimate."""

    name = "megatron"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Grids until their bound is clearly above the best estimate."""
        times = Estimates(search.pricer)
        best_s = float("inf")
        for bound_s, grid in _bounded_grids(times, search):
            if bound_s > _SLACK * best_s:
                break
            for candidate in _choices(times, grid):
                best_s = min(best_s, candidate.estimate_s)
                yield candidate
            if not search.go_on():
                break

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        lines, first = plan.pipelines, plan.pipelines[0]
        stages = [stage for line in lines for stage in line.stages]
        if plan.schedule not in (ONE_F_ONE_B, INTERLEAVED):
            return f"schedule {plan.schedule}"
        if plan.sharding.stage > 1 or plan.sharding.groups != "all":
            return "sharding other than the distributed optimizer"
        if any(len(stage.replicas) != 1 for stage in stages):
            return "a replicated stage"
        if len({stage.tp for stage in stages}) > 1:
            return "unequal TP degrees"
        if not divides_model(problem, first.stages[0].tp):
            return "heads or MLP columns that TP does not divide"
        if len({(line.num_micro_batches, line.micro_batch_size) for line in lines}) > 1:
            return "unequal batches"
        if len({tuple(stage.layers for stage in line.stages) for line in lines}) > 1:
            return "unequal pipelines"
        if not any(all(stage.recompute == own.of(stage.layers) for stage in stages) for own in _blocks(problem, plan)):
            return "several recompute policies, but not full of the first layers"
        chunks, count = len(first.stages[0].layers), len(first.stages)
        per_stage = tuple(stage.num_layers for stage in first.stages)
        if per_stage not in {s.per_stage(count) for s in splits(problem.model.num_layers, count, chunks)}:
            return f"layers {per_stage}"
        if (
            len({(end - start) * chunks == stage.num_layers for stage in first.stages for start, end in stage.layers})
            > 1
        ):
            return "unequal chunks of a stage"
        if not follows_ranks(problem, plan, _processes(problem), both=True):
            return "devices that are not ranks of a grid"
        return None

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """A random grid, and everything else at random."""
        grid = draw_grid(problem, rng, _processes(problem), subsets=True, both=True)
        if grid is None or not _sharding(problem):
            return None
        stages, size = len(grid.stages), rng.choice(grid.sizes(problem))
        count = problem.workload.global_batch // (grid.width * size)
        found = [
            layers
            for chunks in _chunk_counts(problem, stages, count)
            for layers in splits(problem.model.num_layers, stages, chunks)
        ]
        if not found:
            return None
        layers = rng.choice(found)
        recompute = rng.choice(
            [
                *map(Recomputing, recompute_policies(problem.workload)),
                *(Recomputing("full", n) for n in _block_lengths(problem, layers.chunks)),
            ]
        )
        return _plan(grid, layers, recompute, size, count, rng.choice(_sharding(problem)))


def _processes(problem: Problem) -> list[int]:
    """How many GPUs of a machine may run: as many as some machine has."""
    return sorted({len(own) for own in problem.usable_by_machine.values()}, reverse=True)


def _bounded_grids(times: Estimates, search: Search) -> list[tuple[float, Grid]]:
    """Grids with a bound on their step time, least first: layers as fast as compute alone allows them."""
    problem = times.problem
    found: dict[Grid, float] = {}
    for order in machine_orders(problem, _ORDERS, subsets=True):
        for tp in tp_degrees(problem):
            for most in _processes(problem):
                for grid in grids(problem, rank_groups(problem, order, tp, most), both=True):
                    if grid not in found:
                        found[grid] = _bound_s(times, grid)
            if not search.go_on(_BOUNDING):
                return _by_bound(found)
    return _by_bound(found)


def _by_bound(found: dict[Grid, float]) -> list[tuple[float, Grid]]:
    return sorted(((bound, grid) for grid, bound in found.items()), key=lambda pair: pair[0])


def _bound_s(times: Estimates, grid: Grid) -> float:
    """All micro-batches on the slowest stage, layers split as well as first and last stage may differ."""
    problem, sites = times.problem, times.sites(grid)
    bounds = []
    for size in grid.sizes(problem):
        layer_s = [min(times.stage_s(s, 1, False, False, size, p) for p in times.pricer.policies()) for s in sites]
        slowest = max(layer_s[1:-1], default=0.0)
        ends = layer_s if len(layer_s) < 3 else [layer_s[0], layer_s[-1]]
        rate = sum(1 / s for s in ends) + (len(layer_s) - 2) / slowest if slowest else sum(1 / s for s in ends)
        bounds.append(problem.workload.global_batch // (grid.width * size) * problem.model.num_layers / rate)
    return min(bounds)


def _choices(times: Estimates, grid: Grid) -> Iterator[Candidate]:
    """Micro-batch sizes, schedules, sharding, policies and layers on a grid that fit memory."""
    problem, width, stages = times.problem, grid.width, len(grid.stages)
    sites, messages, rings = times.sites(grid), times.messages(grid), times.rings(grid)
    for size in grid.sizes(problem):
        count = problem.workload.global_batch // (width * size)
        hop_s = messages.seconds(size * times.sequence_bytes)
        by_speed = sorted(
            times.pricer.policies(), key=lambda policy: times.stage_s(sites[0], 1, False, False, size, policy)
        )
        for stage in _sharding(problem)[: 1 if width == 1 else None]:
            shards = width if stage else 1
            optimizer_s = times.optimizer_s(grid, shards)
            for chunks in _chunk_counts(problem, stages, count):
                rooms_of = partial(_rooms, times, sites, size, count, chunks, shards)
                for recompute, rooms in _recomputings(problem, by_speed, chunks, rooms_of):
                    rhythm = _Rhythm.of(times, sites, hop_s, size, recompute, count, chunks)
                    for seconds, layers in _best_splits(problem, rhythm, rooms):
                        per_stage = layers.per_stage(stages)
                        sync_s = rings.sync_s(times.gradient_bytes(per_stage))
                        end_s = synced_s(seconds, rhythm.stages_s(per_stage), hop_s, sync_s, chunks)
                        make = partial(_plan, grid, layers, recompute, size, count, stage)
                        yield Candidate(end_s + optimizer_s, make)


def _recomputings(
    problem: Problem, by_speed: Sequence[str], chunks: int, rooms_of: Callable[[Recomputing], list[int]]
) -> Iterator[tuple[Recomputing, list[int]]]:
    """What is worth recomputing, and the most layers of each stage with it.

    Where memory binds nowhere, more recompute is worse. Blocks from the shortest with which the model fits, and a few
    layers longer, so that layers may go to faster stages.
    """
    num_layers, lengths = problem.model.num_layers, _block_lengths(problem, chunks)

    def unbound(rooms: Sequence[int]) -> bool:
        return min(rooms) > num_layers - len(rooms)

    for recompute in map(Recomputing, by_speed):
        rooms = rooms_of(recompute)
        yield recompute, rooms
        if unbound(rooms):
            break
    if recompute.policy == by_speed[0] or sum(rooms) < num_layers:
        return
    shortest = bisect_left(lengths, True, key=lambda n: sum(rooms_of(Recomputing("full", n))) >= num_layers)
    for n in lengths[shortest : shortest + _BLOCKS]:
        rooms = rooms_of(Recomputing("full", n))
        yield Recomputing("full", n), rooms
        if unbound(rooms):
            return


def _block_lengths(problem: Problem, chunks: int) -> range:
    """Layers of each of `chunks` ranges that may recompute while others of the same range do not."""
    space, policies = problem.space, recompute_policies(problem.workload)
    some = space.recompute_per_stage and space.recompute_per_layer and {"none", "full"} <= set(policies)
    return range(1, problem.model.num_layers // chunks) if some else range(0)


def _blocks(problem: Problem, plan: Plan) -> Iterator[Recomputing]:
    """All that the stages of `plan` may recompute."""
    yield from map(Recomputing, recompute_policies(problem.workload))
    yield from (Recomputing("full", n) for n in _block_lengths(problem, plan.pipelines[0].num_chunks))


def _rooms(
    times: Estimates,
    sites: Sequence[Sites],
    size: int,
    num_micro_batches: int,
    chunks: int,
    shards: int,
    recompute: Recomputing,
) -> list[int]:
    """The most layers of every stage, on its fullest site."""
    found, count, policy = [], len(sites), recompute.policy
    for s, own in enumerate(sites):
        at = StagePosition(s, count, num_micro_batches, chunks)
        first, last, held = at.first, at.last, in_flight(INTERLEAVED, at)
        if recompute.block is None:
            found.append(times.room(own, first, last, size, policy, held, shards))
        else:
            beside = (policy, recompute.block, "none")
            found.append(times.room_beside(own, first, last, size, beside, chunks, held, shards))
    return found


def _sharding(problem: Problem) -> list[int]:
    return [stage for stage in sharding_stages(problem.workload) if stage <= 1]


def _chunk_counts(problem: Problem, stages: int, num_micro_batches: int) -> list[int]:
    """Layer ranges a stage that the schedules allow; one stands for plain 1F1B."""
    allowed = schedules(problem.workload)
    found = [1] if ONE_F_ONE_B in allowed else []
    if INTERLEAVED in allowed and stages > 1 and num_micro_batches % stages == 0:
        found += range(2, min(problem.space.max_chunks, problem.model.num_layers // stages) + 1)
    return [chunks for chunks in found if problem.model.num_layers % chunks == 0]


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """Seconds of one layer of each stage, what the first `block` of them take longer, of embedding and head on top, and
    of messages at each boundary."""

    layer_s: tuple[float, ...]
    longer_s: tuple[float, ...]
    block: int
    first_s: float
    last_s: float
    hop_s: Sequence[float]
    num_micro_batches: int
    chunks: int

    @classmethod
    def of(
        cls,
        times: Estimates,
        sites: Sequence[Sites],
        hop_s: Sequence[float],
        size: int,
        recompute: Recomputing,
        num_micro_batches: int,
        chunks: int,
    ) -> "_Rhythm":
        """On the slowest site of each stage."""
        policy = recompute.policy if recompute.block is None else "none"
        layer_s = tuple(times.stage_s(own, 1, False, False, size, policy) for own in sites)
        first_s = times.stage_s(sites[0], 1, True, False, size, policy) - layer_s[0]
        last_s = times.stage_s(sites[-1], 1, False, True, size, policy) - layer_s[-1]
        full_s = (times.stage_s(own, 1, False, False, size, recompute.policy) for own in sites)
        longer_s = tuple(full - own for full, own in zip(full_s, layer_s, strict=True))
        return cls(
            layer_s, longer_s, (recompute.block or 0) * chunks, first_s, last_s, hop_s, num_micro_batches, chunks
        )

    def stages_s(self, layers: Sequence[int]) -> list[float]:
        """Seconds of each stage for one micro-batch."""
        each = zip(layers, self.layer_s, self.longer_s, strict=True)
        found = [n * s + min(n, self.block) * more for n, s, more in each]
        found[0] += self.first_s
        found[-1] += self.last_s
        return found

    def seconds(self, layers: Sequence[int]) -> float:
        """About what the pipelines take; interleaving shortens the fill, but sends each micro-batch `chunks` times."""
        stage_s = self.stages_s(layers)
        if self.chunks == 1:
            return one_f_one_b_s(stage_s, self.hop_s, self.num_micro_batches)
        beat = max(*stage_s, self.chunks * max(self.hop_s) / 2)
        return self.num_micro_batches * beat + (sum(stage_s) - max(stage_s)) / self.chunks + sum(self.hop_s)


def _best_splits(problem: Problem, rhythm: _Rhythm, rooms: Sequence[int]) -> list[tuple[float, Layers]]:
    """The best few splits within `rooms`, and the pipelines' seconds."""
    stages, num_layers, chunks = len(rooms), problem.model.num_layers, rhythm.chunks
    found: dict[Layers, float] = {}

    def seconds(layers: Layers) -> float:
        if layers not in found:
            found[layers] = rhythm.seconds(layers.per_stage(stages))
        return found[layers]

    if stages == 1:
        return [(rhythm.seconds((num_layers,)), Layers(num_layers, 0, 0))] if rooms[0] >= num_layers else []
    inner, slowest_s = stages - 2, max(rhythm.layer_s[1:-1], default=0.0)
    for middle in range(chunks, min(rooms[1:-1]) + 1, chunks) if inner else (0,):
        ends = num_layers - inner * middle
        low, high = max(chunks, ends - rooms[-1]), min(rooms[0], ends - chunks)
        if ends < 2 * chunks or rhythm.num_micro_batches * middle * slowest_s > min(found.values(), default=math.inf):
            break
        if not problem.space.uneven_layers:
            least, most = num_layers // stages, -(-num_layers // stages)
            if inner and not least <= middle <= most:
                continue
            low, high = max(low, least, ends - most), min(high, most, ends - least)
        low, high = -(-low // chunks), high // chunks  # ranges of the first stage
        at = partial(_with_first, middle, ends, chunks)
        # The seconds are convex between the lengths from which on layers of the first or the last stage take less.
        bends = {low, high, *(n for n in (rhythm.block // chunks, (ends - rhythm.block) // chunks) if low < n < high)}
        for left, right in pairwise(sorted(bends)) if low < high else [(low, high)]:
            while left < right:
                half = (left + right) // 2
                if seconds(at(half)) <= seconds(at(half + 1)):
                    right = half
                else:
                    left = half + 1
            if left == right:
                seconds(at(left))
    ranked = sorted(((value, layers) for layers, value in found.items()), key=lambda pair: pair[0])
    return ranked[:_SPLITS]


def _with_first(middle: int, ends: int, chunks: int, first: int) -> Layers:
    return Layers(first * chunks, middle, ends - first * chunks, chunks)


def _plan(grid: Grid, layers: Layers, recompute: Recomputing, size: int, num_micro_batches: int, sharding: int) -> Plan:
    per_chunk = [n // layers.chunks for n in layers.per_stage(len(grid.stages))]
    ends = [0, *accumulate(per_chunk * layers.chunks)]
    ranges = list(pairwise(ends))
    own = [tuple(ranges[s :: len(per_chunk)]) for s in range(len(per_chunk))]
    pipelines = tuple(
        Pipeline(
            tuple(Stage(TensorParallel(slot[k]), own[s], recompute.of(own[s])) for s, slot in enumerate(grid.stages)),
            num_micro_batches,
            size,
        )
        for k in range(grid.width)
    )
    return Plan(pipelines, INTERLEAVED if layers.chunks > 1 else ONE_F_ONE_B, Sharding(sharding))

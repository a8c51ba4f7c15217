"""`amp`: AMP (Li et al., NeurIPS 2022, arXiv 2210.07297), for mixed GPU types and networks.

Can express: equal degrees of tensor, data and pipeline parallelism over all devices; any number of layers per
stage; any micro-batch size that divides a pipeline's share of the batch. Devices are placed in the order of its
heuristic: tensor parallelism on neighbours, then data, then pipeline parallelism (section 4). It knows GPU types
(a stage is as fast as its slowest replica) and unequal links.

Cannot: leave devices out; unequal TP degrees, pipelines or micro-batch counts; place a pipeline along neighbours.

Its estimate, reproduced here, of a grid with M micro-batches: (M − 1) times the slowest stage, all stages and all
messages once, and after it the slowest stage's all-reduce of gradients; every link as if nothing else used it. Layers
are split by dynamic programming on that; here exactly, since stages are linear in layers. Layer times are those
of our cost model, as AMP takes them from profiles.

The paper leaves open, and AMP gets the best of: the order of the machines (all orders of kinds), recompute (one
policy for all, AMP has none), ZeRO-1 (of DeepSpeed, which runs its plans by 1F1B). It has no memory model: here its
layers keep to the memory of ours, which saves it the trials that would fail. And since its estimate does not see that
pipelines share the network, nor its layers what messages and gradients cost, the best candidates by an estimate that
does are tried too.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations

import numpy as np

from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.space import schedules
from solvers.baselines._estimates import GridEstimates, one_f_one_b_s
from solvers.baselines._frame import Baseline, PlanCandidate
from solvers.baselines._grids import StageGrid, grids, machine_orders, rank_groups, tp_degrees
from solvers.baselines._plans import RUNS_1F1B, aligned_plan, dividing_sizes, optimizer_shardings, shift_layers
from solvers.core.search import Search

_MAX_ORDERS = 400  # orders of machines
_SPLITS = 4  # layer splits of each choice of everything else
_BEST = 100  # candidates by either estimate that come before the rest
_SHIFTED_BEST = 16  # candidates by the second estimate of which single layers are moved
_LISTED, _SHIFTED = 0.35, 0.5  # shares of the time limit: when all is listed, and when the other estimate has looked


class Amp(Baseline):
    """AMP (NeurIPS 2022): degrees, micro-batch size and layers of alike pipelines.

    Searches all degrees, micro-batch sizes and orders of machines, each with its best layers.
    """

    name = "amp"

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """First the best by AMP's estimate, then the best by an estimate of a shared network, with layers to match, and
        the best of these with a layer moved: where stages have a layer or two, messages meet otherwise then."""
        times = GridEstimates(run.pricer)
        alone = sorted(_splits(times, run), key=lambda split: split.estimate_s)
        yield from (split.candidate(0) for split in alone[:_BEST])
        best_of = {split.choice: split.layers for split in reversed(alone)}
        shared: list[_Split] = []
        for choice in dict.fromkeys(split.choice for split in alone):
            if not run.should_continue(_SHIFTED):
                break
            layers, seconds = _shift_layers(times, choice, best_of[choice])
            shared.append(_Split(seconds, choice, layers))
        shared.sort(key=lambda split: split.estimate_s)
        yield from (split.candidate(1, published=False) for split in shared[:_BEST])
        for split in shared[:_SHIFTED_BEST]:
            for layers in _neighbours(split.layers, split.choice.max_layers):
                yield _Split(split.estimate_s, split.choice, layers).candidate(2, published=False)
        yield from (split.candidate(3) for split in alone[_BEST:])


@dataclass(frozen=True, slots=True)
class _Choice:
    """All that is chosen except the layers; at most `max_layers` of them fit each stage."""

    grid: StageGrid
    size: int
    num_micro_batches: int
    policy: str
    sharding: int
    max_layers: tuple[int, ...]

    def linear_s(self, times: GridEstimates) -> tuple[list[float], list[float]]:
        """Seconds of a layer on each stage, and what embedding and head add."""
        return times.linear_s(times.tp_groups(self.grid), self.size, self.policy)

    def plan(self, layers: Sequence[int]) -> Plan:
        """The plan with these layers per stage."""
        each = self.policy, self.num_micro_batches, self.size, RUNS_1F1B[0], Sharding(self.sharding)
        return aligned_plan(self.grid.stages, layers, *each)


@dataclass(frozen=True, slots=True)
class _Split:
    """A choice with its layers, and an estimate of the step."""

    estimate_s: float
    choice: _Choice
    layers: tuple[int, ...]

    def candidate(self, turn: int, *, published: bool = True) -> PlanCandidate:
        """The candidate, priced in that turn; `published`: the estimate is AMP's."""
        return PlanCandidate(self.estimate_s, partial(self.choice.plan, self.layers), turn, published=published)


def _splits(times: GridEstimates, run: Search) -> Iterator[_Split]:
    """All grids with all choices; they are few enough to list."""
    problem, devices = times.problem, len(times.problem.usable_devices)
    if RUNS_1F1B[0] not in schedules(problem.workload):
        return
    for order in machine_orders(problem, _MAX_ORDERS, subsets=False):
        for tp in tp_degrees(problem):
            groups = rank_groups(problem, order, tp, devices)
            if len(groups) * tp < devices:
                continue
            for grid in grids(problem, groups, both=False):
                for choice in _choices(times, grid):
                    for estimate_s, layers in _best_splits(times, choice):
                        yield _Split(estimate_s, choice, layers)
                if not run.should_continue(_LISTED):
                    return


def _choices(times: GridEstimates, grid: StageGrid) -> Iterator[_Choice]:
    """All micro-batch sizes, shardings and policies on a grid."""
    problem, width, stages = times.problem, grid.width, len(grid.stages)
    tp_groups = times.tp_groups(grid)
    for size in dividing_sizes(problem, grid.width):
        count = problem.workload.global_batch // (width * size)
        for sharding in optimizer_shardings(problem, width):
            for policy in times.policies_by_speed(tp_groups[0], size):
                most = times.max_layers_by_stage(tp_groups, size, policy, count, width if sharding else 1)
                yield _Choice(grid, size, count, policy, sharding, tuple(most))
                if min(most) > problem.model.num_layers - stages:
                    break  # memory binds nowhere, so slower policies are worse


def _best_splits(times: GridEstimates, choice: _Choice) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The best few splits of the layers by AMP's estimate, each with that estimate."""
    size, stages = choice.size, choice.grid.stages
    one_way_s = times.pricer.message_s
    message_s = sum(
        max(one_way_s(a, b, size) + one_way_s(b, a, size) for a, b in zip(*slots, strict=True))
        for slots in pairwise(stages)
    )
    num_layers = times.problem.model.num_layers
    for seconds, layers in best_splits(
        *choice.linear_s(times), choice.max_layers, num_layers, choice.num_micro_batches
    ):
        yield seconds + message_s + _all_reduce_s(times, choice.grid, layers), layers


def _shift_layers(times: GridEstimates, choice: _Choice, layers: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """`layers` shifted by an estimate of 1F1B and gradient sync on a shared network, and that estimate."""
    message_s = times.messages(choice.grid).seconds(choice.size * times.sequence_bytes)
    rings, (layer_s, added_s) = times.rings(choice.grid), choice.linear_s(times)

    def seconds(split: Sequence[int]) -> float:
        stage_s = [n * a + b for n, a, b in zip(split, layer_s, added_s, strict=True)]
        pipeline_s = one_f_one_b_s(stage_s, message_s, choice.num_micro_batches)
        sync_s = rings.sync_s(times.gradient_bytes(split))
        return times.synced_s(pipeline_s, stage_s, message_s, sync_s, split, choice.sharding)

    if not times.problem.space.uneven_layers:
        return layers, seconds(layers)
    return shift_layers(layers, choice.max_layers, seconds)


def best_splits(
    layer_s: Sequence[float],
    added_s: Sequence[float],
    max_layers: Sequence[int],
    num_layers: int,
    num_micro_batches: int,
) -> list[tuple[float, tuple[int, ...]]]:
    """The best few splits by (M − 1) · slowest stage + sum of stages: (seconds, layers per stage).

    Stage s takes `added_s[s]` and `layer_s[s]` per layer, of which at most `max_layers[s]` fit. Under any limit on the
    slowest stage, the sum is least with as many layers as possible on the fastest stages, so trying all limits is
    exact.
    """
    stages = len(layer_s)
    speed, added, fitting = np.array(layer_s), np.array(added_s), np.minimum(max_layers, num_layers - stages + 1)
    if fitting.min() < 1 or fitting.sum() < num_layers:
        return []
    limits = np.unique((added[:, None] + speed[:, None] * np.arange(1, num_layers - stages + 2)).ravel())
    most = np.minimum(fitting, (limits[:, None] * (1 + 1e-12) - added) // speed).astype(np.int64)
    most = most[(most.min(axis=1) >= 1) & (most.sum(axis=1) >= num_layers)]
    layers = np.ones_like(most)
    left = np.full(len(most), num_layers - stages)
    for s in np.argsort(speed, kind="stable"):
        more = np.minimum(most[:, s] - 1, left)
        layers[:, s] += more
        left -= more
    layers = np.unique(layers, axis=0)
    stage_s = added + speed * layers
    seconds = (num_micro_batches - 1) * stage_s.max(axis=1) + stage_s.sum(axis=1)
    best = np.argsort(seconds, kind="stable")[:_SPLITS]
    return [(float(seconds[k]), tuple(layers[k].tolist())) for k in best]


def _neighbours(layers: Sequence[int], max_layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All splits with one layer in another stage."""
    for giver, taker in permutations(range(len(layers)), 2):
        if layers[giver] > 1 and layers[taker] < max_layers[taker]:
            yield tuple([n - (s == giver) + (s == taker) for s, n in enumerate(layers)])


def _all_reduce_s(times: GridEstimates, grid: StageGrid, layers: Sequence[int]) -> float:
    """Seconds of the slowest stage's all-reduce: its gradients cross the slowest link of its ring twice."""
    width, trained = grid.width, times.problem.parameters
    slowest_s = 0.0
    for stage_groups, count in zip(grid.stages, layers, strict=True):
        num_bytes = count * trained.layer_params / grid.tp * times.problem.workload.states.gradient
        slowest_s = max(slowest_s, 2.0 * (width - 1) / width * num_bytes / times.slowest_link[stage_groups])
    return slowest_s

"""`fsdp`: PyTorch's Fully Sharded Data Parallel (Zhao et al., VLDB 2023, arXiv 2304.11277), every choice tried.

Can express: pure data parallelism over the GPUs of any machines (every launched machine runs the same number of
processes, or one for each of its GPUs); its sharding strategies FULL_SHARD (ZeRO-3), SHARD_GRAD_OP (ZeRO-2),
HYBRID_SHARD and its ZeRO-2 variant (inside machines, all-reduced between them), and NO_SHARD; one micro-batch size; one
recompute policy, or two, as any layers may be checkpointed (`apply_activation_checkpointing`), alike everywhere.

Cannot: tensor or pipeline parallelism; unequal batches, so that the slowest GPU sets the pace and the global batch must
divide by the GPUs.

FSDP has no planner and so no estimate of its own: the ranking here is ours, of the closed forms of `cost/lockstep.py`,
and stands for the engineer's trials.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product

from hexiopt.cost.executors.limits import MemoryLimits
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.rings import gradient_rings
from hexiopt.plan.holdings import sharding_groups
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, default_schedule, recompute_first, recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.schedule import positions
from hexiopt.solving import Pricer
from solvers.baselines._estimates import GridEstimates, sharded_s
from solvers.baselines._frame import Baseline, PlanCandidate
from solvers.baselines._grids import processes_per_machine, rank_devices
from solvers.baselines._plans import aligned_plan, dividing_sizes
from solvers.core.search import Search
from solvers.frame.starts import machine_classes

STRATEGIES = (
    Sharding(3, "all"),  # FULL_SHARD
    Sharding(3, "machine"),  # HYBRID_SHARD
    Sharding(2, "all"),  # SHARD_GRAD_OP
    Sharding(2, "machine"),  # its hybrid, _HYBRID_SHARD_ZERO2
    Sharding(0, "all"),  # NO_SHARD
)
_MAX_SUBSETS = 400


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of a pass over all parameters, per byte of a parameter: inside the sharding groups, and between them."""

    within_s: float
    between_s: float


class Fsdp(Baseline):
    """FSDP (VLDB 2023): sharded data parallelism over the GPUs of any machines.

    Tries all subsets of machines, sharding strategies, micro-batch sizes and recompute policies.
    """

    name = "fsdp"

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """All combinations that fit memory."""
        problem, estimates = run.problem, GridEstimates(run.pricer)
        allowed = [sharding for sharding in STRATEGIES if sharding.stage in sharding_stages(problem.workload)]
        for devices, sharding in product(device_sets(problem), allowed):
            sizes = dividing_sizes(problem, len(devices))
            if not sizes:
                continue
            passes = _passes(problem, devices, sharding)
            for size in sizes:
                trial = FsdpTrial(run.pricer, devices, sharding, size)
                for recompute in trial.recomputes():
                    seconds = _estimate_s(estimates, trial, passes, recompute)
                    yield PlanCandidate(seconds, partial(_plan, problem, devices, sharding, size, recompute))


def device_sets(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Devices of all subsets of machines, the largest subsets first; machines of a class are interchangeable.

    If there are too many subsets, only those that take all machines of a class or none.
    """
    classes = machine_classes(problem)
    subsets = list(islice(product(*(range(len(members), -1, -1) for members in classes)), _MAX_SUBSETS + 1))
    if len(subsets) > _MAX_SUBSETS:
        subsets = list(islice(product(*((len(members), 0) for members in classes)), _MAX_SUBSETS))
    seen = set()
    for counts in subsets:
        machines = [m for members, count in zip(classes, counts, strict=True) for m in members[:count]]
        for processes in processes_per_machine(problem):
            ranks = tuple(sorted(rank_devices(problem, machines, processes)))
            if ranks and ranks not in seen:
                seen.add(ranks)
                yield ranks


def _plan(problem: Problem, devices: Sequence[int], sharding: Sharding, size: int, recompute: Recompute) -> Plan:
    count = problem.workload.global_batch // (len(devices) * size)
    # Of a single stage, every schedule is 1F1B but GPipe, which keeps all activations.
    schedule, layers = default_schedule(problem.workload), [problem.model.num_layers]
    return aligned_plan([[(d,) for d in devices]], layers, [recompute], count, size, schedule, sharding)


def _passes(problem: Problem, devices: Sequence[int], sharding: Sharding) -> _Passes:
    plan = _plan(problem, devices, sharding, 1, recompute_policies(problem.workload)[:1])
    around = gradient_rings(
        plan, sharding_groups(plan, problem.cluster), problem.parameters.trained_groups, problem.cluster
    )
    within, between = (
        max((float(seconds.max()) for seconds in sync.ring_pass_s(1.0)), default=0.0)
        for sync in (around.within_group, around.between_groups)
    )
    return _Passes(within, between)


class FsdpTrial:
    """A micro-batch size and a sharding on some devices: which recompute fits, and what the slowest device computes."""

    def __init__(self, pricer: Pricer, devices: Sequence[int], sharding: Sharding, size: int) -> None:
        self.devices, self.sharding, self.size = devices, sharding, size
        self.pricer, self.problem = pricer, pricer.problem
        self.count = self.problem.workload.global_batch // (len(devices) * size)
        self._tp_groups = {pricer.tp_group((d,)) for d in devices}
        machine_of = self.problem.cluster.machine_of
        fewest = len(devices)  # holders of the smallest sharding group
        if sharding.groups == "machine":
            fewest = min(sum(machine_of[d] == m for d in devices) for m in {int(machine_of[d]) for d in devices})
        self._spread = StateSharding(sharding.stage, fewest)
        self._held = in_flight(default_schedule(self.problem.workload), positions(1, self.count)[0])

    def recomputes(self) -> Iterator[Recompute]:
        """Single policies that fit, then pairs in which the leaner one takes as few layers as memory allows."""
        layers, pricer = self.problem.model.num_layers, self.pricer
        policies = recompute_policies(self.problem.workload)
        at = (True, True, self.size)
        yield from (
            (policy,)
            for policy in policies
            if all(
                pricer.max_layers(tp_group, *at, policy, self._held, self._spread) >= layers
                for tp_group in self._tp_groups
            )
        )
        stages = pricer.features.stages
        space = self.problem.space
        if not (space.recompute_per_stage and space.recompute_per_layer) or stages is None:
            return
        limits = MemoryLimits(stages)
        for faster, smaller in combinations(policies, 2):
            counts = range(layers, layers + 1)
            num_smaller = max(
                limits.min_recompute_layers(tp_group, counts, *at, smaller, faster, self._held, self._spread)[0]
                for tp_group in self._tp_groups
            )
            if num_smaller < layers:
                yield recompute_first(smaller, num_smaller, faster, layers)

    def seconds(self, recompute: Recompute) -> tuple[float, float]:
        """Seconds of forward and backward of a micro-batch, each on its slowest device."""
        pricer, at = self.pricer, (self.problem.model.num_layers, True, True, self.size)
        if (stages := pricer.features.stages) is not None:
            each = [stages.stage_s(tp_group, *at, recompute) for tp_group in self._tp_groups]
        else:
            each = [pricer.stage_s(tp_group, *at, recompute[0]) for tp_group in self._tp_groups]
        return max(forward_s for forward_s, _ in each), max(backward_s for _, backward_s in each)


def _estimate_s(estimates: GridEstimates, trial: FsdpTrial, passes: _Passes, recompute: Recompute) -> float:
    """Seconds of a step on the slowest GPU; the larger of compute and communication counts in every micro-batch."""
    workload, layers, zero = trial.problem.workload, trial.problem.model.num_layers, trial.sharding.stage
    forward_s, backward_s = trial.seconds(recompute)
    gather_s, scatter_s = passes.within_s * workload.states.weight, passes.within_s * workload.states.gradient
    micro_batch_s = sharded_s(zero, forward_s, backward_s, gather_s, scatter_s, layers)
    [summed_s] = estimates.exposed_s([2 * scatter_s], [backward_s], [layers], 0)
    once_s = {0: summed_s, 2: gather_s, 3: 0.0}[zero] + 2 * passes.between_s * workload.states.gradient
    return trial.count * micro_batch_s + once_s

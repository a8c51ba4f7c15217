"""`fsdp`: PyTorch's Fully Sharded Data Parallel (Zhao et al., VLDB 2023, arXiv 2304.11277), every choice tried.

Can express: pure data parallelism over the GPUs of any machines (every launched machine runs the same number of
processes, or one for each of its GPUs); its sharding strategies FULL_SHARD (ZeRO-3), SHARD_GRAD_OP (ZeRO-2),
HYBRID_SHARD and its ZeRO-2 variant (inside machines, all-reduced between them), and NO_SHARD; one micro-batch size; one
recompute policy, or two, as any layers may be checkpointed (`apply_activation_checkpointing`), alike everywhere.

Cannot: tensor or pipeline parallelism; unequal batches, so that the slowest GPU sets the pace and the global batch must
divide by the GPUs.

FSDP has no planner and so no estimate of its own: the ranking here is ours, of the closed forms of `cost/sharding.py`,
and stands for the engineer's trials.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.gradient_sync import SyncTimes, sync_groups
from hexiopt.cost.model import CostModel
from hexiopt.cost.sharding import rings, sharding_groups
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, TensorParallel
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, default_schedule, lean_first, recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.schedule import StagePosition
from solvers.baselines.frame import Candidate, Rival
from solvers.baselines.grid import machine_classes
from solvers.core.search import Pricer, Search

STRATEGIES = (
    Sharding(3, "all"),  # FULL_SHARD
    Sharding(3, "machine"),  # HYBRID_SHARD
    Sharding(2, "all"),  # SHARD_GRAD_OP
    Sharding(2, "machine"),  # its hybrid, _HYBRID_SHARD_ZERO2
    Sharding(0, "all"),  # NO_SHARD
)
_MOST_SUBSETS = 400


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of a pass over all parameters, per byte of a parameter: inside the sharding groups, and between them."""

    within_s: float
    between_s: float


class Fsdp(Rival):
    """All subsets of machines, sharding strategies, micro-batch sizes and policies."""

    name = "fsdp"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Everything that fits memory."""
        problem = search.problem
        for devices in device_sets(problem):
            for sharding in _strategies(problem):
                passes = _passes(problem, devices, sharding)
                for size in _sizes(problem, len(devices)):
                    trial = Trial(search.pricer, devices, sharding, size)
                    for recompute in trial.recomputes():
                        seconds = _estimate_s(trial, passes, recompute)
                        yield Candidate(seconds, partial(_plan, problem, devices, sharding, size, recompute))

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        lines = plan.pipelines
        stages = [stage for line in lines for stage in line.stages]
        if any(len(line.stages) > 1 for line in lines):
            return "pipeline parallelism"
        if any(len(stage.replicas) > 1 for stage in stages):
            return "a replicated stage"
        if any(stage.tp > 1 for stage in stages):
            return "tensor parallelism"
        if len({(line.num_micro_batches, line.micro_batch_size) for line in lines}) > 1:
            return "unequal batches"
        if len({stage.recompute for stage in stages}) > 1:
            return "several ways to recompute"
        if plan.sharding not in STRATEGIES:
            return f"sharding stage {plan.sharding.stage} over {plan.sharding.groups}"
        used = set(plan.devices())
        own = [devices for devices in problem.usable_by_machine.values() if used & set(devices)]
        if not any(used == {d for devices in own for d in devices[:most]} for most in _processes(problem)):
            return "devices that are not the ranks of some machines"
        return None

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """A random set of machines, and everything else at random."""
        machines = list(problem.usable_by_machine.values())
        chosen, most = rng.sample(machines, rng.randint(1, len(machines))), rng.choice(_processes(problem))
        devices = tuple(sorted(d for own in chosen for d in own[:most]))
        sizes, strategies = _sizes(problem, len(devices)), _strategies(problem)
        if not sizes or not strategies:
            return None
        policies, layers = recompute_policies(problem.workload), problem.model.num_layers
        first = rng.randint(0, layers) if _mixes(problem) else 0
        recompute = lean_first(rng.choice(policies), first, rng.choice(policies), layers)
        return _plan(problem, devices, rng.choice(strategies), rng.choice(sizes), recompute)


def device_sets(problem: Problem) -> Iterator[tuple[int, ...]]:
    """GPUs of all subsets of machines up to exchanging machines of a class, the largest first.

    Of very many, only those that take a class of machines whole or not at all.
    """
    classes, devices = machine_classes(problem), problem.usable_by_machine
    subsets = list(islice(product(*(range(len(members), -1, -1) for members in classes)), _MOST_SUBSETS + 1))
    if len(subsets) > _MOST_SUBSETS:
        subsets = list(islice(product(*((len(members), 0) for members in classes)), _MOST_SUBSETS))
    seen = set()
    for counts in subsets:
        machines = [m for members, count in zip(classes, counts, strict=True) for m in members[:count]]
        for most in _processes(problem):
            found = tuple(sorted(d for m in machines for d in devices[m][:most]))
            if found and found not in seen:
                seen.add(found)
                yield found


def _processes(problem: Problem) -> list[int]:
    """How many GPUs of a machine may run: as many as some machine has."""
    return sorted({len(own) for own in problem.usable_by_machine.values()}, reverse=True)


def _strategies(problem: Problem) -> list[Sharding]:
    """The strategies that the workload allows."""
    return [sharding for sharding in STRATEGIES if sharding.stage in sharding_stages(problem.workload)]


def _sizes(problem: Problem, num_devices: int) -> list[int]:
    """Micro-batch sizes that share the global batch equally."""
    share, rest = divmod(problem.workload.global_batch, num_devices)
    return [] if rest else [size for size in problem.space.micro_batch_sizes(share) if share % size == 0]


def _plan(problem: Problem, devices: Sequence[int], sharding: Sharding, size: int, recompute: Recompute) -> Plan:
    count = problem.workload.global_batch // (len(devices) * size)
    ranges = ((0, problem.model.num_layers),)
    lines = tuple(Pipeline((Stage(TensorParallel((d,)), ranges, recompute),), count, size) for d in devices)
    return Plan(lines, default_schedule(problem.workload), sharding)


def _passes(problem: Problem, devices: Sequence[int], sharding: Sharding) -> _Passes:
    plan = _plan(problem, devices, sharding, 1, recompute_policies(problem.workload)[:1])
    holders = SyncTimes(sync_groups(plan.pipelines, problem.model), problem.cluster)
    around = rings(holders, sharding_groups(plan, problem.cluster), problem.cluster)
    within, between = (
        max((float(seconds.max()) for seconds in sync.pass_s(1.0)), default=0.0)
        for sync in (around.within, around.between)
    )
    return _Passes(within, between)


def _mixes(problem: Problem) -> bool:
    """Whether layers may differ in what they recompute."""
    return problem.space.recompute_per_stage and problem.space.recompute_per_layer


class Trial:
    """A micro-batch size on some devices: what fits, and how long the slowest of them computes."""

    def __init__(self, pricer: Pricer, devices: Sequence[int], sharding: Sharding, size: int) -> None:
        self.devices, self.sharding, self.size = devices, sharding, size
        self.pricer, self.problem = pricer, pricer.problem
        self.count = self.problem.workload.global_batch // (len(devices) * size)
        self._sites = {pricer.site((d,)) for d in devices}
        machine_of = self.problem.cluster.machine_of
        fewest = len(devices)  # holders of the smallest sharding group
        if sharding.groups == "machine":
            fewest = min(sum(machine_of[d] == m for d in devices) for m in {int(machine_of[d]) for d in devices})
        self._spread = Shards(sharding.stage, fewest)
        self._held = in_flight(default_schedule(self.problem.workload), StagePosition(0, 1, self.count))

    def recomputes(self) -> Iterator[Recompute]:
        """Policies that fit; and any two, the leaner for as few layers as memory asks for."""
        layers, pricer = self.problem.model.num_layers, self.pricer
        policies = recompute_policies(self.problem.workload)
        at = (True, True, self.size)
        yield from (
            (policy,)
            for policy in policies
            if all(pricer.max_layers(site, *at, policy, self._held, self._spread) >= layers for site in self._sites)
        )
        if not _mixes(self.problem) or not isinstance(pricer, CostModel):
            return
        for rich, lean in combinations(policies, 2):
            counts = range(layers, layers + 1)
            num_lean = max(
                pricer.least_lean(site, counts, *at, lean, rich, self._held, self._spread)[0] for site in self._sites
            )
            if num_lean < layers:
                yield lean_first(lean, num_lean, rich, layers)

    def seconds(self, recompute: Recompute) -> tuple[float, float]:
        """Forward and backward of a micro-batch, on the slowest device for each."""
        pricer, at = self.pricer, (self.problem.model.num_layers, True, True, self.size)
        if isinstance(pricer, CostModel):
            each = [pricer.recomputing_s(site, *at, recompute) for site in self._sites]
        else:
            each = [pricer.stage_s(site, *at, recompute[0]) for site in self._sites]
        return max(forward_s for forward_s, _ in each), max(backward_s for _, backward_s in each)


def _estimate_s(trial: Trial, passes: _Passes, recompute: Recompute) -> float:
    """All micro-batches on the slowest GPU, the larger of compute and communication."""
    workload, layers, zero = trial.problem.workload, trial.problem.model.num_layers, trial.sharding.stage
    forward_s, backward_s = trial.seconds(recompute)
    gather_s, scatter_s = passes.within_s * workload.element_bytes, passes.within_s * workload.stored_gradient_bytes
    if zero == 3:
        step_s = max(forward_s, gather_s) + max(backward_s, gather_s + scatter_s)
        step_s += (2 * gather_s + scatter_s) / layers  # the first gathers and the last scatter
    elif zero == 2:
        step_s = forward_s + max(backward_s, scatter_s) + scatter_s / layers
    else:
        step_s = forward_s + backward_s
    once_s = {0: 2 * scatter_s, 2: gather_s, 3: 0.0}[zero] + 2 * passes.between_s * workload.stored_gradient_bytes
    return trial.count * step_s + once_s

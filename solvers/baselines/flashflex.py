"""`flashflex`: the scheduler of HexiScale, first called FlashFlex (arXiv 2409.01143), as published or as released.

Can express: any pipelines of any stages over all devices, TP degrees that differ from stage to stage, any layers and
any batch of each pipeline, GPipe or 1F1B, ZeRO-1 over the pipelines. Cannot: leave devices out, come back to a machine
that a pipeline has left, give stages different recompute policies, replicate or interleave stages.

Its estimate is `flashflex_pricer.py`. `defects` tells two searches apart:

- `as_published` (`flashflex_published.py`): the two phases of the paper, iterated over every number of pipelines under
  its own formulas. Its memory formula, which counts four times the weights, is replaced by ours. The best partitions
  of each number of pipelines are completed with layers and batches by its own formulas and by the times of our cost
  model, as if it had measured them; recompute policy, micro-batch size and schedule, which it does not choose, are
  the best of those that the workload allows.
- `as_released` (github.com/Relaxed-System-Lab/FlashFlex, folder `experimental/`): the number of pipelines walks at
  random from each of 1 to 8, as many iterations each as its figures took; layers follow the memory of stages
  (`layer_partition.py`) and must fit its memory formula; pipelines get equal batches, of micro-batches whose size
  is fixed by the number of pipelines at the start (`config.py`); and see `flashflex_released.py`. Recompute policy
  and schedule are the best allowed, as above.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

from hexiopt.errors import InputError, closest
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, schedules, sharding_stages
from hexiopt.solving import Capabilities
from solvers.baselines.flashflex_plans import Plans, Published, Released, finished
from solvers.baselines.flashflex_pricer import FlashFlexPricer
from solvers.baselines.flashflex_published import MOST_SHARDING, SCHEDULES, Pipelines, PublishedSearch, intra_gb_per_s
from solvers.baselines.flashflex_released import Line, ReleasedSearch, memory_shares
from solvers.baselines.frame import Candidate, Rival
from solvers.core.partition import Group
from solvers.core.search import Search
from solvers.heuristics.random_partition import random_groups

PUBLISHED, RELEASED = "as_published", "as_released"

_MOST_GPUS = 512  # beyond, a single pass may take longer than a search
_SEARCH = 0.5  # share of the time limit for partitions
_PASSES = 600  # of both phases
_RELEASED_STARTS = 8  # numbers of pipelines to start from
_RELEASED_PASSES = 30  # from each


@dataclass(frozen=True)
class FlashFlex(Rival):
    """Partitions the GPUs again and again; `defects` is `as_published` or `as_released`. Raises InputError."""

    defects: str = PUBLISHED

    name = "flashflex"
    capabilities = Capabilities(kind="baseline", max_devices=_MOST_GPUS, requires=("pymetis",))

    def __post_init__(self) -> None:
        if self.defects not in (PUBLISHED, RELEASED):
            hint = closest(self.defects, (PUBLISHED, RELEASED))
            raise InputError(f"solver.defects: {self.defects!r} is not known; {hint}")

    @property
    def released(self) -> bool:
        """Whether with the defects of the released code."""
        return self.defects == RELEASED

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """What either search finds."""
        found = _released(search, rng) if self.released else _published(search, rng)
        for plans, pipelines, estimate_s, turn in found:
            for choice in plans.choices():
                yield Candidate(estimate_s, partial(plans.plan, pipelines, *choice), turn)

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head; of what is released, that batches are equal and layers follow the memory of stages."""
        stages = [stage for line in plan.pipelines for stage in line.stages]
        if plan.schedule not in SCHEDULES:
            return f"schedule {plan.schedule}"
        if plan.sharding.stage > MOST_SHARDING or plan.sharding.groups != "all":
            return "sharding other than ZeRO-1"
        if any(len(stage.replicas) != 1 or len(stage.layers) != 1 for stage in stages):
            return "a replicated or interleaved stage"
        if len({policy for stage in stages for policy in stage.recompute}) > 1:
            return "several recompute policies"
        if set(plan.devices()) != set(problem.usable_devices):
            return "a device left out"
        machine_of = problem.cluster.machine_of
        for line in plan.pipelines:
            machines = [machine for machine, _ in groupby(int(machine_of[stage.devices[0]]) for stage in line.stages)]
            if not self.released and len(set(machines)) < len(machines):
                return "a pipeline that comes back to a machine"
        if self.released:
            sequences = [line.num_sequences for line in plan.pipelines]
            if max(sequences) - min(sequences) > max(line.micro_batch_size for line in plan.pipelines):
                return "unequal batches"
            for line in plan.pipelines:
                shares = memory_shares(problem, tuple(stage.devices for stage in line.stages))
                if [stage.num_layers for stage in line.stages] != shares:
                    return "layers that do not follow the memory of stages"
        return None

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """A random partition of all devices, layers and batches at random, or as released by their rules."""
        workload, layers = problem.workload, problem.model.num_layers
        devices = list(problem.usable_devices)
        count = problem.space.num_pipelines or rng.randint(1, min(len(devices), workload.global_batch))
        size = rng.choice(problem.space.micro_batch_sizes(max(1, workload.global_batch // count)))
        total, rest = divmod(workload.global_batch, size)
        rng.shuffle(devices)
        lines = [_by_machine(problem, random_groups(problem, devices[k::count], rng)) for k in range(count)]
        if rest or any(len(line) > layers for line in lines):
            return None
        if self.released:
            shares = [memory_shares(problem, line) for line in lines]
            counts = [total // count + (k < total % count) for k in range(count)]
        else:
            shares = [_composition(layers, len(line), rng) for line in lines]
            counts = _composition(total, count, rng)
        allowed = [schedule for schedule in SCHEDULES if schedule in schedules(workload)]
        sharding = [stage for stage in sharding_stages(workload) if stage <= MOST_SHARDING]
        if not allowed or not sharding or not all(min(share) for share in shares):
            return None
        policy = rng.choice(recompute_policies(workload))
        return finished(tuple(lines), shares, counts, rng.choice(allowed), size, policy, rng.choice(sharding))


def _by_machine(problem: Problem, groups: list[Group]) -> Line:
    """The groups of a machine together, where its first one stands."""
    machines = [int(problem.cluster.machine_of[group[0]]) for group in groups]
    return tuple(group for _, group in sorted(zip(map(machines.index, machines), groups, strict=True)))


def _composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """`parts` whole numbers from 1 that sum to `total`, at random."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [end - start for start, end in pairwise([0, *cuts, total])]


def _published(search: Search, rng: random.Random) -> Iterator[tuple[Plans, Pipelines, float, int]]:
    """What the phases found: first the best partition of every number of pipelines, then the second best, ..."""
    phases = PublishedSearch(search.problem, rng)
    for _ in range(_PASSES):
        if not search.go_on(_SEARCH):
            break
        phases.iterate()
    plans = Published(search.problem, search.pricer)
    for ranked in phases.found():
        for turn, (pipelines, estimate_s) in enumerate(ranked):
            yield plans, pipelines, estimate_s, turn


def _released(search: Search, rng: random.Random) -> Iterator[tuple[Plans, Pipelines, float, int]]:
    """A random walk over the number of pipelines from every start (`main.py`)."""
    problem = search.problem
    phases = ReleasedSearch(FlashFlexPricer(problem, intra_gb_per_s=intra_gb_per_s(problem)), rng)
    for start in range(1, min(_RELEASED_STARTS, len(problem.usable_devices)) + 1):
        plans = Released(problem, start)
        for pipelines in dict.fromkeys(phases.walk(start, _RELEASED_PASSES)):
            yield plans, pipelines, plans.estimate_s(pipelines), 0
        if not search.go_on(_SEARCH):
            break

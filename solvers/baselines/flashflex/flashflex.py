"""`flashflex`: the scheduler of HexiScale, first called FlashFlex (arXiv 2409.01143), as published or as released.

Can express: any pipelines of any stages over all devices, TP degrees that differ from stage to stage, any layers and
any batch of each pipeline, GPipe or 1F1B, ZeRO-1 over the pipelines. Cannot: leave devices out, come back to a machine
that a pipeline has left, give stages different recompute policies, replicate or interleave stages.

Its estimate is `pricer.py`. `defects` tells two searches apart:

- `as_published` (`published.py`): the two phases of the paper, iterated over every number of pipelines under
  its own formulas. Its memory formula, which counts four times the weights, is replaced by ours. The best partitions
  of each number of pipelines are completed with layers and batches by its own formulas and by the times of our cost
  model, as if it had measured them; recompute policy, micro-batch size and schedule, which it does not choose, are
  the best of those that the workload allows.
- `as_released` (github.com/Relaxed-System-Lab/FlashFlex, folder `experimental/`): the number of pipelines walks at
  random from each of 1 to 8, as many iterations each as its figures took; layers follow the memory of stages
  (`layer_partition.py`) and must fit its memory formula; pipelines get equal batches, of micro-batches whose size
  is fixed by the number of pipelines at the start (`config.py`); and see `released.py`. Recompute policy
  and schedule are the best allowed, as above.

With `top_k` a partition is one plan: layers and batches by its own formulas, the full recompute that these count, and
the sharding by whose memory its layers are split, of the released code none.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hexiopt.errors import InputError, did_you_mean
from hexiopt.solving import Capabilities
from solvers.baselines._frame import Baseline, PlanCandidate
from solvers.baselines.flashflex.plans import PartitionPlans, PublishedPlans, ReleasedPlans
from solvers.baselines.flashflex.pricer import FlashFlexPricer
from solvers.baselines.flashflex.published import Pipelines, PublishedSearch, intra_gb_per_s
from solvers.baselines.flashflex.released import ReleasedSearch
from solvers.core.search import Search

PUBLISHED, RELEASED = "as_published", "as_released"

_MAX_GPUS = 512  # beyond, a single pass may take longer than a search
_SEARCH = 0.5  # share of the time limit for partitions
_PASSES = 600  # of both phases
_RELEASED_STARTS = 8  # numbers of pipelines to start from
_RELEASED_PASSES = 30  # from each


@dataclass(frozen=True)
class FlashFlex(Baseline):
    """FlashFlex (2409.01143): unequal pipelines by graph partitions.

    Partitions the GPUs repeatedly. `defects` is `as_published` or `as_released`; raises InputError for others.
    """

    defects: str = PUBLISHED

    name = "flashflex"
    capabilities = Capabilities(kind="baseline", max_devices=_MAX_GPUS, requires=("pymetis",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.defects not in (PUBLISHED, RELEASED):
            hint = did_you_mean(self.defects, (PUBLISHED, RELEASED))
            raise InputError(f"solver.defects: {self.defects!r} is not known; {hint}")

    @property
    def released(self) -> bool:
        """Whether the defects of the released code are reproduced."""
        return self.defects == RELEASED

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """What the published or the released search finds."""
        partitions = _released(run, rng) if self.released else _published(run, rng)
        for plans, pipelines, estimate_s, turn in partitions:
            if self.top_k is not None:
                yield PlanCandidate(estimate_s, partial(plans.published, pipelines))
                continue
            for choice in plans.choices(len(pipelines)):
                yield PlanCandidate(estimate_s, partial(plans.plan, pipelines, choice), turn)


def _published(run: Search, rng: random.Random) -> Iterator[tuple[PartitionPlans, Pipelines, float, int]]:
    """What the phases found: the best partition for every number of pipelines, then the second best, and so on."""
    phases = PublishedSearch(run.problem, rng)
    for _ in range(_PASSES):
        if not run.should_continue(_SEARCH):
            break
        phases.iterate()
    plans = PublishedPlans(run.problem, run.pricer)
    for ranked in phases.best_partitions():
        for turn, (pipelines, estimate_s) in enumerate(ranked):
            yield plans, pipelines, estimate_s, turn


def _released(run: Search, rng: random.Random) -> Iterator[tuple[PartitionPlans, Pipelines, float, int]]:
    """A random walk over the number of pipelines from every start (`main.py`)."""
    problem = run.problem
    phases = ReleasedSearch(FlashFlexPricer(problem, intra_gb_per_s=intra_gb_per_s(problem)), rng)
    for start in range(1, min(_RELEASED_STARTS, len(problem.usable_devices)) + 1):
        plans = ReleasedPlans(problem, start)
        for pipelines in dict.fromkeys(phases.walk(start, _RELEASED_PASSES)):
            yield plans, pipelines, plans.estimate_s(pipelines), 0
        if not run.should_continue(_SEARCH):
            break

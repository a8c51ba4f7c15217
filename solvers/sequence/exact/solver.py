"""`sequence_exact`: the best plan of pipelines of one sequence stage each, proven, for small clusters.

Its space, all at once: how many pipelines, which devices form each (some may stay unused), their shares of the batch
and micro-batch sizes; ZeRO-0 or 1, over all devices or those of a machine; and of every stage its recompute policy, its
groups, their order and that of the devices in them, the order of the shards, the heads of every device, and its tokens
in whole *quanta*, of which a sequence has `resolution`. Zigzag shards are looked at where a quantum has an even number
of tokens. Not in it: pipelines of several stages, tensor parallelism and replicas, policies layer by layer, stated
sharding groups, ZeRO-2 and 3, a second schedule (with one stage all take equally long,
and the one that holds least is taken), and stages a thousand times slower than shares by speed.

`Result.own_bound` is a step time that no plan of this space beats, to 2e-6 of it; `Result.bound_s` holds for the whole
plan space, so that `status` says `optimal` only where that proves it. Where layouts can cross different parts of the
network (machines of several interfaces, uplinks, stated links) and several pipelines share it, sharing that is not
common to all layouts is left out of the bound, and a gap may stay.

How: `plans.py` looks at parts of the space best first, `stages.py` at frames of a stage by their floors, `program.py`
is the CP-SAT model of one frame; what is not exact in it is priced and cut. CP-SAT has one worker and counts its work;
the same seed and steps give the same plan.
"""

import random
from dataclasses import dataclass

from hexiopt.cost.model import CostModel
from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from hexiopt.result import OwnBound
from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.frame.solver import SearchSolver
from solvers.sequence.exact.grid import default_resolution
from solvers.sequence.exact.plans import Plans

MOST_DEVICES = 6


@dataclass(frozen=True)
class SequenceExact(SearchSolver):
    """`resolution`: quanta of a sequence, a divisor of its length; None takes the largest up to 16 that leaves quanta
    of an even number of tokens. A step is a program solved."""

    resolution: int | None = None

    name = "sequence_exact"
    capabilities = Capabilities(kind="oracle", sequence="only", pricers="cost_model", max_devices=MOST_DEVICES)

    def __post_init__(self) -> None:
        given = self.resolution
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise InputError(f"solver.resolution: {given!r} is not a number of quanta; choose a whole number from 1")

    def search(self, run: Search, rng: random.Random) -> None:
        """Raises InputError for a resolution that does not divide a sequence, for a workload that must be in ZeRO-2 or
        3, and for a cost model whose gradients overlap."""
        problem, resolution = run.problem, self._resolution(run.problem)
        zero = sharding_stages(problem.workload)[0]
        if zero > 1:
            raise InputError(
                f"workload: optimizer_sharding: {zero} does not go with the sequence layouts of solver={self.name}; "
                "choose auto, 0 or 1"
            )
        if isinstance(run.pricer, CostModel) and run.pricer.framework.overlaps_gradients:
            raise InputError(f"solver: {self.name}: its bounds hold for our own cost model only; use solver=hexiseq")
        run.remedy = "it plans pipelines of one sequence stage, so try solver=portfolio"
        plans = Plans(run, resolution)
        if problem.space.num_stages in (None, 1):
            plans.run()
        space = f"pipelines of one sequence stage, tokens in 1/{resolution} of a sequence"
        run.own_bound = OwnBound(max(run.bound_s, plans.bound_s), space)

    def _resolution(self, problem: Problem) -> int:
        seq_len = problem.workload.seq_len
        if self.resolution is None:
            return default_resolution(seq_len, len(problem.usable_devices))
        if seq_len % self.resolution:
            raise InputError(
                f"solver.resolution: {self.resolution} quanta do not divide a sequence of {seq_len} tokens; "
                "choose a divisor"
            )
        return self.resolution

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

from dataclasses import dataclass, replace

from hexiopt.cost.model import CostModel
from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from hexiopt.result import OwnBound, Result
from solvers.core.search import Budget, Listener, Pricer, Search
from solvers.frame.infeasible import explain
from solvers.sequence.exact.grid import default_resolution
from solvers.sequence.exact.plans import Plans
from solvers.sequence.requirement import require_sequences

MOST_DEVICES = 6


@dataclass(frozen=True)
class SequenceExact:
    """`resolution`: quanta of a sequence, a divisor of its length; None takes the largest up to 16 that leaves quanta
    of an even number of tokens. A step is a program solved."""

    resolution: int | None = None

    name = "sequence_exact"

    def __post_init__(self) -> None:
        given = self.resolution
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise InputError(f"solver.resolution: {given!r} is not a number of quanta; choose a whole number from 1")

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan of its space with that space's bound; without one, the reason. Raises InputError where the
        problem has no sequence layouts, too many devices, or a sequence that the resolution does not divide."""
        resolution = self._resolution(problem)
        _refuse(problem, pricer)
        search = Search(self.name, problem, budget, seed, pricer, listen)
        plans = Plans(search, resolution)
        if problem.space.num_stages in (None, 1):
            plans.run()
        result = explain(search, remedy="it plans pipelines of one sequence stage, so try solver=portfolio")
        if result.plan is None:
            return result
        space = f"pipelines of one sequence stage, tokens in 1/{resolution} of a sequence"
        return replace(result, own_bound=OwnBound(max(result.bound_s, plans.bound_s), space))

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


def _refuse(problem: Problem, pricer: Pricer | None) -> None:
    name, devices = SequenceExact.name, len(problem.usable_devices)
    require_sequences(problem, name)
    zero = sharding_stages(problem.workload)[0]
    if zero > 1:
        raise InputError(
            f"workload: optimizer_sharding: {zero} does not go with the sequence layouts of solver={name}; "
            "choose auto, 0 or 1"
        )
    if devices > MOST_DEVICES:
        raise InputError(
            f"solver: {name}: {devices} devices are more than the {MOST_DEVICES} of which all layouts can be looked "
            "at; use solver=hexiseq"
        )
    if pricer is not None and not (isinstance(pricer, CostModel) and not pricer.framework.overlaps_gradients):
        raise InputError(f"solver: {name}: its bounds hold for our own cost model only; use solver=hexiseq")

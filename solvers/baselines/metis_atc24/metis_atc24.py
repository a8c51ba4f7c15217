"""`metis_atc24`: Metis (Um et al., USENIX ATC 2024; released as github.com/SamsungLabs/Metis).

Can express: one pipeline over all devices, ranked by a sequence of the GPU types (the machines of a type stand
together, in the order of the cluster file, as in its host file: it has one bandwidth between machines and permutes
types, not machines); stages on consecutive ranks, a power of two of them each; per stage its own degrees of data and
tensor parallelism, TP inside a machine; in a stage of several GPU types, samples of a micro-batch by speed (a replica
whose share rounds to none idles); layers by speed and memory; any micro-batch that divides the global batch; 1F1B.

Cannot: leaving devices out otherwise; pipelines of unequal structure or batch; TP degrees that differ inside a stage;
GPU types that alternate along the pipeline. It has no recompute and no sharding of its own: here one policy for the
whole plan, the best that the workload allows, and ZeRO-1 or none, as the workload allows.

Its search enumerates sequences of types, device groups (pruned by the variance of their sizes and the length of
permutations) and micro-batches; per stage it starts with data parallelism alone and trades it for TP where memory is
least; a load balancer splits layers, with feedback from memory. Here the same space is searched without pruning, by a
dynamic programme over ranks (`cutting.py`), whose best cuts are improved step by step (`planner.py`). The estimate is
the paper's, slowest stage · (M−1) + Σ stages + messages + slowest gradient sync, on profiled times, but with messages
that overlap as 1F1B lets them. The released code takes the network inside machines for the one between them; that is
not reproduced.

A micro-batch of more sequences than the plan space allows is split over several pipelines of equal structure and
batch: the same replicas, layers and gradients.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from solvers.baselines._frame import Baseline, PlanCandidate
from solvers.baselines._plans import one_f_one_b, optimizer_shardings
from solvers.baselines.metis_atc24.planner import MetisChoice, MetisPlanner
from solvers.core.search import Search

_WIDER = 1.5  # changes of the best plan whose quick estimate is this much above its own are not priced


class MetisAtc24(Baseline):
    """Metis (ATC 2024): device groups by GPU type, samples by speed."""

    name = "metis_atc24"

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """The planner's choices."""
        schedule, shardings = one_f_one_b(run.problem), optimizer_shardings(run.problem)
        if schedule is not None and shardings:
            planner = MetisPlanner(run, schedule, max(shardings))  # which leaves most memory
            for seconds, choice in planner.choices(rng):
                *lent, planned = optimizer_shardings(run.problem, choice.holders)  # by whose memory layers are split
                for sharding in (*lent, planned):
                    yield _candidate(planner, seconds, replace(choice, sharding=sharding), sharding == planned)


def _candidate(planner: MetisPlanner, seconds: float, choice: MetisChoice, published: bool = False) -> PlanCandidate:
    neighbours = partial(_neighbours, planner, choice)
    return PlanCandidate(seconds, partial(planner.plan, choice), neighbours=neighbours, published=published)


def _neighbours(planner: MetisPlanner, choice: MetisChoice) -> Iterator[PlanCandidate]:
    """Changed choices, to be priced."""
    for changed in planner.neighbours(choice, _WIDER):
        yield _candidate(planner, planner.seconds[changed], changed)

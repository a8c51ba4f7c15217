"""`metis_atc24`: Metis (Um et al., USENIX ATC 2024; released as github.com/SamsungLabs/Metis).

Can express: one pipeline over all devices, ranked by a sequence of the GPU types (the machines of a type stand
together); stages on consecutive ranks, a power of two of them each; per stage its own degrees of data and tensor
parallelism, TP inside a machine; in a stage of several GPU types, samples of a micro-batch by speed (a replica whose
share rounds to none idles); layers by speed and memory; any micro-batch that divides the global batch; 1F1B.

Cannot: leaving devices out otherwise; pipelines of unequal structure or batch; TP degrees that differ inside a stage;
GPU types that alternate along the pipeline. It has no recompute and no sharding of its own: here one policy for the
whole plan, the best that the workload allows, and ZeRO-1 where it is allowed.

Its search enumerates sequences of types, device groups (pruned by the variance of their sizes and the length of
permutations) and micro-batches; per stage it starts with data parallelism alone and trades it for TP where memory is
least; a load balancer splits layers, with feedback from memory. Here the same space is searched without pruning, by a
dynamic programme over ranks (`cutting.py`), whose best cuts are improved step by step (`metis_search.py`). The
estimate is the paper's, slowest stage · (M−1) + Σ stages + messages + slowest gradient sync, on profiled times, but
with messages that overlap as 1F1B lets them. The released code takes the network inside machines for the one between
them; that is not reproduced.

A micro-batch of more sequences than the plan space allows is split over *lanes*, pipelines of equal structure and
batch: the same replicas, layers and gradients, written down as several pipelines.
"""

import random
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from solvers.baselines.aligned import one_f_one_b, optimizer_sharding
from solvers.baselines.device_groups import RankedDevices, StageGroup
from solvers.baselines.estimate import Estimates
from solvers.baselines.frame import Candidate, Rival
from solvers.baselines.lanes import plan_of_cut
from solvers.baselines.metis_search import Choice, Planner, batchings, sequences
from solvers.baselines.metis_space import broken_rule
from solvers.core.search import Search

_WIDER = 1.5  # changes of the best plan whose quick estimate is this much above its own are not priced


class MetisAtc24(Rival):
    """What `metis_search.py` finds."""

    name = "metis_atc24"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """The search's choices."""
        schedule, sharding = one_f_one_b(search.problem), optimizer_sharding(search.problem)
        if schedule is not None and sharding is not None:
            planner = Planner(search, schedule, sharding)
            for seconds, choice in planner.choices(rng):
                yield _candidate(planner, seconds, choice)

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        return broken_rule(problem, plan, _ranked(problem)[0].estimates)

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """A random sequence of types, random groups, degrees and micro-batch; layers by speed or at random."""
        schedule, sharding = one_f_one_b(problem), optimizer_sharding(problem)
        if schedule is None or sharding is None:
            return None
        policy = rng.choice(recompute_policies(problem.workload))
        batching = rng.choice(batchings(problem, policy, bool(sharding)))
        ranked = rng.choice(_ranked(problem))
        cut: list[StageGroup] = []
        while not cut or cut[-1].end_rank < len(ranked.ranks):
            groups = list(ranked.groups_from(cut[-1].end_rank if cut else 0, batching))
            if not groups or len(cut) == problem.model.num_layers:
                return None
            cut.append(rng.choice(groups))
        weights = [1.0 / group.layer_s if rng.random() < 0.8 else rng.random() for group in cut]
        layers = [1] * len(cut)
        for _ in range(problem.model.num_layers - len(cut)):
            layers[max(range(len(cut)), key=lambda s: weights[s] / layers[s])] += 1
        return plan_of_cut(problem, batching, tuple(cut), layers, schedule, sharding)


def _candidate(planner: Planner, seconds: float, choice: Choice) -> Candidate:
    return Candidate(seconds, partial(planner.plan, choice), near=partial(_near, planner, choice))


def _near(planner: Planner, choice: Choice) -> Iterator[Candidate]:
    """Changed choices, to be priced."""
    for changed in planner.near(choice, _WIDER):
        yield _candidate(planner, planner.seconds(changed), changed)


@lru_cache(maxsize=1)
def _ranked(problem: Problem) -> list[RankedDevices]:
    """What random draws and the rules of the space share."""
    estimates, kept = Estimates(CostModel(problem)), dict[Any, Any]()
    return [RankedDevices(estimates, ranks, kept) for ranks in sequences(problem)]

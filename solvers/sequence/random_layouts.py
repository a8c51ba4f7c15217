"""`sequence_random`: random shapes with random layouts, the baseline for the other sequence solvers.

Machines in random order are cut into pipelines and stages at random places; layouts use a random clustering, with
tokens and heads randomised around what capability suggests. Layers, batches and policies are computed as for every
other solver.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.solving import Capabilities
from solvers.core.search import Search
from solvers.core.zero import draw_sharding_groups
from solvers.frame.solver import SearchSolver
from solvers.sequence.grouping import clusterings
from solvers.sequence.layout_evaluator import RULES, EvaluatedLayout, LayoutFreedoms, LayoutRecipe, StageNeeds
from solvers.sequence.layout_search import LayoutSearch
from solvers.sequence.plan_builder import PlanBuilder
from solvers.sequence.shapes import SequenceShape, zero_stages

_SPREAD = 0.2  # of the logarithms of the factors of tokens and heads


class RandomLayouts(LayoutSearch):
    """Returns a random layout instead of the best, under the first recompute policy that fits."""

    def __init__(self, model: PlanPricer, search: Search, rng: random.Random) -> None:
        super().__init__(model, search.should_continue, LayoutFreedoms())
        self._rng = rng

    def best(self, devices: Sequence[int], size: int, need: StageNeeds, effort: int = 1) -> EvaluatedLayout | None:
        """A random one."""
        rng, count = self._rng, len(devices)
        if count > self.problem.workload.seq_len:
            return None
        factors = [tuple(rng.lognormvariate(0.0, _SPREAD) for _ in range(count)) for _ in range(2)]
        groups, order = rng.choice(clusterings(self.problem, devices)), rng.choice(self.freedoms.orders)
        return self.over_policies(LayoutRecipe(groups, order, "none", rng.choice(RULES), 1, *factors), size, need)


def random_shape(problem: Problem, rng: random.Random) -> SequenceShape | None:
    """A random shape without tensor parallelism; None where the workload's sharding does not allow it."""
    space, workload = problem.space, problem.workload
    machines = list(problem.usable_by_machine.values())
    rng.shuffle(machines)
    devices = [d for own in machines for d in own]
    most = min(workload.global_batch, len(devices))
    pipelines = space.num_pipelines or rng.choice([n for n in (1, 2, 3, 4, 8, 16) if n <= most])
    stages = space.num_stages or rng.randint(1, max(1, min(8, problem.model.num_layers, len(devices) // pipelines)))
    count = rng.randint(pipelines * stages, len(devices)) if rng.random() < 1 / 3 else len(devices)
    ends = [0, *sorted(rng.sample(range(1, count), pipelines * stages - 1)), count]
    parts = [tuple(sorted(devices[a:b])) for a, b in pairwise(ends)]
    size = rng.choice(space.micro_batch_sizes(max(1, workload.global_batch // pipelines)))
    cut = SequenceShape(tuple(tuple(parts[k : k + stages]) for k in range(0, len(parts), stages)), size, 0)
    stages_open = zero_stages(problem, cut)
    if not stages_open:
        return None
    zero = rng.choice(stages_open)
    return replace(cut, zero=zero, groups=draw_sharding_groups(problem, rng, zero))


class SequenceRandom(SearchSolver):
    """Random sequence layouts, the best of them kept: what any search for them should beat.

    Draws shapes until the budget is spent; a step is one draw.
    """

    name = "sequence_random"
    capabilities = Capabilities(sequence="only")

    def search(self, run: Search, rng: random.Random) -> None:
        """Draw, build, price."""
        model = run.our_model or PlanPricer(run.problem)
        builder = PlanBuilder(model, RandomLayouts(model, run, rng))
        while run.step():
            shape = random_shape(run.problem, rng)
            plan = None if shape is None else builder.build(shape)
            if plan is not None and not check(run.problem, plan):
                run.offer(plan)

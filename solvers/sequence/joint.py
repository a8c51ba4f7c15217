"""Joint planning: every stage of every pipeline has tensor parallelism or a sequence layout, whichever is faster there.

Stages may then span machines and types of GPUs. The search starts from shapes that people would build, among them the
stages of the best plan without layouts, and moves devices, stages and pipelines.
"""

import random

from hexiopt.plan.plan import Plan
from solvers.core.search import Search
from solvers.sequence.planning import Planner, search_shapes
from solvers.sequence.shapes import Shape, with_sharding


def plan_jointly(search: Search, rng: random.Random) -> None:
    """Search until the budget is spent, from what `search` has found so far too."""
    planner = Planner(search, tensor=True)
    found = search.plan
    pool = planner.hand_made()
    if found is not None and search.go_on():
        shape = with_sharding(search.problem, shape_of(found))
        known = None if shape is None else planner.planned(shape, 1)
        if known is not None:
            pool = sorted([known, *pool], key=lambda one: one.step_s)
    search_shapes(planner, pool, rng)


def shape_of(plan: Plan) -> Shape:
    """The devices of a plan's stages; replicas of a stage are one."""
    lines = tuple(tuple(tuple(sorted(stage.all_devices())) for stage in line.stages) for line in plan.pipelines)
    zero = plan.sharding.stage
    groups = plan.sharding.groups if isinstance(plan.sharding.groups, str) else "all"
    return Shape(lines, max(line.micro_batch_size for line in plan.pipelines), zero, groups if zero else "all")

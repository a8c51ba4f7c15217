"""Interleaved stages in a search: the layer ranges per stage that a partition asks for, and those a pipeline can
have.
"""

import random
from collections.abc import Sequence

from hexiopt.plan.plan import Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, schedules
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule

_FAVOURED: dict[Schedule, int] = {ONE_F_ONE_B: 4}  # weights of draws other than 1, where several schedules are allowed
_NUMBERS = (2, 3, 4, 6, 8, 12, 16)  # of layer ranges worth a draw


def may_interleave(problem: Problem) -> bool:
    """Whether a plan may have stages of several layer ranges."""
    return problem.space.max_chunks > 1 and any(one.chunked for one in schedules(problem.workload))


def plain_schedules(problem: Problem) -> list[Schedule]:
    """The schedules that a plan may have without interleaving."""
    return [schedule for schedule in schedules(problem.workload) if not schedule.chunked]


def draw_chunks(problem: Problem, rng: random.Random) -> int:
    """A random number of layer ranges per stage, at least 2."""
    return rng.choice([n for n in _NUMBERS if n <= problem.space.max_chunks])


def draw_schedule(problem: Problem, rng: random.Random) -> tuple[Schedule, int]:
    """A random schedule and its number of layer ranges per stage; 1F1B, best for most plans, is drawn most often."""
    allowed = schedules(problem.workload)
    schedule = rng.choices(allowed, [_FAVOURED.get(one, 1) for one in allowed])[0]
    if not schedule.chunked:
        return schedule, 1
    if not may_interleave(problem):  # with one layer range a stage, 1F1B under a second name
        return default_schedule(problem.workload), 1
    # Where only interleaving is allowed, half of the draws have one range: any number of micro-batches goes.
    return schedule, 1 if allowed == (schedule,) and rng.random() < 0.5 else draw_chunks(problem, rng)


def possible_chunks(chunks: int, num_stages: int, num_layers: int) -> int:
    """The most layer ranges per stage, up to `chunks`, that a pipeline can have: one in a single stage, else one layer
    each.
    """
    return max(1, min(chunks, num_layers // num_stages)) if num_stages > 1 else 1


def multiple_of(stages: Sequence[Stage]) -> int:
    """The divisor that a pipeline's number of micro-batches must have: its number of stages where they are
    interleaved.
    """
    return len(stages) if len(stages[0].layers) > 1 else 1

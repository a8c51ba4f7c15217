"""Interleaved stages in a search: how many layer ranges a structure asks for, a pipeline can have, and which."""

import random
from collections.abc import Sequence

from hexiopt.plan.plan import Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule, schedules
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule

_FAVOURED: dict[Schedule, int] = {ONE_F_ONE_B: 4}  # weights of draws beside 1, where a schedule is open
_NUMBERS = (2, 3, 4, 6, 8, 12, 16)  # of layer ranges worth a draw


def may_interleave(problem: Problem) -> bool:
    """Whether a plan may have stages of several layer ranges."""
    return problem.space.max_chunks > 1 and any(one.chunked for one in schedules(problem.workload))


def draw_chunks(problem: Problem, rng: random.Random) -> int:
    """A number of layer ranges a stage, from 2."""
    return rng.choice([n for n in _NUMBERS if n <= problem.space.max_chunks])


def draw_schedule(problem: Problem, rng: random.Random) -> tuple[Schedule, int]:
    """A schedule at random, and how many layer ranges a stage; 1F1B, which serves most plans best, most often."""
    allowed = schedules(problem.workload)
    schedule = rng.choices(allowed, [_FAVOURED.get(one, 1) for one in allowed])[0]
    if not schedule.chunked:
        return schedule, 1
    if not may_interleave(problem):  # with one layer range a stage, 1F1B under a second name
        return default_schedule(problem.workload), 1
    # Where every plan is interleaved, one range, and so any number of micro-batches, is as good a draw.
    return schedule, 1 if allowed == (schedule,) and rng.random() < 0.5 else draw_chunks(problem, rng)


def possible_chunks(chunks: int, num_stages: int, num_layers: int) -> int:
    """The most layer ranges up to `chunks` that a pipeline can have: one for a lone stage, a layer for each."""
    return max(1, min(chunks, num_layers // num_stages)) if num_stages > 1 else 1


def multiple_of(stages: Sequence[Stage]) -> int:
    """Of what a pipeline's number of micro-batches is a multiple: of its stages, where they are interleaved."""
    return len(stages) if len(stages[0].layers) > 1 else 1

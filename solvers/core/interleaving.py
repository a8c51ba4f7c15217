"""The schedules of a search, and the layer ranges a stage that a partition asks for and that a pipeline can have."""

import random
from collections.abc import Iterator, Sequence

from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule

_NUMBERS = (2, 3, 4, 6, 8, 12, 16)  # of layer ranges worth a try


def may_interleave(problem: Problem) -> bool:
    """Whether a plan may have stages of several layer ranges."""
    return problem.space.max_chunks > 1 and any(one.chunked for one in problem.schedules)


def plain_schedules(problem: Problem) -> list[Schedule]:
    """The schedules that a plan may have without interleaving."""
    return [schedule for schedule in problem.schedules if not schedule.chunked]


def interleavings(problem: Problem, chunks: Sequence[int] = _NUMBERS) -> Iterator[tuple[Schedule, int]]:
    """The schedules of interleaved plans, each with as many layer ranges a stage as `chunks` says and the plan space
    allows."""
    for schedule in problem.schedules:
        if schedule.chunked:
            yield from ((schedule, count) for count in chunks if 1 < count <= problem.space.max_chunks)


def draw_schedule(problem: Problem, rng: random.Random) -> tuple[Schedule, int]:
    """A random schedule and its number of layer ranges per stage; what is best for most plans is drawn most often."""
    allowed = problem.schedules
    schedule = rng.choices(allowed, [one.draw_weight for one in allowed])[0]
    if not schedule.chunked:
        return schedule, 1
    if not may_interleave(problem):  # with one layer range a stage, another's second name
        return problem.default_schedule, 1
    # Where only interleaving is allowed, half of the draws have one range: any number of micro-batches goes.
    if allowed == (schedule,) and rng.random() < 0.5:
        return schedule, 1
    return rng.choice([variant for variant in interleavings(problem) if variant[0] == schedule])


def possible_chunks(chunks: int, num_stages: int, num_layers: int) -> int:
    """The most layer ranges per stage, up to `chunks`, that a pipeline can have: one in a single stage, else one layer
    each.
    """
    return max(1, min(chunks, num_layers // num_stages)) if num_stages > 1 else 1

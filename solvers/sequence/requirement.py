"""What plans with sequence layouts ask of a problem."""

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules


def one_range_schedule(problem: Problem) -> str:
    """The schedule of pipelines whose stages hold one range of layers each, as those with layouts do."""
    allowed = schedules(problem.workload)
    return next(name for name in ("1f1b", "interleaved", "gpipe") if name in allowed)

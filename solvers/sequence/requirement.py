"""What solvers of sequence layouts ask of a problem."""

from hexiopt.errors import InputError
from hexiopt.problem import Problem
from hexiopt.space import schedules, sharding_stages
from solvers.zero import plain_stages


def require_sequences(problem: Problem, solver: str) -> None:
    """Raises InputError where the plan space has no sequence layouts, or the workload no sharding that allows them."""
    if not problem.space.sequence:
        raise InputError(f"solver: {solver} plans stages with sequence layouts; allow them with space.sequence=true")
    if not plain_stages(problem):
        zero = sharding_stages(problem.workload)[0]
        raise InputError(
            f"workload: optimizer_sharding: {zero} does not go with the sequence layouts of solver={solver}; "
            "choose auto, 0 or 1"
        )


def one_range_schedule(problem: Problem) -> str:
    """The schedule of pipelines whose stages hold one range of layers each, as those with layouts do."""
    allowed = schedules(problem.workload)
    return next(name for name in ("1f1b", "interleaved", "gpipe") if name in allowed)

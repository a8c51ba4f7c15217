"""What solvers of sequence layouts ask of a problem, and what proofs do."""

from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules


def require_sequences(problem: Problem, solver: str) -> None:
    """Raises InputError where the plan space has no sequence layouts."""
    if not problem.space.sequence:
        raise InputError(f"solver: {solver} plans stages with sequence layouts; allow them with space.sequence=true")


def refuse_sequences(problem: Problem, solver: str) -> None:
    """Raises InputError where the plan space has sequence layouts, for a solver whose proofs do not hold for them."""
    if problem.space.sequence:
        raise InputError(
            f"solver: {solver} proves nothing about sequence layouts; take space.sequence=false, "
            "solver=sequence_exact or solver=portfolio"
        )


def refuse_unproved(problem: Problem, solver: str) -> None:
    """Raises InputError where plans may have a schedule of which a solver's proofs know nothing."""
    for schedule in schedules(problem.workload):
        if not schedule.bounded:
            raise InputError(f"solver: {solver} proves nothing about the {schedule} schedule; take solver=portfolio")

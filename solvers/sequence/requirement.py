"""What solvers of sequence layouts ask of a problem."""

from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem


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

"""The parameters of the loop."""

from dataclasses import dataclass

from hexiopt.errors import InputError, quoted


@dataclass(frozen=True)
class LoopSettings:
    """How the loop searches, one rule for all problems.

    `walks`: random walks, whatever the number of threads. `candidates`: those of a walk that make a step. `hot`,
    `cold`: temperatures of the hottest and the coldest walk at first; at last all are cold. A walk accepts one of e
    candidates that are slower by this share of what a pipeline contributes (`Tempering.heats`). `finish`: share of the
    budget for what the arrays do not say, on few GPUs (`share_for_walks`). Raises InputError for values out of range.
    """

    walks: int = 4
    candidates: int = 100
    hot: float = 0.3
    cold: float = 0.004
    finish: float = 0.5

    def __post_init__(self) -> None:
        for name in ("walks", "candidates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
                raise InputError(f"solver.{name}: {quoted(value)} is out of range; state a whole number from 1 on")
        if not 0.0 < self.cold <= self.hot <= 10.0:
            raise InputError(f"solver.cold: {quoted(self.cold)} is out of range; state one above 0, at most solver.hot")
        if not 0.0 <= self.finish < 1.0:
            raise InputError(
                f"solver.finish: {quoted(self.finish)} is out of range; state a fraction from 0 to below 1"
            )

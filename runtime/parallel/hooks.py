"""What stands beside a rank's training: nothing here. An emulation slows a rank down through them."""

from collections.abc import Callable

from torch import Tensor

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.operation import OperationKind
from runtime.mapping.times import StepTimes

Part = Callable[[Tensor], Tensor]


class Hooks:
    """Called by a rank at the moments that its methods name; it goes on when they return. These do nothing."""

    def join(self) -> str | None:
        """Before the rank connects to any other. Returns the network interface to do that by; None: torch's choice."""
        return None

    def times(self, problem: Problem, plan: Plan) -> StepTimes | None:
        """On rank 0: what the plan's operations and messages are expected to take; None where nothing is known."""
        return StepTimes.of_plan(problem, plan)

    def now_s(self) -> float:
        """When an operation begins, by the clock of what follows."""
        return 0.0

    def on_operation(self, began_s: float, kind: OperationKind, chunk: int, part: int | None, num_late: int) -> None:
        """An operation of the rank's layer range `chunk`, or a part of one, has been computed; of gradients of weights
        that of one of `num_late` layers."""

    def first_part(self, chunk: int, number: int, part: Part) -> Part:
        """What to compute in the place of a part of the first forward through a layer range."""
        return part

    def on_optimizer_step(self, began_s: float, share: float) -> None:
        """The optimizer has stepped that share of the rank's elements."""

    def send(self, peer: int, post: Callable[[], None]) -> None:
        """A message is ready, which `post` sends to the rank `peer`."""
        post()

    def finish(self) -> None:
        """All messages of a step must be on their way when this returns."""


NO_HOOKS = Hooks()

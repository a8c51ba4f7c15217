"""hexiopt's own executor, which trains every plan (`docs/training.md`)."""

from collections.abc import Mapping
from typing import Any

from hexiopt.exports.formats import Program, Trainer
from hexiopt.numbers.messages import MESSAGE_PRECISIONS
from hexiopt.own_packages import own_package
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem


class HexiOptFormat(Trainer):
    """hexiopt's executor, which trains every plan."""

    name = "hexiopt"
    target = "hexiopt's executor"
    expresses = "every plan of models that train"
    can_read = False
    recomputes_together = True
    takes_depths = True
    message_precisions = gradient_precisions = MESSAGE_PRECISIONS

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        return {}

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        return True

    def write(self, problem: Problem, plan: Plan) -> Program:
        """Ranks follow the cluster's devices in order, as `runtime/mapping/layout.py` has them."""
        module = f"{own_package('experiments')}.train"
        command = f'-m {module} plan="$HERE/plan.json" train.launch=torchrun hydra.run.dir="$HERE/run"'
        return Program(tuple(sorted(plan.devices())), command)


TRAINER = HexiOptFormat()

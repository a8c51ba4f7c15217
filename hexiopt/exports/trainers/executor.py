"""hexiopt's own executor (`docs/training.md`)."""

from collections.abc import Mapping
from typing import Any

from hexiopt.errors import InputError
from hexiopt.exports.formats import Program, Trainer
from hexiopt.exports.trainable import untrainable
from hexiopt.own_packages import own_package
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem


class HexiOptFormat(Trainer):
    """hexiopt's executor, which trains what `untrainable` lets pass."""

    name = "hexiopt"
    target = "hexiopt's executor"
    expresses = "every plan of models that train"
    can_read = False

    def unsuitable(self, problem: Problem) -> str | None:
        return untrainable(problem.model, problem.workload)

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        return None

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        return {}

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        return True

    def write(self, problem: Problem, plan: Plan) -> Program:
        """Ranks follow the cluster's devices in order, as `runtime/mapping/layout.py` has them."""
        if why := untrainable(problem.model, problem.workload, plan):
            raise InputError(f"export.format: {self.name}: {why}")
        module = f"{own_package('experiments')}.train"
        command = f'-m {module} plan="$HERE/plan.json" train.launch=torchrun hydra.run.dir="$HERE/run"'
        return Program(tuple(sorted(plan.devices())), command)


TRAINER = HexiOptFormat()

"""hexiopt's own executor, which trains every plan (`docs/training.md`)."""

from hexiopt.exports.formats import Program, Trainer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem


def _write(problem: Problem, plan: Plan) -> Program:
    """Ranks follow the cluster's devices in order, as `runtime/mapping/layout.py` has them."""
    command = '-m experiments.train plan="$HERE/plan.json" train.launch=torchrun hydra.run.dir="$HERE/run"'
    return Program(tuple(sorted(plan.devices())), command)


TRAINER = Trainer(
    name="hexiopt",
    target="hexiopt's executor",
    expresses="every plan of models that train",
    preset=lambda problem: {},
    takes_tp=lambda problem, tp: True,
    write=_write,
    recomputes_together=True,
)

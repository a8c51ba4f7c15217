"""What tests of reports share: a priced plan, who solved it, and what a console shows."""

import io

from rich.console import Console, RenderableType

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem

Case = tuple[Problem, Plan, Cost]
SOLVER = {
    "name": "metis",
    "seed": 3,
    "status": "feasible",
    "runtime_s": 2.5,
    "lower_bound_s": 1.0,
    "gap": 0.1,
}


def console_text(renderable: RenderableType, width: int = 100, color: bool = False) -> str:
    """The text of a console so wide."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="truecolor" if color else None).print(renderable)
    return out.getvalue()

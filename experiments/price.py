"""`hexiopt price plan=path/plan.json`: checks a plan file, prices it again and writes the new prediction.

Overrides of `cluster` and `workload` price it on a changed network, batch or profile; `constraints.memory_headroom`
says whether it leaves that share of memory free.
"""

import sys

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError
from experiments.app.reports import show_plan
from hexiopt import price
from hexiopt.cost.cost import memory_violations
from hexiopt.files.plan_file import on_problem
from hexiopt.study.solution import PlacedPlan


def run(job: Job) -> float:
    """Price a plan; returns its step time in seconds. Raises InputError, and NoPlanError where it exceeds memory."""
    where = str(job.config.plan)
    file, problem = job.changed_plan_file()
    plan = PlacedPlan.of(problem, on_problem(file.plan, file.problem, problem, where), file.solver)
    cost = price(problem, plan, where)
    job.write_json("plan.json", plan.to_dict())
    show_plan(job, plan)
    job.show_files("plan.json")
    short = memory_violations(problem, plan, cost)
    if short:
        more = f" (and {len(short) - 1} more stages)" if len(short) > 1 else ""
        raise NoPlanError(f"{where}: {short[0]}{more}; plan again, or give the stage fewer layers")
    return cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["price", *sys.argv[1:]]))

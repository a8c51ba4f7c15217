"""`hexiopt price plan=path/plan.json`: checks a plan file, prices it again and writes the new prediction.

Overrides of `cluster` and `workload` price it on a changed network, batch or profile; `constraints.memory_headroom`
says whether it leaves that share of memory free.
"""

import sys

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError
from experiments.app.reports import show_plan
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile, on_problem, plan_file_to_dict
from hexiopt.plan.check import check
from hexiopt.report.facts import PlanFacts


def run(job: Job) -> float:
    """Price a plan; returns its step time in seconds. Raises InputError, and NoPlanError where it exceeds memory."""
    where = str(job.config.plan)
    read, problem = job.changed_plan_file()
    facts = price(PlanFile(problem, on_problem(read.plan, read.problem, problem, where), read.solver), where)
    plan, cost = facts.plan, facts.cost
    job.write_json("plan.json", plan_file_to_dict(problem, plan, cost, facts.solver))
    show_plan(job, facts)
    job.show_files("plan.json")
    short = violations(problem, plan, cost)
    if short:
        more = f" (and {len(short) - 1} more stages)" if len(short) > 1 else ""
        raise NoPlanError(f"{job.config.plan}: {short[0]}{more}; plan again, or give the stage fewer layers")
    return cost.step_time_s


def price(file: PlanFile, where: str) -> PlanFacts:
    """A plan with its price; it may exceed memory. Raises InputError naming the first other rule that it breaks."""
    broken = check(file.problem, file.plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(f"{where}: {broken[0]}{more}; correct the plan, or plan again")
    pricer = PlanPricer(file.problem)
    return PlanFacts(file.problem, file.plan, pricer.price(file.plan), file.solver, pricer)


if __name__ == "__main__":
    sys.exit(main(["price", *sys.argv[1:]]))

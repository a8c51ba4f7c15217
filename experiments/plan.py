"""`hexiopt plan cluster=small_mixed model=llama2_7b`: finds a plan, then prints, writes and draws it."""

import sys

from experiments.app.common import Job, bounded, search, solver_of
from experiments.app.reports import plan_reports, show_plan, write_plan
from experiments.cli import main


def run(job: Job) -> float:
    """Find a plan; returns its step time in seconds. Raises InputError and NoPlanError."""
    problem = job.problem
    result = search(job, solver_of(job), problem)
    (result,) = bounded(job, [result], problem)
    plan, cost, made_by = write_plan(job, problem, result)
    written = plan_reports(job, problem, plan, cost, made_by, result.trajectory) if job.pictures else []
    show_plan(job, problem, plan, cost, made_by)
    job.show_files("plan.json", *written)
    return cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

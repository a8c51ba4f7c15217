"""`hexiopt plan cluster=small_mixed model=llama2_7b`: finds a plan, prints it, writes and draws it."""

import sys

from experiments.app.common import Job, bounded, found, search, solver_of
from experiments.app.reports import plan_reports, show_plan
from experiments.cli import main
from hexiopt.readers.plan_file import plan_file_to_dict, solver_to_dict


def run(job: Job) -> float:
    """Find a plan; returns its step time in seconds. Raises InputError and NoPlanError."""
    problem = job.problem
    result = search(job, solver_of(job), problem)
    (result,) = bounded(job, [result], problem)
    plan, cost = found(result)
    made_by = solver_to_dict(result)
    job.write_json("plan.json", plan_file_to_dict(problem, plan, cost, made_by))
    written = plan_reports(job, problem, plan, cost, made_by, result.trajectory) if job.pictures else []
    show_plan(job, problem, plan, cost, made_by)
    job.show_files("plan.json", *written)
    return cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

"""`hexiopt plan cluster=small_mixed model=llama2_7b`: finds a plan, then prints, writes and draws it."""

import sys
import time

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, search_and_bound, solver_of
from experiments.app.reports import plan_reports, show_plan, write_plan
from hexiopt.report.style import seconds


_WRITTEN = ("plan.json", "plan.png", "timeline.json", "report.html")


def run(job: Job) -> float:
    """Find a plan; returns its step time in seconds. Raises InputError and NoPlanError."""
    problem = job.problem
    result = search_and_bound(job, solver_of(job), problem)
    job.drop(*_WRITTEN)
    plan, cost, made_by = write_plan(job, problem, result)
    show_plan(job, problem, plan, cost, made_by)
    written = []
    if job.pictures:
        began_s = time.perf_counter()
        written = plan_reports(job, problem, plan, cost, made_by, result.trajectory)
        job.show("", Text(f"pictures drawn in {seconds(time.perf_counter() - began_s)}", "dim"))
    job.show_files("plan.json", *written)
    return cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

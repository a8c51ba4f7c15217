"""`hexiopt explain plan=path/plan.json`, or with cluster= and model= like plan: where every value comes from.

It begins with the ten lines that matter. Tables of the GPU types, the links, the workload's choices and the cost
model's coefficients behind the price of a plan follow, each value with its source, and what binds the time and the
memory of each stage.
"""

import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, plan_of, search
from experiments.app.reports import show_plan
from hexiopt.report.explanation import explanation_tables
from hexiopt.report.table import short_table


def run(job: Job) -> float:
    """Explain a plan file, or the plan found; returns its step time in seconds. Raises like plan and price."""
    plan = job.priced_plan() if job.config.plan else plan_of(search(job, job.problem))
    job.show(short_table(plan.facts), "")
    show_plan(job, plan)
    source = job.config.plan or f"cluster={job.choices.get('cluster')}"
    for title, table in explanation_tables(plan.facts, source):
        job.show("", Text(title, style="bold"), table)
    return plan.cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))

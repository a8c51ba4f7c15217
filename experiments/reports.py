"""Tables and pictures of a plan, drawn by `hexiopt.report`, into a job's folder and onto the terminal."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common import Job
from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.result import Point


def show_plan(job: Job, problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any]) -> None:
    """Print a plan and what it achieves."""
    if job.in_sweep:
        return
    from hexiopt.report.table import plan_table, summary_table

    job.show(plan_table(problem, plan, cost), "", summary_table(problem, plan, cost, solver))


def plan_reports(
    job: Job,
    problem: Problem,
    plan: Plan,
    cost: Cost,
    solver: Mapping[str, Any],
    trajectory: Sequence[Point] = (),
) -> list[str]:
    """Draw a plan; returns the names of the files written."""
    from hexiopt.report.figure import draw_plan
    from hexiopt.report.html import report_html
    from hexiopt.report.timeline import timeline_events

    job.draw("plan.png", lambda path: draw_plan(problem, plan, cost, path))
    job.write("timeline.json", json.dumps(timeline_events(problem, plan, cost), allow_nan=False))
    command = shlex.join(["hexiopt", job.verb, *job.overrides])
    picture = job.folder / "plan.png"
    page = report_html(problem, plan, cost, picture, solver=solver, trajectory=trajectory, command=command)
    job.write("report.html", page)
    return ["plan.png", "timeline.json", "report.html"]

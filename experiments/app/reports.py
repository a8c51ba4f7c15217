"""Tables and pictures of plans and training runs, written to a job's folder and printed on the terminal."""

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.app.common import Job
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving.result import Point
from hexiopt.study.solution import PlacedPlan

if TYPE_CHECKING:
    from runtime.training.session import Session


def write_plan(job: Job, plan: PlacedPlan, name: str = "plan.json") -> None:
    """Write a plan file. Raises InputError where it cannot be written: then the plan is printed."""
    try:
        job.write_json(name, plan.to_dict())
    except InputError:
        show_plan(job, plan)
        raise


def show_plan(job: Job, plan: PlacedPlan) -> None:
    """Print a plan and its predicted performance."""
    if job.in_sweep:
        return
    from hexiopt.report.table import breakdown_table, plan_table, summary_table

    stages = plan_table(plan.facts, full=job.config.print == "full")
    parts = [] if plan.solver.get("pricer") else [breakdown_table(plan.facts), ""]  # which only our price has
    job.show(stages, "", *parts, summary_table(plan.facts))


def plan_reports(job: Job, plan: PlacedPlan, trajectory: Sequence[Point] = ()) -> list[str]:
    """Draw a plan; returns the names of the files written."""
    from hexiopt.report.figure import draw_plan
    from hexiopt.report.page.html import report_html
    from hexiopt.report.trace import timeline_events

    job.draw("plan.png", lambda path: draw_plan(plan.facts, path))
    job.write("timeline.json", json.dumps(timeline_events(plan.facts), allow_nan=False))
    command = shlex.join(["hexiopt", job.verb, *job.overrides])
    job.write("report.html", report_html(plan.facts, trajectory=trajectory, command=command))
    return ["plan.png", "timeline.json", "report.html"]


def show_training(job: Job, problem: Problem, plan: Plan, session: "Session") -> None:
    """Print and draw the steps of a training run that has been followed, predictions being those for `problem`; does
    nothing where no step has ended."""
    from experiments.reports.measured import MeasuredRank, both_timelines, measured_table
    from experiments.reports.training import draw_training, training_table

    steps, timelines, validations = session.steps, session.timelines, session.validations
    if not steps:
        return
    written = ["metrics.jsonl", "checkpoints"]
    facts, whose = PlacedPlan.of(problem, plan).facts, job.config.train.profile or "the plan's GPUs"
    if timelines and not job.in_sweep:
        ranks = list(map(MeasuredRank.of_event, timelines))
        job.show("", measured_table(facts, ranks, whose))
        job.write("timeline.json", json.dumps(both_timelines(facts, ranks), allow_nan=False))
        written.append("timeline.json")
    if job.pictures:
        job.draw("loss.png", lambda path: draw_training(steps, validations, path))
        written.append("loss.png")
    job.show("", training_table(steps, validations, facts.cost.step_time_s, whose))
    if session.traces:
        written.append("trace")
    job.show_files(*written)
    if session.traces:
        job.show("The traces, one of each process, open in https://ui.perfetto.dev.")

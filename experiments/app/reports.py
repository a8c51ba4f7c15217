"""Tables and pictures of plans and training runs, written to a job's folder and printed on the terminal."""

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.app.common import Job, found
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_file_to_dict, solver_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from hexiopt.solving import Pricer, foreign_name
from hexiopt.solving.result import Point, Result
from hexiopt.study.naming import named_in_order

if TYPE_CHECKING:
    from runtime.training.session import Session


def write_plan(
    job: Job, problem: Problem, result: Result, name: str = "plan.json", pricer: Pricer | None = None
) -> tuple[Plan, Cost, dict[str, Any]]:
    """Write the plan that a search by `pricer`, or by our cost model, has found; returns it, its cost, and the plan
    file's object `solver`.

    Raises NoPlanError where none was found, and InputError where it cannot be written: then it is printed.
    """
    plan, cost = named_in_order(problem, *found(result), pricer)
    made_by = solver_to_dict(result, foreign_name(pricer, problem))
    try:
        job.write_json(name, plan_file_to_dict(problem, plan, cost, made_by))
    except InputError:
        show_plan(job, PlanFacts(problem, plan, cost, made_by))
        raise
    return plan, cost, made_by


def show_plan(job: Job, facts: PlanFacts) -> None:
    """Print a plan and its predicted performance."""
    if job.in_sweep:
        return
    from hexiopt.report.table import breakdown_table, plan_table, summary_table

    stages = plan_table(facts, full=job.config.print == "full")
    parts = [] if facts.solver.get("pricer") else [breakdown_table(facts), ""]  # which only our price has
    job.show(stages, "", *parts, summary_table(facts))


def plan_reports(job: Job, facts: PlanFacts, trajectory: Sequence[Point] = ()) -> list[str]:
    """Draw a plan; returns the names of the files written."""
    from hexiopt.report.figure import draw_plan
    from hexiopt.report.page.html import report_html
    from hexiopt.report.trace import timeline_events

    job.draw("plan.png", lambda path: draw_plan(facts, path))
    job.write("timeline.json", json.dumps(timeline_events(facts), allow_nan=False))
    command = shlex.join(["hexiopt", job.verb, *job.overrides])
    job.write("report.html", report_html(facts, trajectory=trajectory, command=command))
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
    cost, whose = PlanPricer(problem).price(plan), job.config.train.profile or "the plan's GPUs"
    facts = PlanFacts(problem, plan, cost)
    if timelines and not job.in_sweep:
        ranks = list(map(MeasuredRank.of_event, timelines))
        job.show("", measured_table(facts, ranks, whose))
        job.write("timeline.json", json.dumps(both_timelines(facts, ranks), allow_nan=False))
        written.append("timeline.json")
    if job.pictures:
        job.draw("loss.png", lambda path: draw_training(steps, validations, path))
        written.append("loss.png")
    job.show("", training_table(steps, validations, cost.step_time_s, whose))
    if session.traces:
        written.append("trace")
    job.show_files(*written)
    if session.traces:
        job.show("The traces, one of each process, open in https://ui.perfetto.dev.")

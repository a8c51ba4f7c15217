"""`hexiopt import format=megatron file=train.sh cluster=my.yaml`: the layout that somebody runs, priced and drawn, and
what better plans would give.

The rank table `ranks=ranks.tsv` says which GPU each rank has; without it, ranks are the cluster's GPUs in order. A
model is needed (`model=...`) where the file does not state it. Two searches of `solver.time_limit_s` each follow:
within what the same trainer can express, and without limits.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, plan_of, search
from experiments.app.reports import plan_reports, show_plan
from hexiopt import import_plan, price, solver
from hexiopt.cost.cost import memory_violations
from hexiopt.errors import InputError
from hexiopt.exports.formats import Trainer
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import AUTO
from hexiopt.report.style import count, seconds
from hexiopt.study.solution import PlacedPlan


def run(job: Job) -> float:
    """Import a layout; returns its step time in seconds. Raises InputError, and NoPlanError where it exceeds memory."""
    config = job.config
    if config.format is None or config.file is None:
        missing = "format" if config.format is None else "file"
        raise InputError(f"{missing}: is missing; give hexiopt import format=megatron file=train.sh cluster=my.yaml")
    trainer, path = TRAINERS[config.format], Path(config.file)
    plan = import_plan(
        config.format,
        path,
        job.cluster,
        None if config.model is None else job.model,
        config.workload.workload(),
        ranks=config.ranks,
        space=config.plan_space(),
        precedence=_stated_keys(job),
    )
    cost = price(plan.problem, plan, str(path))
    job.write_json("plan.json", plan.to_dict())
    pictures = plan_reports(job, plan) if job.pictures else []
    first, *others = plan.solver["notes"]
    job.show(first, "")
    show_plan(job, PlacedPlan.of(plan.problem, plan, {**plan.solver, "notes": others}, plan.pricer, cost))
    misfits = memory_violations(plan.problem, plan, cost)
    written = ["plan.json", *pictures, *_better(job, trainer, plan, bool(misfits))]
    job.show_files(*written)
    if misfits:
        more = f" (and {count(len(misfits) - 1, 'more stage')})" if len(misfits) > 1 else ""
        raise NoPlanError(f"{path}: {misfits[0]}{more}; if it runs all the same, state the GPUs' memory as measured")
    return cost.step_time_s


def _stated_keys(job: Job) -> frozenset[str]:
    """The keys of the workload that the command line states."""
    keys = (override.lstrip("+").partition("=")[0] for override in job.overrides)
    return frozenset(key.removeprefix("workload.") for key in keys if key.startswith("workload."))


def _better(job: Job, trainer: Trainer, layout: PlacedPlan, misfits: bool) -> list[str]:
    """Plan within what the trainer expresses and without limits, say what either gives, and write and draw the plans.

    Where the layout does not fit, every plan that does is better. The search without limits begins from the plan of the
    one within them, and so is never behind it.
    """
    from hexiopt.report.figure import draw_plan

    step_time_s = layout.cost.step_time_s
    step = seconds(step_time_s)
    lines = [
        f"Yours does not fit ({step} a step if it did); these do:" if misfits else f"This layout takes {step} a step."
    ]
    written = []
    plan: PlacedPlan | None = None
    within = f"within what {trainer.name} expresses (space.preset={trainer.name})"
    problem = _open_problem(job, layout.problem)
    takes_start = solver(job.config.solver.name, **job.config.solver.options()).takes_start
    for name, where, restricted in (("better_same_trainer", within, True), ("better", "without limits", False)):
        try:
            search_problem = restrict(problem, trainer) if restricted else problem
            plan = plan_of(search(job, search_problem, start=plan if takes_start else None))
        except (InputError, NoPlanError) as error:
            lines.append(f"No plan {where}: {error}")
            continue
        if not misfits and plan.cost.step_time_s >= step_time_s:
            lines.append(f"The search found no better plan {where}; give it more time with solver.time_limit_s.")
            continue
        ratio = f": {step_time_s / plan.cost.step_time_s:.2f} × as fast" * (not misfits)
        lines.append(f"The best plan found {where} takes {seconds(plan.cost.step_time_s)}{ratio}.")
        job.write_json(f"{name}.json", plan.to_dict())
        written.append(f"{name}.json")
        if job.pictures:
            job.draw(f"{name}.png", partial(draw_plan, plan.facts))
            written.append(f"{name}.png")
    if misfits and not written:
        lines[0] = f"Yours does not fit ({step} a step if it did)."
    job.show("", *lines)
    return written


def _open_problem(job: Job, problem: Problem) -> Problem:
    """The problem with the choices open that the file made, and not the user."""
    choices: dict[str, Any] = {key: AUTO for key in ("recompute", "schedule") if key not in _stated_keys(job)}
    return replace(problem, workload=replace(problem.workload, **choices))


if __name__ == "__main__":
    sys.exit(main(["import", *sys.argv[1:]]))

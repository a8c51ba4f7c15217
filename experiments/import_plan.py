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
from experiments.app.common import Job, NoPlanError, found, search, solver_of
from experiments.app.reports import plan_reports, show_plan
from experiments.price import price
from hexiopt.cost.cost import Cost, violations
from hexiopt.errors import InputError
from hexiopt.exports.exporting import imported
from hexiopt.exports.formats import ImportedPlan, Trainer
from hexiopt.exports.presets import restricted
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.plan_file import PlanFile, plan_file_to_dict, solver_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import AUTO
from hexiopt.report.facts import PlanFacts
from hexiopt.report.style import count, seconds


def run(job: Job) -> float:
    """Import a layout; returns its step time in seconds. Raises InputError, and NoPlanError where it exceeds memory."""
    config = job.config
    if config.format is None or config.file is None:
        missing = "format" if config.format is None else "file"
        raise InputError(f"{missing}: is missing; give hexiopt import format=megatron file=train.sh cluster=my.yaml")
    trainer, path = TRAINERS[config.format], Path(config.file)
    layout = _imported(job, trainer, path)
    problem, plan = layout.problem, layout.plan
    made_by = {"name": f"{trainer.name} (imported)", "seed": job.config.seed, "notes": list(layout.notes)}
    facts = price(PlanFile(problem, plan, made_by), str(path))
    cost = facts.cost
    job.write_json("plan.json", plan_file_to_dict(problem, plan, cost, made_by))
    pictures = plan_reports(job, facts) if job.pictures else []
    first, *others = layout.notes
    job.show(first, "")
    show_plan(job, replace(facts, solver={**made_by, "notes": others}))
    misfits = violations(problem, plan, cost)
    written = ["plan.json", *pictures, *_better(job, trainer, layout, cost, bool(misfits))]
    job.show_files(*written)
    if misfits:
        more = f" (and {count(len(misfits) - 1, 'more stage')})" if len(misfits) > 1 else ""
        raise NoPlanError(f"{path}: {misfits[0]}{more}; if it runs all the same, state the GPUs' memory as measured")
    return cost.step_time_s


def _imported(job: Job, trainer: Trainer, path: Path) -> ImportedPlan:
    config = job.config
    model = None if config.model is None else job.model
    workload, space = config.workload.workload(), config.plan_space()
    return imported(trainer.name, path, job.cluster, model, workload, space, config.ranks, _stated(job))


def _stated(job: Job) -> frozenset[str]:
    """The keys of the workload that the command line states."""
    keys = (override.lstrip("+").partition("=")[0] for override in job.overrides)
    return frozenset(key.removeprefix("workload.") for key in keys if key.startswith("workload."))


def _better(job: Job, trainer: Trainer, layout: ImportedPlan, cost: Cost, misfits: bool) -> list[str]:
    """Plan within what the trainer expresses and without limits, say what either gives, and write and draw the plans.

    Where the layout does not fit, every plan that does is better. The search without limits begins from the plan of the
    one within them, and so is never behind it.
    """
    from hexiopt.report.figure import draw_plan

    step = seconds(cost.step_time_s)
    lines = [
        f"Yours does not fit ({step} a step if it did); these do:" if misfits else f"This layout takes {step} a step."
    ]
    written = []
    plan: Plan | None = None
    within = f"within what {trainer.name} expresses (space.preset={trainer.name})"
    problem = _open_problem(job, layout.problem)
    for name, where, restrict in (("better_same_trainer", within, True), ("better", "without limits", False)):
        try:
            asked = restricted(problem, trainer) if restrict else problem
            solver = solver_of(job)
            result = search(job, solver, asked, plan if solver.takes_start else None)
            plan, best = found(result)
        except (InputError, NoPlanError) as error:
            lines.append(f"No plan {where}: {error}")
            continue
        if not misfits and best.step_time_s >= cost.step_time_s:
            lines.append(f"The search found no better plan {where}; give it more time with solver.time_limit_s.")
            continue
        ratio = f": {cost.step_time_s / best.step_time_s:.2f} × as fast" * (not misfits)
        lines.append(f"The best plan found {where} takes {seconds(best.step_time_s)}{ratio}.")
        job.write_json(f"{name}.json", plan_file_to_dict(asked, plan, best, solver_to_dict(result)))
        written.append(f"{name}.json")
        if job.pictures:
            job.draw(f"{name}.png", partial(draw_plan, PlanFacts(asked, plan, best)))
            written.append(f"{name}.png")
    if misfits and not written:
        lines[0] = f"Yours does not fit ({step} a step if it did)."
    job.show("", *lines)
    return written


def _open_problem(job: Job, problem: Problem) -> Problem:
    """The problem with the choices open that the file made, and not the user."""
    choices: dict[str, Any] = {key: AUTO for key in ("recompute", "schedule") if key not in _stated(job)}
    return replace(problem, workload=replace(problem.workload, **choices))


if __name__ == "__main__":
    sys.exit(main(["import", *sys.argv[1:]]))

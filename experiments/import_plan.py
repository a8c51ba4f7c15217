"""`hexiopt import format=megatron file=train.sh cluster=my.yaml`: the layout that somebody runs, priced and drawn, and
what better plans would give.

The rank table `ranks=ranks.tsv` says which GPU each rank has; without it, ranks are the cluster's GPUs in order. A
model is needed (`model=...`) where the file does not state it. Two searches of `solver.time_limit_s` each follow:
within what the same trainer can express, and without limits.
"""

import sys
from dataclasses import replace
from pathlib import Path

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, found, search, solver_of
from experiments.app.reports import plan_reports, show_plan
from experiments.price import priced
from hexiopt.cost.cost import Cost, violations
from hexiopt.errors import InputError
from hexiopt.exports.exporting import imported
from hexiopt.exports.formats import ImportedPlan, Trainer
from hexiopt.exports.presets import restricted
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.problem import Problem
from hexiopt.readers.plan_file import PlanFile, plan_file_to_dict, solver_to_dict
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
    made_by = {"name": f"{trainer.name} (imported)", "seed": job.config.seed}
    cost = priced(PlanFile(problem, plan, made_by), str(path))
    job.write_json("plan.json", plan_file_to_dict(problem, plan, cost, made_by))
    pictures = plan_reports(job, problem, plan, cost, made_by) if job.pictures else []
    show_plan(job, problem, plan, cost, made_by)
    for note in layout.notes:
        job.show(f"Note: {note}.")
    written = ["plan.json", *pictures, *_better(job, trainer, problem, cost)]
    job.show_files(*written)
    short = violations(problem, plan, cost)
    if short:
        more = f" (and {count(len(short) - 1, 'more stage')})" if len(short) > 1 else ""
        raise NoPlanError(f"{path}: {short[0]}{more}; if it runs all the same, state the GPUs' memory as measured")
    return cost.step_time_s


def _imported(job: Job, trainer: Trainer, path: Path) -> ImportedPlan:
    config = job.config
    model = None if config.model is None else job.model
    workload, space = config.workload.workload(), config.plan_space()
    keys = (override.lstrip("+").partition("=")[0] for override in job.overrides)
    stated = frozenset(key.removeprefix("workload.") for key in keys if key.startswith("workload."))
    return imported(trainer.name, path, job.cluster, model, workload, space, config.ranks, stated)


def _better(job: Job, trainer: Trainer, problem: Problem, cost: Cost) -> list[str]:
    """Plan within what the trainer expresses and without limits, say what either gives, and write the plans."""
    written, lines = [], [f"This layout takes {seconds(cost.step_time_s)} a step."]
    within = f"within what {trainer.name} expresses (space.preset={trainer.name})"
    free = replace(problem, workload=replace(problem.workload, recompute="auto", schedule="auto"))
    for name, said, restrict in (("better_same_trainer.json", within, True), ("better.json", "without limits", False)):
        try:
            asked = restricted(free, trainer) if restrict else free
        except InputError as error:
            lines.append(f"No plan {within}: {error}")
            continue
        result = search(job, solver_of(job), asked)
        try:
            plan, best = found(result)
        except NoPlanError as error:
            lines.append(f"No plan {said}: {error}")
            continue
        if best.step_time_s >= cost.step_time_s:
            lines.append(f"The search found no better plan {said}; give it more time with solver.time_limit_s.")
            continue
        ratio = cost.step_time_s / best.step_time_s
        lines.append(f"The best plan found {said} takes {seconds(best.step_time_s)}: {ratio:.2f} × as fast.")
        job.write_json(name, plan_file_to_dict(asked, plan, best, solver_to_dict(result)))
        written.append(name)
    job.show("", *lines)
    return written


if __name__ == "__main__":
    sys.exit(main(["import", *sys.argv[1:]]))

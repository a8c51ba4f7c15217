"""`hexiopt replan plan=path/plan.json lost=[a:3]`: new plans for a changed cluster, weighed against what they move.

The cluster changes by `lost` machines or devices; by slow ones, as `slow={a:3: 0.7}` or as the metrics.jsonl of a run
of this plan (`slow=FOLDER`) has them; by `added` machines, in a file or as in the cluster file; by overrides of
`cluster`, or by another cluster with machines of the same names.
"""

import sys
from typing import Any

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, interrupt
from experiments.app.reports import show_plan
from hexiopt import replan
from hexiopt.problem.problem import Problem
from hexiopt.study.replan.changes import relaxations
from hexiopt.study.replan.replan import NoReplacementError, Replanning
from hexiopt.study.solution import PlacedPlan


def run(job: Job) -> float:
    """Plan again; returns the step time of the chosen plan in seconds. Raises InputError, and NoPlanError."""
    file, problem = job.changed_plan_file()
    before = PlacedPlan.of(file.problem, file.plan, file.solver)
    changes = {"lost": job.config.lost, "slow": job.config.slow, "added": job.config.added}
    replanning = replan_job(job, before, problem, **changes)
    best = replanning.best.plan
    job.write_json("plan.json", best.to_dict())
    from hexiopt.report.table import headline
    from hexiopt.study.replan.report import draw_replanning, replanning_table, replanning_to_dict

    job.write_json("replan.json", replanning_to_dict(replanning))
    written = ["plan.json", "replan.json"]
    if job.pictures:
        title = f"Replanned: {headline(best.problem)}"
        job.draw("replan.png", lambda path: draw_replanning(replanning, title, path))
        written.append("replan.png")
    show_plan(job, best)
    job.show("", replanning_table(replanning))
    job.show_files(*written)
    return best.cost.step_time_s


def replan_job(job: Job, before: PlacedPlan, problem: Problem, **changes: Any) -> Replanning:
    """The plans that can replace `before`, searched as configured but for `changes` of the arguments of
    `hexiopt.replan`. Raises InputError, and NoPlanError where there is no plan."""
    config = job.config.replan
    weights = {name: getattr(config, name) for name in ("horizon_steps", "restart_s", "checkpoint_gb_per_s")}
    try:
        with interrupt.caught():
            return replan(before, problem, **(weights | job.search_arguments() | changes))
    except NoReplacementError as error:
        lifted = " ".join(f"constraints.{name}=null" for name in relaxations(problem.space)[-1][1])
        hint = f"; lift what was asked of the plan before: {lifted}" if lifted else ""
        raise NoPlanError(f"{error}{hint}") from None


if __name__ == "__main__":
    sys.exit(main(["replan", *sys.argv[1:]]))

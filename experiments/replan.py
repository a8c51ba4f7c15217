"""`hexiopt replan plan=path/plan.json lost=[a:3]`: new plans for a changed cluster, weighed against what they move.

The cluster changes by `lost` machines or devices; by slow ones, as `slow={a:3: 0.7}` or as the metrics.jsonl of a run
of this plan (`slow=FOLDER`) has them; by `added` machines, in a file or as in the cluster file; by overrides of
`cluster`, or by another cluster with machines of the same names.
"""

import math
import sys

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, listener, solver_of
from experiments.app.reports import show_plan
from hexiopt.files.plan_file import plan_file_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from hexiopt.solving import Budget, Pricer
from hexiopt.solving.result import Result
from hexiopt.study.replan.changes import changed, relaxations
from hexiopt.study.replan.replanning import NoReplacementError, Replanning, replacements
from hexiopt.study.solution import PlacedPlan


def run(job: Job) -> float:
    """Plan again; returns the step time of the chosen plan in seconds. Raises InputError, and NoPlanError."""
    file, problem = job.changed_plan_file()
    before = PlacedPlan.of(file.problem, file.plan, file.solver)
    problem = changed(before, problem, job.config.lost, job.config.slow, job.config.added)
    found = replanned(job, before, problem)
    best = found.best
    job.write_json("plan.json", plan_file_to_dict(problem, best.plan, best.cost, best.plan.solver))
    from hexiopt.report.table import headline
    from hexiopt.study.replan.replanned import draw_replanned, replanned_table, replanned_to_dict

    job.write_json("replan.json", replanned_to_dict(found))
    written = ["plan.json", "replan.json"]
    if job.pictures:
        job.draw("replan.png", lambda path: draw_replanned(found, f"Replanned: {headline(problem)}", path))
        written.append("replan.png")
    show_plan(job, PlanFacts(problem, best.plan, best.cost, best.plan.solver))
    job.show("", replanned_table(found))
    job.show_files(*written)
    return best.cost.step_time_s


def replanned(
    job: Job, before: PlacedPlan, problem: Problem, horizon_steps: float = math.inf, *, restores: bool = False
) -> Replanning:
    """The plans for `problem` that can replace `before`, for the lesser of `replan.horizon_steps` and `horizon_steps`.

    `restores` as in `replacements`. Raises InputError, and NoPlanError where there is no plan.
    """
    config, solver = job.config.replan, solver_of(job)

    def search(start: Plan | None, pricer: Pricer | None, budget: Budget) -> Result:
        with listener(job, problem) as listen:
            return solver.solve(problem, budget, seed=job.config.seed, pricer=pricer, on_progress=listen, start=start)

    steps = min(config.horizon_steps, horizon_steps)
    try:
        return replacements(
            before, problem, search, job.budget, steps, config.restart_s, config.checkpoint_gb_per_s, restores=restores
        )
    except NoReplacementError as error:
        lifted = " ".join(f"constraints.{name}=null" for name in relaxations(problem.space)[-1][1])
        hint = f"; lift what was asked of the plan before: {lifted}" if lifted else ""
        raise NoPlanError(f"{error}{hint}") from None


if __name__ == "__main__":
    sys.exit(main(["replan", *sys.argv[1:]]))

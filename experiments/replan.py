"""`hexiopt replan plan=path/plan.json lost=[a:3]`: new plans for a changed cluster, weighed against what they move.

The cluster changes by `lost` machines or devices, by overrides of `cluster`, or by another cluster with machines of the
same names.
"""

import sys

from experiments.app.cli import main
from experiments.app.common import Job, listener, solver_of
from experiments.app.reports import show_plan
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.readers.plan_file import plan_file_to_dict
from hexiopt.result import Result
from hexiopt.solving import Budget, Pricer
from hexiopt.toolkit.replanning import replacements
from hexiopt.toolkit.solution import PlacedPlan


def run(job: Job) -> float:
    """Plan again; returns the step time of the chosen plan in seconds. Raises InputError, also without a plan."""
    file, problem = job.changed_plan_file("solver", "seed")
    config, lost = job.config.replan, tuple(job.config.lost)
    if lost:
        problem = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *lost)))
    if problem == file.problem:
        raise InputError("replan: nothing has changed; state lost=[machine:index], or override cluster")
    solver, whole = solver_of(job), job.budget
    half = Budget(whole.time_limit_s / 2, None if whole.max_steps is None else max(1, whole.max_steps // 2))

    def search(start: Plan | None, pricer: Pricer | None) -> Result:
        with listener(job, problem) as listen:
            return solver.solve(problem, half, seed=job.config.seed, pricer=pricer, on_progress=listen, start=start)

    before = PlacedPlan.of(file.problem, file.plan, file.solver)
    found = replacements(before, problem, search, config.horizon_steps, config.restart_s, config.checkpoint_gb_per_s)
    best = found.best
    job.write_json("plan.json", plan_file_to_dict(problem, best.plan, best.cost, best.plan.solver))
    from hexiopt.report.table import headline
    from hexiopt.toolkit.replanned import draw_replanned, replanned_table, replanned_to_dict

    job.write_json("replan.json", replanned_to_dict(found))
    written = ["plan.json", "replan.json"]
    if job.pictures:
        job.draw("replan.png", lambda path: draw_replanned(found, f"Replanned: {headline(problem)}", path))
        written.append("replan.png")
    show_plan(job, problem, best.plan, best.cost, best.plan.solver)
    job.show("", replanned_table(found))
    job.show_files(*written)
    return best.cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["replan", *sys.argv[1:]]))

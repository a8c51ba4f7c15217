"""`hexiopt plan cluster=small_mixed model=llama2_7b`: finds a plan, then prints, writes and draws it."""

import sys
import time

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, interrupt, plan_of, search
from experiments.app.reports import plan_reports, show_plan, write_plan
from hexiopt import lower_bound
from hexiopt.errors import InputError
from hexiopt.report.style import seconds
from hexiopt.study.solution import PlacedPlan, Solution

_BOUND_SHARE = 0.25  # of the time limit of search and bound together
_WRITTEN = ("plan.json", "plan.png", "timeline.json", "report.html")


def run(job: Job) -> float:
    """Find a plan; returns its step time in seconds. Raises InputError and NoPlanError."""
    solution = _search_and_bound(job)
    job.drop(*_WRITTEN)
    plan = plan_of(solution)
    write_plan(job, plan)
    show_plan(job, plan)
    written = []
    if job.pictures and "pricer" in plan.solver:
        job.show("", Text("no pictures: they show the phases of our own cost model's price", "dim"))
    elif job.pictures:
        began_s = time.perf_counter()
        written = plan_reports(job, plan, solution.trajectory)
        job.show("", Text(f"pictures drawn in {seconds(time.perf_counter() - began_s)}", "dim"))
    over = _over_the_best_type(job, plan) if job.config.alone else None
    job.show_files("plan.json", *written)
    if over is not None:
        job.show("", over)
    return plan.cost.step_time_s


def _search_and_bound(job: Job) -> Solution:
    """Search, and the lower bound, both within the solver's time limit; the bound gets `bound.time_limit_s` of it, by
    default a quarter.

    Raises InputError also where that leaves no time for the search.
    """
    began_s, limit_s, bound_limit_s = time.perf_counter(), job.config.solver.time_limit_s, job.config.bound.time_limit_s
    if bound_limit_s is None:
        bound_limit_s = _BOUND_SHARE * limit_s
    if bound_limit_s >= limit_s:
        raise InputError(
            f"bound.time_limit_s: {bound_limit_s:g} leaves no time for the search, which shares "
            f"solver.time_limit_s={limit_s:g} with the bound; state less, or a longer solver.time_limit_s"
        )
    solution = search(job, job.problem, time_limit_s=limit_s - bound_limit_s)
    left_s = min(bound_limit_s, limit_s - (time.perf_counter() - began_s))
    if left_s <= 0.0 or solution.plan is None or interrupt.pressed:
        return solution
    return solution.above(lower_bound(job.problem, left_s, pricer=job.pricer))


def _over_the_best_type(job: Job, plan: PlacedPlan) -> str | None:
    """What a mixed cluster gives over the machines of its best GPU type alone, in a sentence; None where there is one
    type. Each type is searched as long as the whole cluster."""
    problem = plan.problem
    machines = [problem.cluster.machines[m] for m in problem.usable_by_machine]
    types = list(dict.fromkeys(machine.gpu.name for machine in machines))
    if len(types) == 1:
        return None
    best = 0.0, ""
    for gpu_type in types:
        others = tuple(machine.name for machine in machines if machine.gpu.name != gpu_type)
        alone = problem.replace(space=problem.space.replace(exclude=(*problem.space.exclude, *others)))
        solution = search(job, alone)
        if solution.cost is not None:
            count = sum(machine.num_gpus for machine in machines if machine.gpu.name == gpu_type)
            best = max(best, (solution.cost.tokens_per_s, f"{count:,} {gpu_type}"))
    tokens_per_s = plan.cost.tokens_per_s
    together = f"Together the {len(problem.usable_devices):,} GPUs process {tokens_per_s:,.0f} tokens/s"
    if not best[1]:
        return f"{together}; found no plan for any of their {len(types)} types alone."
    ratio = tokens_per_s / best[0]
    return f"{together}, {ratio:.2f} × as many as the {best[1]}, the best of their types, alone ({best[0]:,.0f})."


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

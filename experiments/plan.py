"""`hexiopt plan cluster=small_mixed model=llama2_7b`: finds a plan, then prints, writes and draws it."""

import sys
import time
from dataclasses import replace

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, listener, search_and_bound, solver_of
from experiments.app.reports import plan_reports, show_plan, write_plan
from hexiopt.cost.cost import Cost
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from hexiopt.report.style import seconds

_WRITTEN = ("plan.json", "plan.png", "timeline.json", "report.html")


def run(job: Job) -> float:
    """Find a plan; returns its step time in seconds. Raises InputError and NoPlanError."""
    problem = job.problem
    solver = solver_of(job)
    result = search_and_bound(job, solver, problem)
    job.drop(*_WRITTEN)
    judge = solver.judge(problem)
    plan, cost, made_by = write_plan(job, problem, result, pricer=judge)
    facts = PlanFacts(problem, plan, cost, made_by, judge)
    show_plan(job, facts)
    written = []
    if job.pictures and "pricer" in made_by:
        job.show("", Text("no pictures: they show the phases of our own cost model's price", "dim"))
    elif job.pictures:
        began_s = time.perf_counter()
        written = plan_reports(job, facts, result.trajectory)
        job.show("", Text(f"pictures drawn in {seconds(time.perf_counter() - began_s)}", "dim"))
    over = _over_the_best_type(job, problem, cost) if job.config.alone else None
    job.show_files("plan.json", *written)
    if over is not None:
        job.show("", over)
    return cost.step_time_s


def _over_the_best_type(job: Job, problem: Problem, cost: Cost) -> str | None:
    """What a mixed cluster gives over the machines of its best GPU type alone, in a sentence; None where there is one
    type. Each type is searched as long as the whole cluster."""
    machines = [problem.cluster.machines[m] for m in problem.usable_by_machine]
    types = list(dict.fromkeys(machine.gpu.name for machine in machines))
    if len(types) == 1:
        return None
    best = 0.0, ""
    for own in types:
        others = tuple(machine.name for machine in machines if machine.gpu.name != own)
        alone = replace(problem, space=problem.space.replace(exclude=(*problem.space.exclude, *others)))
        with listener(job, alone) as listen:
            found = solver_of(job).solve(alone, job.budget, seed=job.config.seed, on_progress=listen)
        if found.cost is not None:
            count = sum(machine.num_gpus for machine in machines if machine.gpu.name == own)
            best = max(best, (found.cost.tokens_per_s, f"{count:,} {own}"))
    together = f"Together the {len(problem.usable_devices):,} GPUs process {cost.tokens_per_s:,.0f} tokens/s"
    if not best[1]:
        return f"{together}; found no plan for any of their {len(types)} types alone."
    ratio = cost.tokens_per_s / best[0]
    return f"{together}, {ratio:.2f} × as many as the {best[1]}, the best of their types, alone ({best[0]:,.0f})."


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))

"""`hexiopt compare 'compare.solvers=[random,hexiscale]' cluster=... model=...`: solvers on one problem."""

import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, bound_limit_s, bounded, interrupt, listener, solvers_of
from experiments.app.reports import write_plan
from hexiopt.study.comparing import each_result


def run(job: Job) -> float:
    """Run the solvers one after the other with the same budget each, and write the best plan; returns its step time in
    seconds.

    A solver whose plan breaks a rule, that does not take the problem, or that crashes has a row that says so, and is
    not ranked; the others' results stay. Raises InputError, also where no solver takes the problem, and NoPlanError
    where none finds a plan.
    """
    problem = job.problem
    solvers = [(solver.name, solver) for solver in solvers_of(job, job.config.compare.solvers)]
    with listener(job, problem) as listen:
        results = list(each_result(problem, solvers, job.budget, [job.config.seed], listen, interrupt))
    judge = solvers[0][1].judge(problem)
    results = bounded(results, problem, bound_limit_s(job), judge)
    if all(result.plan is None for result in results):
        said = (f"{result.solver} ({result.status}): {result.reason or 'found no plan'}" for result in results)
        raise NoPlanError(f"no plan: {'; '.join(said)}")
    from hexiopt.report.compared.comparison import comparison_table, operators_table, restricted_bounds
    from hexiopt.report.compared.comparison_frames import comparison_frame, operators_frame
    from hexiopt.report.facts import PlanFacts
    from hexiopt.report.notes import plan_notes
    from hexiopt.report.table import headline

    job.drop("plan.json", "comparison.csv", "comparison.png", "operators.csv")
    best = min(results, key=lambda result: result.objective)
    facts = PlanFacts(problem, *write_plan(job, problem, best, pricer=judge))
    job.write("comparison.csv", comparison_frame(results).to_csv())
    written = ["plan.json", "comparison.csv"]
    if any(result.operators for result in results):
        job.write("operators.csv", operators_frame(results).to_csv())
        written.append("operators.csv")
    if job.pictures:
        from hexiopt.report.compared.comparison import draw_comparison

        job.draw("comparison.png", lambda path: draw_comparison(results, headline(problem), path))
        written.append("comparison.png")
    job.show(headline(problem), "", comparison_table(results), *map(Text, restricted_bounds(results)))
    if job.config.compare.operators:
        job.show("", operators_table(results))
    job.show(*(Text(f"note: {note}", "yellow") for note in plan_notes(facts)))
    job.show_files(*written)
    return best.objective


if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))

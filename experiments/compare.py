"""`hexiopt compare 'compare.solvers=[random,hexiscale]' cluster=... model=...`: solvers on one problem."""

import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, interrupt, plan_of, solvers_of
from experiments.app.compile import compile_once
from experiments.app.reports import write_plan
from hexiopt import compare


def run(job: Job) -> float:
    """Run the solvers one after the other with the same budget each, and write the best plan; returns its step time in
    seconds.

    A solver whose plan breaks a rule, that does not take the problem, or that crashes has a row that says so, and is
    not ranked; the others' results stay. Raises InputError, also where no solver takes the problem, and NoPlanError
    where none finds a plan.
    """
    problem, config = job.problem, job.config
    solvers = solvers_of(job, config.compare.solvers)
    compile_once()
    with interrupt.caught():
        comparison = compare(
            problem,
            solvers,
            [config.seed],
            config.solver.time_limit_s,
            config.solver.max_steps,
            pricer=job.pricer,
            bound_time_limit_s=config.bound.time_limit_s,
            progress=job.progress,
        )
    results = comparison.results
    if all(result.plan is None for result in results):
        why = (f"{result.solver} ({result.status}): {result.reason or 'found no plan'}" for result in results)
        raise NoPlanError(f"no plan: {'; '.join(why)}")
    from hexiopt.report.compared.comparison import comparison_table, operators_table, restricted_bounds
    from hexiopt.report.table import headline

    job.drop("plan.json", "comparison.csv", "comparison.png", "operators.csv")
    write_plan(job, plan_of(comparison.best))
    job.write("comparison.csv", comparison.to_csv())
    written = ["plan.json", "comparison.csv"]
    if any(result.operators for result in results):
        job.write("operators.csv", comparison.operators().to_csv())
        written.append("operators.csv")
    if job.pictures:
        from hexiopt.report.compared.comparison import comparison_figure
        from hexiopt.report.panels.canvas import save

        job.draw("comparison.png", lambda path: save(comparison_figure(results, headline(problem)), path))
        written.append("comparison.png")
    plans = f"Gap: to the lower bound of {problem.plans_in_words}."
    bounds = [plans] * any(result.bound_s for result in results) + restricted_bounds(results)
    job.show(headline(problem), "", comparison_table(results), *map(Text, bounds))
    if config.compare.operators:
        job.show("", operators_table(results))
    job.show(*(Text(f"note: {note}", "yellow") for note in comparison.best.notes))
    job.show_files(*written)
    return comparison.best.objective


if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))

"""`hexiopt compare 'compare.solvers=[random,hexiscale]' cluster=... model=...`: solvers on one problem."""

import sys

from rich.text import Text

from experiments.app.common import Job, NoPlanError, bounded, interrupt, search, solvers_of
from experiments.cli import main
from hexiopt.referee import InvalidPlanError
from hexiopt.result import Result


def run(job: Job) -> float:
    """Run the solvers one after the other with the same budget each; returns the least step time in seconds.

    A solver whose plan breaks a rule is marked `invalid` and not ranked. Raises InputError, and NoPlanError
    where no solver finds a plan.
    """
    problem = job.problem
    results: list[Result] = []
    for solver in solvers_of(job, job.config.compare.solvers):
        try:
            results.append(search(job, solver, problem))
        except InvalidPlanError as invalid:
            results.append(invalid.result)
        if interrupt.pressed:
            break
    results = bounded(job, results, problem)
    if all(result.plan is None for result in results):
        said = (f"{result.solver} ({result.status}): {result.reason or 'found no plan'}" for result in results)
        raise NoPlanError(f"no plan: {'; '.join(said)}")
    from hexiopt.report.comparison import comparison_csv, comparison_table, operators_csv, restricted_bounds
    from hexiopt.report.table import headline

    job.write("comparison.csv", comparison_csv(results))
    written = ["comparison.csv"]
    if any(result.operators for result in results):
        job.write("operators.csv", operators_csv(results))
        written.append("operators.csv")
    if job.pictures:
        from hexiopt.report.comparison import draw_comparison

        job.draw("comparison.png", lambda path: draw_comparison(results, headline(problem), path))
        written.append("comparison.png")
    job.show(headline(problem), "", comparison_table(results), *map(Text, restricted_bounds(results)))
    job.show_files(*written)
    return min(result.objective for result in results)


if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))

"""`hexiopt whatif cluster=... model=... whatif.prices=FILE`: what other machines and links would give, and cost.

Every alternative is searched with the same solver and budget. The same command with the same `hydra.run.dir` resumes:
plans that are there already are kept.
"""

import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, bound_limit_s, solver_of
from hexiopt.files.price_list import prices_for
from hexiopt.report.compared.tradeoff import draw_png
from hexiopt.study.alternatives import alternatives, priced
from hexiopt.study.whatif import SearchSetup, planned, processes_for

_FOLDER = "alternatives"


def run(job: Job) -> float:
    """Plan the alternatives; returns the step time in seconds of the cluster as it is.

    Raises InputError, NoPlanError where no alternative has a plan, and KeyboardInterrupt after Ctrl-C.
    """
    config, solver = job.config.whatif, job.config.solver
    prices = prices_for(job.problem, config.prices)
    found = alternatives(priced(job.problem, prices), prices, config.factor, config.wishes)
    processes = processes_for(solver_of(job).capabilities, config.processes)
    search = SearchSetup(solver.name, solver.options(), job.budget, job.config.seed, job.config.pricer)
    shown, again = False if job.in_sweep else None, f"hexiopt whatif ... hydra.run.dir={job.folder}"
    result = planned(found, search, job.folder / _FOLDER, processes, bound_limit_s(job), shown, again)
    if all(option.plan is None for option in result.options):
        raise NoPlanError("no alternative has a plan; hexiopt fit says what would fit")
    job.write("whatif.csv", result.to_csv())
    written = ["whatif.csv"]
    if job.pictures:
        job.draw("whatif.png", lambda path: draw_png(result.plot(), path))
        written.append("whatif.png")
    job.show(Text(str(result)))
    job.show_files(*written, _FOLDER)
    return result.options[0].step_time_s


if __name__ == "__main__":
    sys.exit(main(["whatif", *sys.argv[1:]]))

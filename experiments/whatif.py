"""`hexiopt whatif cluster=... model=... whatif.prices=FILE`: what other machines and links would give, and cost.

Every alternative is searched with the same solver and budget. The same command with the same `hydra.run.dir` resumes:
plans that are there already are kept.
"""

import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError
from hexiopt import what_if
from hexiopt.report.panels.canvas import save

_FOLDER = "alternatives"


def run(job: Job) -> float:
    """Plan the alternatives; returns the step time in seconds of the cluster as it is.

    Raises InputError, NoPlanError where no alternative has a plan, and KeyboardInterrupt after Ctrl-C.
    """
    config = job.config.whatif
    result = what_if(
        job.problem,
        prices=config.prices,
        factor=config.factor,
        take=config.take,
        add=config.add,
        pricer=job.pricer,
        folder=job.folder / _FOLDER,
        bound_time_limit_s=job.config.bound.time_limit_s,
        processes=config.processes,
        caller=f"hexiopt whatif ... hydra.run.dir={job.folder}",
        **job.search_arguments(),
    )
    if all(option.plan is None for option in result.options):
        raise NoPlanError("no alternative has a plan; hexiopt fit says what would fit")
    job.write("whatif.csv", result.to_csv())
    written = ["whatif.csv"]
    if job.pictures:
        job.draw("whatif.png", lambda path: save(result.plot(), path))
        written.append("whatif.png")
    job.show(Text(str(result)))
    job.show_files(*written, _FOLDER)
    return result.options[0].step_time_s


if __name__ == "__main__":
    sys.exit(main(["whatif", *sys.argv[1:]]))

"""`hexiopt fit cluster=... model=...`: what fits in memory, on the whole cluster and on each GPU type alone.

The solver answers each question within its budget, `solver.time_limit_s` and `solver.max_steps`. It writes `fit.csv`,
and for every limit the plan that proves it, a plan file that `hexiopt price` checks.
"""

import re
import sys

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, interrupt
from hexiopt import fit


def run(job: Job) -> float:
    """Say what fits; returns the step time in seconds of a plan for the problem as asked.

    Raises InputError, and NoPlanError where the problem does not fit the whole cluster.
    """
    with interrupt.caught():
        result = fit(job.problem, precision=job.config.fit.precision, pricer=job.pricer, **job.search_arguments())
    job.write("fit.csv", result.to_csv())
    written = ["fit.csv"]
    for fitting in result.fittings:
        plans = {limit.quantity: limit.plan for limit in fitting.limits} | {"micro_batch": fitting.micro_batch_plan}
        for quantity, plan in plans.items():
            if plan is not None:
                written.append(re.sub(r"[^\w.-]", "_", f"{fitting.devices}-{quantity}.json"))
                job.write_json(written[-1], plan.to_dict())
    job.show(Text(str(result)))
    job.show_files(*written)
    asked = result.fittings[0]
    if asked.plan is None:
        raise NoPlanError(f"{asked.fits}: {asked.reason}")
    return asked.plan.cost.step_time_s


if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))

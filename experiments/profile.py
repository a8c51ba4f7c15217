"""`hexiopt profile`: measures this machine's GPUs (or its CPU) and links, and writes them as a cluster file.

Several machines and the links between them: `torchrun --nnodes=... --nproc-per-node=... -m experiments.profile`.
"""

import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import FailedError, Job
from hexiopt.errors import InputError
from hexiopt.files.cluster_yaml import read_open_cluster

if TYPE_CHECKING:
    from experiments.lab.profile.points import Measurement

FILE, POINTS = "cluster.yaml", "profile.json"


def run(job: Job) -> float:
    """Measure and write. Raises InputError, and FailedError where a process ends too early."""
    if find_spec("torch") is None:
        raise InputError("profile: needs torch; install hexiopt[train]")
    from experiments.lab.profile.local import MeasuringFailedError, measure_here
    from experiments.lab.profile.rank import Request, measure
    from experiments.lab.profile.result import check_base
    from experiments.reports.progress import MeasuringProgress
    from runtime.launch.torchrun import torchrun_place

    config, place = job.config.profile, torchrun_place()
    base = None if config.base is None else read_open_cluster(config.base)
    request = Request(config.seconds, config.precision, config.processes, config.machine)
    if place is not None and config.processes is not None:
        raise InputError("profile.processes: does not apply under torchrun; state its --nproc-per-node")
    quiet = job.in_sweep if place is None else place.rank > 0
    conclude, check = partial(_conclude, job, base), partial(check_base, base)
    try:
        with MeasuringProgress(quiet=quiet) as tell:
            if place is not None:
                measure(request, place, tell, conclude, check)
                return float("nan")
            measured = measure_here(request, tell, check)
    except MeasuringFailedError as error:
        raise FailedError(str(error)) from None
    conclude(measured)
    return float("nan")


def _conclude(job: Job, base: Mapping[str, Any] | None, measured: "Measurement") -> None:
    """Write what was measured, and print it."""
    from experiments.lab.profile.result import result_of
    from experiments.lab.profile.summary import summary_tables
    from hexiopt.report.tabular import plain_table

    result = result_of(measured, job.config.profile.name, base)
    content = result.text(f"Written by hexiopt profile; {POINTS} has every measured point.")
    job.write_json(POINTS, measured.to_dict())
    job.write(FILE, content)
    for title, header, rows in summary_tables(measured, result):
        job.show("", Text(title, style="bold"), plain_table(header, rows))
    for whose, key in result.unknowns():
        job.show(f"still unknown: {key} ({whose})")
    job.show_files(FILE, POINTS)


if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))

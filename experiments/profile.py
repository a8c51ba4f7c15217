"""`hexiopt profile`: measures this machine's GPUs (or its CPU) and links, and writes them as a cluster file.

Several machines, whose links are measured too: `torchrun --nnodes=... --nproc-per-node=... -m experiments.profile`.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.text import Text

from experiments.app.common import FailedError, Job
from experiments.cli import main
from hexiopt.errors import InputError
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.readers.cluster_yaml import cluster_text, read_open_cluster, unknowns
from hexiopt.reading import Section

if TYPE_CHECKING:
    from runtime.measure.points import Device, Measurement

FILE, POINTS = "cluster.yaml", "profile.json"


def run(job: Job) -> float:
    """Measure and write. Raises InputError, FailedError where a process ends too early."""
    if find_spec("torch") is None:
        raise InputError("profile: needs torch; install hexiopt[train]")
    from hexiopt.report.measuring import MeasuringProgress
    from runtime.launch.torchrun import torchrun_place
    from runtime.measure.local import MeasuringFailedError, measured_here
    from runtime.measure.rank import Request, measure
    from runtime.measure.result import check_base

    config = job.config.profile
    base = None if config.base is None else read_open_cluster(config.base)
    request = Request(config.seconds, config.precision, config.processes, config.machine)

    def check(devices: Sequence["Device"]) -> None:
        if base is not None:
            check_base(base, devices)

    def conclude(measured: "Measurement") -> None:
        _conclude(job, measured, base)

    place = torchrun_place()
    if place is not None:
        if config.processes is not None:
            raise InputError("profile.processes: does not apply under torchrun; state its --nproc-per-node")
        with MeasuringProgress(quiet=place.rank > 0) as tell:
            measure(request, place, tell, conclude, check)
        return float("nan")
    try:
        with MeasuringProgress(quiet=job.in_sweep) as tell:
            measured = measured_here(request, tell, check)
    except MeasuringFailedError as error:
        raise FailedError(str(error)) from None
    conclude(measured)
    return float("nan")


def _conclude(job: Job, measured: "Measurement", base: Mapping[str, Any] | None) -> None:
    """Write what was measured, and print it."""
    from hexiopt.report.measuring import rows_table
    from runtime.measure.result import result_of
    from runtime.measure.summary import link_rows, type_rows

    result = result_of(measured, job.config.profile.name, base)
    open_keys = list(unknowns(result.cluster))
    if not open_keys:
        cluster_from_section(Section(result.cluster, FILE))
    head = [f"Written by hexiopt profile; every point measured stands in {POINTS}."]
    if open_keys:
        head.append("null is what was not measured.")
    content = cluster_text(result.cluster, head, {})
    job.write_json(POINTS, {"format": "hexiopt.profile", "version": 1, **measured.to_dict()})
    job.write(FILE, content)
    for one in result.types:
        title = Text(f"{one.name}: {len(one.ranks)} device(s), in {one.precision}", style="bold")
        job.show("", title, rows_table(("", "measured", "catalogue"), type_rows(one)))
    if result.links:
        table = rows_table(("Link", "GB/s", "Latency, µs"), link_rows(measured, result))
        job.show("", Text("Links", style="bold"), table)
    for whose, key in open_keys:
        job.show(f"still unknown: {key} ({whose})")
    job.show_files(FILE, POINTS)


if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))

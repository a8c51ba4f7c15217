"""`hexiopt profile`: measures this machine's GPUs (or its CPU) and links, and writes them as a cluster file.

Several machines, whose links are measured too: `torchrun --nnodes=... --nproc-per-node=... -m experiments.profile`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from experiments.cli import main
from experiments.common import FailedError, Job
from hexiopt.calibration.gpus import Efficiency
from hexiopt.errors import InputError
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.readers.cluster_yaml import cluster_text, read_open_cluster, unknowns
from hexiopt.reading import Section
from hexiopt.units import GB, GIB, MICROSECOND, TFLOP

if TYPE_CHECKING:
    from runtime.measure.points import Device
    from runtime.measure.rank import Measured, Place
    from runtime.measure.result import Result
    from runtime.measure.types import Type

FILE, POINTS = "cluster.yaml", "profile.json"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHOWN = 40  # links in the table


def run(job: Job) -> float:
    """Measure and write. Raises InputError, FailedError where a process ends too early."""
    if find_spec("torch") is None:
        raise InputError("profile: needs torch; install hexiopt[train]")
    from hexiopt.report.measuring import MeasuringProgress
    from runtime.measure.local import MeasuringFailedError, measured_here
    from runtime.measure.rank import Request, measure
    from runtime.measure.result import check_base

    config = job.config.profile
    base = None if config.base is None else read_open_cluster(config.base)
    request = Request(config.seconds, config.precision, config.processes, config.machine)

    def check(devices: Sequence["Device"]) -> None:
        if base is not None:
            check_base(base, devices)

    def conclude(measured: "Measured") -> None:
        _conclude(job, measured, base)

    place = _place()
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


def _place() -> "Place | None":
    """Which process of torchrun's this is; None where torchrun has not started it."""
    from runtime.measure.rank import Place

    if not all(key in os.environ for key in _TORCHRUN):
        return None
    rank, size, local, num_local = (int(os.environ[key]) for key in _TORCHRUN[:4])
    return Place(rank, size, local, num_local, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")


def _conclude(job: Job, measured: "Measured", base: Mapping[str, Any] | None) -> None:
    """Write what was measured, and print it."""
    from runtime.measure.result import result_of

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
        devices = f"{len(one.ranks)} device(s), in {one.precision}"
        job.show(
            "", Text(f"{one.name}: {devices}", style="bold"), _table(("", "measured", "catalogue"), type_rows(one))
        )
    if result.links:
        header = ("Link", "GB/s", "Latency, µs")
        job.show("", Text("Links", style="bold"), _table(header, link_rows(measured, result)))
    for whose, key in open_keys:
        job.show(f"still unknown: {key} ({whose})")
    job.show_files(FILE, POINTS)


def type_rows(one: "Type") -> Iterator[tuple[str, str, str]]:
    """What was measured of a type, beside the catalogue's."""
    listed, entry = one.listed, one.entry
    usable = "" if listed is None else f"{listed.usable_memory_bytes / GIB:.1f} GiB"
    yield "usable memory", f"{entry['usable_memory_gib']:.1f} GiB", usable
    of_peak = "the largest rate" if listed is None else "as in the catalogue"
    yield f"peak in {one.precision}", f"{one.rates.flops_per_s / TFLOP:.4g} TFLOPS ({of_peak})", ""
    yield "memory bandwidth", f"{one.rates.bytes_per_s / GB:.4g} GB/s ({of_peak})", ""
    words: dict[str, Callable[[Efficiency], str]] = {
        "largest GEMM": lambda e: f"{e.gemm_max:.3f} of the peak",
        "GEMM of half that": lambda e: f"{e.gemm_half_flops / 1e9:.3g} GFLOP",
        "attention": lambda e: f"{e.attention_max:.3f} of the peak",
        "memory-bound work": lambda e: f"{e.memory_max:.3f} of the bandwidth",
        "least operator": lambda e: f"{e.launch_s / MICROSECOND:.3g} µs",
    }
    for name, say in words.items():
        yield name, say(one.efficiency), "" if listed is None else say(listed.efficiency)


def link_rows(measured: "Measured", result: "Result") -> Iterator[tuple[str, str, str]]:
    """Every link measured, and the links that collectives behave as if they had."""
    from runtime.measure.fit import fit_ring
    from runtime.measure.points import Point, of_kind

    names = [device.name for device in measured.devices]
    pairs = list(result.links.items())
    for (a, b), link in pairs[:_SHOWN]:
        yield f"{names[a]} to {names[b]}", f"{link.bytes_per_s / GB:.4g}", f"{link.latency_s / MICROSECOND:.4g}"
    if len(pairs) > _SHOWN:
        yield f"and {len(pairs) - _SHOWN:,} more", "", ""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in of_kind(measured.points, "all_gather", "reduce_scatter"):
        groups.setdefault(point.of, []).append(point)
    for of, points in list(groups.items())[:_SHOWN]:
        ring = fit_ring(points)
        whose = f"ring of {len(of)} from {of[0]}, by its collectives"
        yield whose, f"{ring.bytes_per_s / GB:.4g}", f"{ring.latency_s / MICROSECOND:.4g}"


def _table(header: tuple[str, str, str], rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))

"""What was measured, as tables for a terminal."""

from collections.abc import Callable, Iterator

from experiments.lab.profile.fit import fit_ring
from experiments.lab.profile.points import MeasuredPoint, Measurement, of_kind
from experiments.lab.profile.result import MeasuredCluster
from experiments.lab.profile.types import Type
from hexiopt.numbers.gpus import Efficiency
from hexiopt.units import GB, GIB, MICROSECOND, TFLOP

_SHOWN_LINKS = 40

Header = tuple[str, str, str]
Rows = Iterator[tuple[str, str, str]]


def summary_tables(measured: Measurement, result: MeasuredCluster) -> Iterator[tuple[str, Header, Rows]]:
    """Title, header and rows of a table for each device type, and of one for the links where any were measured."""
    for device_type in result.types:
        title = f"{device_type.name}: {len(device_type.ranks)} device(s), in {device_type.precision}"
        yield title, ("", "measured", "catalogue"), _type_rows(device_type)
    if result.links:
        yield "Links", ("Link", "GB/s", "Latency, µs"), _link_rows(measured, result)


def _type_rows(device_type: Type) -> Rows:
    """What was measured of a type, beside the catalogue's."""
    listed, entry = device_type.listed, device_type.entry
    usable = "" if listed is None else f"{listed.usable_memory_bytes / GIB:.1f} GiB"
    yield "usable memory", f"{entry['usable_memory_gib']:.1f} GiB", usable
    of_peak = "the largest rate" if listed is None else "as in the catalogue"
    yield f"peak in {device_type.precision}", f"{device_type.rates.flops_per_s / TFLOP:.4g} TFLOPS ({of_peak})", ""
    yield "memory bandwidth", f"{device_type.rates.bytes_per_s / GB:.4g} GB/s ({of_peak})", ""
    words: dict[str, Callable[[Efficiency], str]] = {
        "largest GEMM": lambda e: f"{e.gemm_max:.3f} of the peak",
        "GEMM of half that": lambda e: f"{e.gemm_half_flops / 1e9:.3g} GFLOP",
        "attention": lambda e: f"{e.attention_max:.3f} of the peak",
        "memory-bound work": lambda e: f"{e.memory_max:.3f} of the bandwidth",
        "least operator": lambda e: f"{e.launch_s / MICROSECOND:.3g} µs",
    }
    for name, say in words.items():
        yield name, say(device_type.efficiency), "" if listed is None else say(listed.efficiency)


def _link_rows(measured: Measurement, result: MeasuredCluster) -> Rows:
    """Every link measured, and the links that collectives behave as if they had."""
    names = [device.name for device in measured.devices]
    pairs = list(result.links.items())
    for (a, b), link in pairs[:_SHOWN_LINKS]:
        yield f"{names[a]} to {names[b]}", f"{link.bytes_per_s / GB:.4g}", f"{link.latency_s / MICROSECOND:.4g}"
    if len(pairs) > _SHOWN_LINKS:
        yield f"and {len(pairs) - _SHOWN_LINKS:,} more", "", ""
    groups: dict[tuple[str, ...], list[MeasuredPoint]] = {}
    for point in of_kind(measured.points, "all_gather", "reduce_scatter"):
        groups.setdefault(point.of, []).append(point)
    for of, points in list(groups.items())[:_SHOWN_LINKS]:
        ring = fit_ring(points)
        whose = f"ring of {len(of)} from {of[0]}, by its collectives"
        yield whose, f"{ring.bytes_per_s / GB:.4g}", f"{ring.latency_s / MICROSECOND:.4g}"

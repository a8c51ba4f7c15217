"""How a page writes numbers, tables, hardware and workloads; NaN, a missing value, becomes an empty cell."""

import re
from collections.abc import Iterable
from itertools import groupby

import pandas as pd

from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.style import count
from hexiopt.report.style import seconds as in_seconds
from hexiopt.units import GB, GIB, TFLOP

_CLUSTERS = 12  # listed on a page
_NUMBER = re.compile(r"\**[−+≤-]*\s*\d[\d,.]*\s*(×|%|µs|ms|s|GiB)?\**(\s\(.*\))?|no plan|", re.DOTALL)


def times(ratio: float) -> str:
    """A ratio, `1.21 ×`."""
    return "" if pd.isna(ratio) else f"{ratio:.2f} ×"


def bold(text: str) -> str:
    """The text in bold; nothing where there is none."""
    return f"**{text}**" if text else ""


def tokens(per_s: float) -> str:
    """Tokens per second."""
    return "no plan" if pd.isna(per_s) else f"{per_s:,.0f}"


def share(value: float) -> str:
    """A share in percent."""
    return "" if pd.isna(value) else f"{value:z.1%}"


def change(ratio: float, digits: int = 1) -> str:
    """The change that a ratio states, signed, in percent."""
    return "" if pd.isna(ratio) else f"{ratio - 1:+.{digits}%}".replace("-", "−")


def seconds(value: float) -> str:
    """A time."""
    return "" if pd.isna(value) else in_seconds(value)


def span(values: Iterable[float], spec: str) -> str:
    """The least and the greatest value in the format `spec`, or one of them where both look the same."""
    known = [value for value in values if not pd.isna(value)]
    low, high = format(min(known), spec), format(max(known), spec)
    return low if low == high else f"{low} to {high}"


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table of texts, the index first; columns of numbers are aligned right."""
    cells = table.reset_index()
    numbers = [all(_NUMBER.fullmatch(str(text)) for text in column) for column in cells.to_numpy().T]
    lines = [[str(name) for name in cells], ["--:" if number else "---" for number in numbers]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in cells.to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def hardware(problems: Iterable[Problem]) -> list[str]:
    """One line per name of a cluster: GPUs, with their peaks in the precision of the workload, and the network of the
    first cluster that has it, and how many variants of it there are.
    """
    variants: dict[str, dict[str, None]] = {}
    for problem in problems:
        text = _machines(problem.cluster, problem.workload.precision)
        variants.setdefault(problem.cluster.name, {})[text] = None
    lines = []
    for name, texts in variants.items():
        others = f"; and {count(len(texts) - 1, 'variant')} of it" if len(texts) > 1 else ""
        lines.append(f"`{name}`: {next(iter(texts))}{others}")
    more = len(lines) - _CLUSTERS
    return lines if more <= 0 else [*lines[:_CLUSTERS], f"and {count(more, 'more cluster')} like these"]


def _machines(cluster: Cluster, precision: str) -> str:
    def kind_of(machine: Machine) -> tuple[str, int, float]:
        return machine.gpu.name, machine.num_gpus, machine.intra_bandwidth_bytes_per_s

    parts = []
    for (gpu, size, inside), group in groupby(cluster.machines, key=kind_of):
        machines = list(group)
        flops = machines[0].gpu.peak_flops(precision)
        peak = f"{flops / TFLOP:g} TFLOPS" if flops else f"no {precision}"
        link = f", {inside / GB:g} GB/s inside" if size > 1 else ""
        parts.append(f"{len(machines):,} × ({size} × {gpu}: {peak}, {machines[0].gpu.memory_bytes / GIB:g} GiB{link})")
    rates = sorted({machine.nic_bandwidth_bytes_per_s / GB for machine in cluster.machines})
    return (
        f"{' + '.join(parts)}; {' or '.join(f'{rate:g}' for rate in rates)} GB/s between machines; "
        f"{count(cluster.num_devices, 'GPU')}, {cluster.total_peak_flops(precision) / TFLOP:,.0f} TFLOPS"
    )


def workloads(problems: Iterable[Problem]) -> str:
    """The workloads in words."""
    return "; ".join(
        dict.fromkeys(
            f"{p.workload.global_batch:,} sequences of {p.workload.seq_len:,} tokens in {p.workload.precision}"
            for p in problems
        )
    )

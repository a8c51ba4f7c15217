"""Markdown of a table: its cells, and the conditions under which it was measured."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.style import count
from hexiopt.units import GB, GIB, TFLOP

Cell = str | float | int | None


def markdown_table(rows: Sequence[Mapping[str, str]], left: Sequence[str] = ()) -> str:
    """A table of texts by heading, in the order of the first row; columns named in `left` are flush left."""
    heads = list(rows[0])
    lines = [heads, ["---" if head in left else "--:" for head in heads]]
    lines += [[row[head].replace("|", "\\|") for head in heads] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(ratio: float | None) -> str:
    """A ratio, `1.21 ×`."""
    return "" if ratio is None else f"{ratio:.2f} ×"


def tokens(per_s: float | None, otherwise: str = "no plan") -> str:
    """Tokens per second."""
    return otherwise if per_s is None else f"{per_s:,.0f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{value:.1%}"


def change(ratio: float, digits: int = 1) -> str:
    """What a ratio adds or takes, signed, in percent."""
    return f"{ratio - 1:+.{digits}%}".replace("-", "−")


def span(values: Sequence[float], spec: str) -> str:
    """From the least value to the most, each as the format `spec` has it; one where they look the same."""
    low, high = (format(value, spec) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences, each with a capital."""
    return "\n".join(f"- {sentence[:1].upper()}{sentence[1:]}" for sentence in sentences)


def hardware(clusters: Iterable[Cluster], precision: str) -> list[str]:
    """A line for each cluster: GPUs with their figures, and the network."""
    return list(dict.fromkeys(f"`{cluster.name}`: {_machines(cluster, precision)}" for cluster in clusters))


def _machines(cluster: Cluster, precision: str) -> str:
    def alike(machine: Machine) -> tuple[str, int, float]:
        return machine.gpu.name, machine.num_gpus, machine.intra_bandwidth_bytes_per_s

    parts = []
    for (gpu, size, inside), group in groupby(cluster.machines, key=alike):
        machines = list(group)
        peak = machines[0].gpu.peak_flops(precision) or 0.0
        link = f", {inside / GB:g} GB/s inside" if size > 1 else ""
        parts.append(
            f"{len(machines):,} × ({size} × {gpu}: {peak / TFLOP:g} TFLOPS, "
            f"{machines[0].gpu.memory_bytes / GIB:g} GiB{link})"
        )
    rates = sorted({machine.nic_bandwidth_bytes_per_s / GB for machine in cluster.machines})
    network = " or ".join(f"{rate:g}" for rate in rates)
    total = cluster.total_peak_flops(precision) / TFLOP
    return (
        f"{' + '.join(parts)}; {network} GB/s between machines; {count(cluster.num_devices, 'GPU')}, "
        f"{total:,.0f} TFLOPS"
    )


def workload(problems: Iterable[Problem]) -> str:
    """The workloads in words."""
    found = dict.fromkeys(
        f"{p.workload.global_batch:,} sequences of {p.workload.seq_len:,} tokens in {p.workload.precision}"
        for p in problems
    )
    return "; ".join(found)

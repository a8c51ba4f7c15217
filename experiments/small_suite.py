"""Small mixed problems, and what solvers make of them: `python -m experiments.small_suite`.

    python -m experiments.small_suite --solvers portfolio --time-limit 3          # some two minutes
    python -m experiments.small_suite --solvers exhaustive portfolio --only lab pair_slow
    python -m experiments.small_suite --solvers cp_sat portfolio exhaustive --limits cp_sat=60 exhaustive=30

The problems stand in `data/small_suite.yaml`: 4 to 16 GPUs of two or three types, fast networks and slow ones, models
that fill the memory and models that do not.
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.configurations import named_model
from hexiopt.calibration.gpus import catalogue
from hexiopt.errors import InputError
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.readers.synthetic import intra_bandwidth_gb_per_s
from hexiopt.reading import Section, read_mapping
from hexiopt.report.style import percent, seconds
from hexiopt.result import Result
from hexiopt.solving import Budget
from solvers.registry import baseline, for_any_problem, make_solver, names, small_oracle

NAMES, RIVALS, ORACLES = map(names, (for_any_problem, baseline, small_oracle))

_LATENCY_US = 20.0
_SOLVERS = (*NAMES, *ORACLES, *RIVALS)
_CLOSE = 0.01  # to the best plan, or to the bound
_WORKLOAD = ("global_batch", "seq_len", "precision")


@cache
def small_problems() -> Mapping[str, Problem]:
    """The problems by name."""
    with as_file(files("experiments").joinpath("data/small_suite.yaml")) as file:
        rows: list[dict[str, Any]] = read_mapping(file)["problems"]
    return {row["name"]: _problem(row) for row in rows}


def _problem(row: Mapping[str, Any]) -> Problem:
    model = named_model(row["model"])
    return Problem(
        _cluster(row),
        replace(model, num_layers=row.get("layers", model.num_layers)),
        Workload(**{key: row[key] for key in _WORKLOAD if key in row}),
    )


def _cluster(row: Mapping[str, Any]) -> Cluster:
    known = catalogue()
    machines = []
    for gpu, sizes in row["machines"].items():
        for k, size in enumerate(sizes):
            machine: dict[str, Any] = {"name": f"{gpu}_{k}" if len(sizes) > 1 else gpu, "gpu": gpu, "num_gpus": size}
            if size > 1:
                machine["intra_bandwidth_gb_per_s"] = intra_bandwidth_gb_per_s(known[gpu])
            machines.append(machine)
    network = {"bandwidth_gb_per_s": row["gbit_per_s"] / 8, "latency_us": _LATENCY_US}
    data = {"name": row["name"], "inter_machine": network, "machines": machines}
    return cluster_from_section(Section(data, "small_suite.yaml"))


def tightness(problem: Problem) -> float:
    """Model states of one copy, unsharded, over the usable memory of all devices."""
    workload = problem.workload
    per_param = workload.element_bytes + workload.stored_gradient_bytes + workload.master_bytes
    states = problem.model.num_params * (per_param + workload.optimizer_bytes)
    return states / sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in problem.cluster.machines)


def run(problem: Problem, solver: str, budget: Budget, seed: int) -> Result | str:
    """What a solver finds; the reason in words where it does not take the problem."""
    try:
        return make_solver(solver).solve(problem, budget, seed=seed)
    except InputError as error:
        return str(error)


def suite_table(results: Mapping[str, Mapping[str, Result | str]]) -> Table:
    """Per problem and solver, what was found; `results` by problem and solver."""
    table = Table(title="step times of small mixed problems; + is over the best of the row", title_justify="left")
    left = ("problem", "GPUs", "model", "solver", "status")
    for name in ("problem", "GPUs", "model", "Gbit/s", "states", "solver", "step time", "+", "status", "gap", "search"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for name, found in results.items():
        problem = small_problems()[name]
        best_s = min((result.objective for result in _solved(found.values())), default=float("inf"))
        about = [name, _gpus(problem), f"{problem.model.name} ({problem.model.num_layers})", _gbit(problem)]
        about.append(percent(tightness(problem)))
        for solver, result in found.items():
            table.add_row(*about, solver, *_cells(result, best_s))
            about = [""] * len(about)
        table.add_section()
    return table


def _cells(result: Result | str, best_s: float) -> list[str]:
    if isinstance(result, str):
        return ["", "", "refused", "", ""]
    if result.cost is None:
        return ["", "", str(result.status), "", seconds(result.runtime_s)]
    over = result.objective / best_s - 1
    more = f"{over:.2%}" if over > 0 else ""
    return [seconds(result.objective), more, str(result.status), f"{result.gap:.2%}", seconds(result.runtime_s)]


def summary_table(results: Mapping[str, Mapping[str, Result | str]], solvers: Sequence[str]) -> Table:
    """Per solver: problems solved, and proven to 1 %; within 1 % of the best known, and how far over it; the gaps."""
    table = Table(title="per solver", title_justify="left")
    for name in (
        "solver",
        "plans",
        "gap ≤ 1 %",
        "over best ≤ 1 %",
        "over best: mean",
        "worst",
        "gap: mean",
        "worst",
        "search: mean",
    ):
        table.add_column(name, justify="left" if name == "solver" else "right")
    for solver in solvers:
        pairs = [
            (result, min(other.objective for other in _solved(found.values())))
            for found in results.values()
            for result in _solved([found[solver]])
        ]
        if not pairs:
            table.add_row(solver, "0")
            continue
        over = [result.objective / best_s for result, best_s in pairs]
        gaps = [result.gap for result, _ in pairs]
        table.add_row(
            solver,
            str(len(pairs)),
            str(sum(gap <= _CLOSE for gap in gaps)),
            str(sum(ratio <= 1 + _CLOSE for ratio in over)),
            f"{geometric_mean(over) - 1:.2%}",
            f"{max(over) - 1:.2%}",
            f"{sum(gaps) / len(gaps):.2%}",
            f"{max(gaps):.2%}",
            seconds(sum(result.runtime_s for result, _ in pairs) / len(pairs)),
        )
    return table


def _solved(found: Iterable[Result | str]) -> list[Result]:
    return [result for result in found if isinstance(result, Result) and result.cost is not None]


def _gpus(problem: Problem) -> str:
    machines = problem.cluster.machines
    sizes = {gpu.name: [str(m.num_gpus) for m in machines if m.gpu == gpu] for gpu in problem.cluster.types}
    return f"{problem.cluster.num_devices}: " + ", ".join(f"{name} {'+'.join(own)}" for name, own in sizes.items())


def _gbit(problem: Problem) -> str:
    return f"{problem.cluster.inter_bandwidth_bytes_per_s * 8 / 1e9:g}"


def _limit(text: str) -> tuple[str, float]:
    solver, _, limit_s = text.partition("=")
    return solver, float(limit_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite of the command line."""
    known = list(small_problems())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solvers", nargs="+", choices=_SOLVERS, default=["portfolio"], metavar="SOLVER")
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="PROBLEM", help="some problems only")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a search (default 10)")
    parser.add_argument(
        "--limits", nargs="+", type=_limit, default=[], metavar="SOLVER=S", help="other seconds for some solvers"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the searches (default 0)")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    command = shlex.join(["python", "-m", "experiments.small_suite", *(sys.argv[1:] if argv is None else argv)])
    console.print(f"{command}\n{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    limits_s = dict.fromkeys(options.solvers, options.time_limit) | dict(options.limits)
    results: dict[str, dict[str, Result | str]] = {}
    for name in track(options.only, "problems", console=Console(stderr=True), transient=True):
        results[name] = {
            solver: run(small_problems()[name], solver, Budget(limits_s[solver]), options.seed)
            for solver in options.solvers
        }
    console.print(suite_table(results), summary_table(results, options.solvers))


if __name__ == "__main__":
    main()

"""How often is the optimum of a small mixed problem proven, and how close do our plans come to it?

The problems are in `experiments/data/small_suite.yaml`: 4 to 16 GPUs of two or three types, fast networks and slow
ones, models that fill the memory and models that do not. Plans are those that proofs cover: under 1F1B with ZeRO-1,
without replicated stages. The first eighteen have up to six GPUs and eight layers.

python -m experiments.studies small_suite          # at most 30 minutes on two cores; --quick: seconds
python -m experiments.studies small_suite --solvers exact portfolio --only problem=lab problem=pair_slow
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.app.configurations import named_model
from experiments.studies.frame.figures import framed, row_bars
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import SearchSpec
from experiments.studies.frame.study import Report, Scale, Study
from experiments.studies.frame.words import seconds, share
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section, read_mapping
from hexiopt.schedules.registry import ONE_F_ONE_B

_LATENCY_US = 20.0
_LIMITS_S = {"portfolio": 10.0, "exact": 60.0}  # of the others, as of the portfolio
_CLOSE = 0.01  # a gap to the best plan or to the bound that counts as closed
_WORKLOAD = ("global_batch", "seq_len", "precision")
_COVERED = {"schedule": ONE_F_ONE_B.name, "optimizer_sharding": "1"}  # by proofs, without replicated stages
_QUICK = ("pair_slow", "tiny_model")
_NOTES = (
    "gap: upper bound on the distance of a row's best plan to the optimum, by the best bound that a solver has proven; "
    "after: the seconds of the search that proved it. + is over the best step time of the row. states: unsharded model "
    "states of one copy over the usable memory of all devices."
)


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
        Workload(
            **{key: row[key] for key in _WORKLOAD if key in row}, schedule=ONE_F_ONE_B.name, optimizer_sharding="1"
        ),
        Space(replicas=False),
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
    states = problem.model.num_params * problem.workload.states.total
    return states / sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in problem.cluster.machines)


def searches(scale: Scale) -> list[SearchSpec]:
    """Every solver on every problem."""
    return [
        SearchSpec(
            problem, solver, scale.limit_s(_LIMITS_S.get(solver, _LIMITS_S["portfolio"])), _labels(name, problem)
        )
        for name, problem in small_problems().items()
        if not scale.quick or name in _QUICK
        for solver in (scale.solvers or tuple(_LIMITS_S))
    ]


def _labels(name: str, problem: Problem) -> dict[str, Any]:
    machines = problem.cluster.machines
    sizes = {gpu.name: "+".join(str(m.num_gpus) for m in machines if m.gpu == gpu) for gpu in problem.cluster.types}
    return {
        "problem": name,
        "GPUs": f"{problem.cluster.num_devices}: {', '.join(f'{gpu} {own}' for gpu, own in sizes.items())}",
        "model (layers)": f"{problem.model.name} ({problem.model.num_layers})",
        "Gbit/s": f"{problem.cluster.inter_bandwidth_bytes_per_s * 8 / 1e9:g}",
        "states": f"{tightness(problem):.0%}",
    }


def report(rows: pd.DataFrame, scale: Scale) -> list[Report]:
    """Step times, gaps and proofs by problem and by solver."""
    step_s = grid(rows, "problem", "solver")
    best_s = step_s.min(axis=1)
    rows = rows.assign(
        over=rows["step_time_s"] / rows["problem"].map(best_s) - 1, gap=1 - rows["bound_s"] / rows["step_time_s"]
    )
    proof = rows.loc[rows.groupby("problem", sort=False)["bound_s"].idxmax()].set_index("problem")
    gap = (1 - proof["bound_s"] / best_s).clip(lower=0.0).reindex(step_s.index)
    about = rows.drop_duplicates("problem").set_index("problem")
    cells = about[["GPUs", "model (layers)", "Gbit/s", "states"]].copy()
    for solver, own in rows.groupby("solver", sort=False):
        texts = [_found(*values) for values in zip(own["step_time_s"], own["over"], own["status"], strict=True)]
        cells[f"`{solver}` ({own['time_limit_s'].iloc[0]:g} s)"] = pd.Series(texts, own["problem"])
    cells["gap"] = gap.map(lambda value: "" if pd.isna(value) else f"{value:.2%}")
    cells["after"] = proof["runtime_s"].map(seconds)
    tables = {"Problems": cells, "Solvers": pd.DataFrame(dict(_summaries(rows))).T.rename_axis("solver")}
    return [Report(tables, claims(rows, gap), draw(gap), _NOTES)]


def _found(step_time_s: float, over: float, status: str) -> str:
    if pd.isna(step_time_s):
        return status.replace("_", " ")
    more = f" (+{over:.2%})" if over > 0.0 else ""
    return f"{seconds(step_time_s)}{more}{', optimal' if status == 'optimal' else ''}"


def _summaries(rows: pd.DataFrame) -> list[tuple[str, dict[str, str]]]:
    """A line a solver."""
    found = []
    for solver, own in rows.groupby("solver", sort=False):
        solved = own[own["step_time_s"].notna()]
        found.append(
            (
                f"`{solver}`",
                {
                    "plans": f"{len(solved)}",
                    "gap ≤ 1 %": f"{(solved['gap'] <= _CLOSE).sum()}",
                    "over best ≤ 1 %": f"{(solved['over'] <= _CLOSE).sum()}",
                    "over best: mean": _percent(np.exp(np.log1p(solved["over"]).mean()) - 1),
                    "over best: worst": _percent(solved["over"].max()),
                    "gap: mean": share(solved["gap"].mean()),
                    "search: mean": seconds(solved["runtime_s"].mean()),
                },
            )
        )
    return found


def _percent(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.2%}"


def claims(rows: pd.DataFrame, gap: pd.Series) -> list[str]:
    """The number of proven optima, and how often each solver has the best known plan."""
    said = [
        f"The best plan is proven to be within 1 % of the optimum on {(gap <= _CLOSE).sum()} of {len(gap)} problems."
    ]
    for solver, own in rows.groupby("solver", sort=False):
        solved = own[own["step_time_s"].notna()]
        if len(solved):
            best, worst = (solved["over"] <= 0.0).sum(), solved.loc[solved["over"].idxmax()]
            behind = f"; at worst {worst['over']:.2%} above it ({worst['problem']})" if worst["over"] > 0 else ""
            said.append(f"`{solver}` has a plan on {len(solved)} and the best known plan on {best}{behind}.")
    return said


def draw(gap: pd.Series) -> Figure:
    """The remaining gap, one bar per problem."""
    figure, (ax,) = framed(
        "What is left open on small problems",
        "Gap of the best plan to the best proven bound",
        height=1.6 + 0.25 * len(gap),
        width=9.5,
    )
    row_bars(ax, gap.to_frame("gap"))
    ax.set_xlabel("gap (%)")
    return figure


STUDY = Study("small_suite", "Small problems: how often the optimum is proven", __doc__, searches, report)

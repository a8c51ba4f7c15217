# %% [markdown]
# # Small problems: how often the optimum is proven
#
# How often is the optimum of a small mixed problem proven, and how close do our plans come to it?
#
# The problems are in `experiments/data/small_suite.yaml`: 4 to 16 GPUs of two or three types, fast networks and slow
# ones, models that fill the memory and models that do not. Plans are those that proofs cover: under 1F1B with ZeRO-1,
# without replicated stages. The first eighteen have up to six GPUs and eight layers.

# %%
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.small_suite import small_problems, tightness
from experiments.studies.frame.figures import framed, row_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import seconds, share
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import ONE_F_ONE_B

_LIMITS_S = {"portfolio": 10.0, "exact": 60.0}
_CLOSE = 0.01  # a gap to the best plan or to the bound that counts as closed
_COVERED = {"schedule": ONE_F_ONE_B.name, "optimizer_sharding": "1"}  # by proofs, without replicated stages
_QUICK = ("pair_slow", "tiny_model")


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


# %%
specs = [
    SearchSpec(problem, solver, limit_s, _labels(name, problem))
    for name, problem in small_problems().items()
    if not quick() or name in _QUICK
    for solver, limit_s in _LIMITS_S.items()
]
rows = measured(specs)


# %%
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


# %%
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
show(tables, claims(rows, gap), draw(gap))

# %%
assert quick() or (gap <= _CLOSE).mean() > 0.8, "Most small problems are proven to within 1 %."

# %% [markdown]
# gap: upper bound on the distance of a row's best plan to the optimum, by the best bound that a solver has proven;
# after: the seconds of the search that proved it. + is over the best step time of the row. states: unsharded model
# states of one copy over the usable memory of all devices.

# %%
conditions(specs, rows)

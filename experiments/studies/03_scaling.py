# %% [markdown]
# # Large and irregular clusters
#
# How long does planning take on large clusters, and how good are the plans?
#
# Synthetic clusters of 16 to 10,240 GPUs with every solver; and five shipped clusters of 120 to 960 GPUs that nobody
# laid out for training (`conf/cluster/`, made up): odd counts, several generations, halls, sites, spot markets.

# %%
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.fleets import FLEETS, TINY
from experiments.studies.frame.figures import framed, gpus_axis, legend, line, progress, seconds_axis
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import LOWER_BOUND, OURS, RIVALS
from experiments.studies.frame.rows import grid, time_to_s
from experiments.studies.frame.search import BOUND, CPU_LIMITS, SearchSpec, measured
from experiments.studies.frame.settings import quick, sizes, synthetic
from experiments.studies.frame.words import change, seconds, share, tokens
from hexiopt.problem.workload import Workload
from hexiopt.report.style import MUTED, count
from solvers.registry import for_any_problem, names

# %% [markdown]
# ## From 16 to 10,240 GPUs
#
# Machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal shares; Llama-2 13B,
# eight sequences per GPU.

# %%
_SEQUENCES = 8  # a GPU
_LIMIT_S, _REFERENCE = 20.0, 1024  # number of GPUs at which the limit holds
_LEAST, _MOST = 1 / 6, 5.0  # times the limit, for other sizes
_CLOSE = 1.01  # a search has settled within this share of its last step time
specs = []
for gpus in sizes():
    workload = Workload(_SEQUENCES * gpus, 512) if quick() else Workload(_SEQUENCES * gpus)
    problem = synthetic(gpus, "llama2_13b", workload)
    limit_s = _LIMIT_S * min(_MOST, max(_LEAST, gpus / _REFERENCE))
    specs += [SearchSpec(problem, solver, limit_s, {"gpus": gpus}) for solver in (*names(for_any_problem), BOUND)]
rows = measured(specs)


# %%
def size_claims(rows: pd.DataFrame) -> list[str]:
    """The best solver at each size, and the solvers without a plan."""
    lines = []
    for gpus, size_rows in rows.groupby("gpus"):
        if size_rows["step_time_s"].isna().all():
            lines.append(f"No solver has a plan for {gpus:,} GPUs.")
            continue
        best = size_rows.loc[size_rows["step_time_s"].idxmin()]
        over = size_rows.loc[size_rows["solver"] == OURS.solver, "step_time_s"].min() / best["step_time_s"] - 1
        longer = f"; a step of `{OURS.solver}`'s takes {over:.1%} longer" if over > 0 else ""
        lines.append(
            f"{gpus:,} GPUs: `{best['solver']}` has the best plan, at most {best['gap']:.1%} from the optimum{longer}."
        )
    for solver, solver_rows in rows.groupby("solver", sort=False):
        refused = solver_rows[solver_rows["status"] == "refused"]
        without = solver_rows[solver_rows["step_time_s"].isna() & (solver_rows["status"] != "refused")]
        if len(refused):
            lines.append(f"`{solver}` does not take {_sizes(refused)}: {refused['reason'].iloc[0]}.")
        if len(without):
            lines.append(f"`{solver}` has no plan in time for {_sizes(without)}.")
    return lines


def _sizes(rows: pd.DataFrame) -> str:
    return f"{', '.join(f'{gpus:,}' for gpus in rows['gpus'])} GPUs"


def draw_sizes(rows: pd.DataFrame) -> Figure:
    """Gap and settling time against the number of GPUs, one line per solver."""
    limits_s = rows.groupby("gpus")["time_limit_s"].max()
    numbers = list(limits_s.index)
    figure, (left, right) = framed(
        f"From {numbers[0]:,} to {numbers[-1]:,} GPUs" if len(numbers) > 1 else f"{numbers[0]:,} GPUs",
        f"Synthetic clusters of H100, A100, RTX 4090 and RTX 3090; {'tiny' if quick() else 'llama2_13b'}, "
        f"{_SEQUENCES} sequences per GPU; one seed",
        columns=2,
        height=4.6,
    )
    gaps, settled_s = (grid(rows, "gpus", "solver", values) for values in ("gap", "settled_s"))
    for k, solver in enumerate(gaps):
        if gaps[solver].notna().any():
            left.plot(numbers, 100 * gaps[solver], label=solver, **line(k))
            right.plot(numbers, settled_s[solver], **line(k))
    right.plot(numbers, limits_s, ":", color=MUTED, linewidth=1.2)
    at = numbers[0], limits_s.iloc[0]
    right.annotate("time limit", at, (4, 4), textcoords="offset points", color=MUTED, fontsize=9)
    for ax in (left, right):
        gpus_axis(ax, numbers)
    left.set_ylabel("gap to the lower bound (%)")
    left.set_ylim(bottom=0)
    seconds_axis(right, "time to within 1 % of its last plan (s)")
    legend(figure, left, 7)
    return figure


bound_s = rows.groupby("gpus")["bound_s"].max()
rows = rows.assign(gap=1 - rows["gpus"].map(bound_s) / rows["step_time_s"])
rows["settled_s"] = [
    time_to_s(points, _CLOSE * s) for points, s in zip(rows["trajectory"], rows["step_time_s"], strict=True)
]
solvers, program = rows[rows["solver"] != BOUND], rows[rows["solver"] == BOUND].set_index("gpus")
best = solvers.groupby("gpus")[["step_time_s", "gap"]].min()
bounds = pd.DataFrame(
    {
        "time limit": program["time_limit_s"].map(lambda s: f"{s:.3g} s"),
        "bound": bound_s.map(seconds),
        "of the linear program": program["bound_s"].map(lambda s: seconds(s) if s else "not in time"),
        "after": program["runtime_s"].map(seconds),
        "best step time": best["step_time_s"].map(seconds).replace("", "no plan"),
        "best gap": best["gap"].map(share),
    }
)
quoted = solvers[solvers["status"] != "refused"]
cells = pd.DataFrame(
    {
        "GPUs": quoted["gpus"].map("{:,}".format),
        "solver": quoted["solver"].map("`{}`".format),
        "step time": quoted["step_time_s"].map(seconds),
        "tokens/s": quoted["tokens_per_s"].map(tokens),
        "gap": quoted["gap"].map(share),
        "first plan": quoted["first_plan_s"].map(seconds),
        "settled": quoted["settled_s"].map(seconds),
        "search": quoted["runtime_s"].map(seconds),
        "memory": quoted["peak_gib"].map("{:.1f} GiB".format),
        "status": quoted["status"].str.replace("_", " "),
    }
)
bounds.index = bounds.index.map("{:,}".format)
show(
    {"Bounds": bounds.rename_axis("GPUs"), "Solvers": cells.set_index("GPUs")},
    size_claims(solvers),
    draw_sizes(solvers),
    "first plan: seconds to the first plan; settled: seconds until the search was within 1 % of its final plan; "
    "search: seconds in total; gap: to the best bound that any solver or the linear program has proven for that size; "
    "memory: peak of the search's processes.",
)

# %%
large = grid(solvers[solvers["gpus"] >= 256], "gpus", "solver")
assert quick() or (large[OURS.solver] <= _CLOSE * large.min(axis=1)).all(), (
    "From 256 GPUs on the portfolio is within 1 % of the best solver."
)

# %% [markdown]
# ## Irregular clusters
#
# The portfolio after several time limits and with several seeds, beside every baseline and the bound.

# %%
_LIMITS_S = {2.0: 5, 10.0: 5, 60.0: 2, 600.0: 1}  # of the portfolio: seconds, and at most so many seeds
_RIVAL_S, _BOUND_S = 10.0, 60.0
_NEAR = 1.03  # of the best step time known: what every run should reach
specs = []
for fleet in TINY if quick() else FLEETS:
    problem, labels = fleet.problem(), {"cluster": fleet.cluster, "model": fleet.model}
    for limit_s, seeds in _LIMITS_S.items():
        for seed in range(min(seeds, 2) if quick() else seeds):
            specs.append(OURS.search(problem, limit_s, {**labels, "limit": f"{limit_s:g} s"}, seed))
    for planner, limit_s in ((LOWER_BOUND, _BOUND_S), *((other, _RIVAL_S) for other in RIVALS)):
        specs.append(planner.search(problem, limit_s, {**labels, "limit": ""}))
rows = measured([replace(spec, cpu_time=True) for spec in specs])


# %%
def _spread(step_s: pd.Series) -> str:
    """The median, and the range where there are several; in how many runs there is no plan."""
    known = step_s.dropna()
    if known.empty:
        return "no plan"
    text = seconds(known.median())
    text += f" ({seconds(known.min())} to {seconds(known.max())})" if known.min() < known.max() else ""
    return text + (f"; {len(step_s) - len(known)} of {len(step_s)} without a plan" if len(known) < len(step_s) else "")


def irregular_claims(ours: pd.DataFrame, others: pd.DataFrame, best_s: pd.Series) -> list[str]:
    """Every run without a plan or far from the best plan known, and every baseline that is ahead of one."""
    lines = []
    for (cluster, limit), runs in ours.groupby(["cluster", "limit"], sort=False):
        without = runs["step_time_s"].isna().sum()
        far = (runs["step_time_s"] > _NEAR * best_s[cluster]).sum()
        if without:
            lines.append(f"Without a plan on `{cluster}` after {limit}: {without} of {count(len(runs), 'run')}.")
        if far:
            worst = change(runs["step_time_s"].max() / best_s[cluster])
            lines.append(
                f"More than 3 % above the best plan known on `{cluster}` after {limit}: "
                f"{far} of {count(len(runs), 'run')} (the worst {worst})."
            )
        theirs = others[(others["cluster"] == cluster) & (others["step_time_s"] < runs["step_time_s"].max())]
        lines += [f"`{name}` is ahead of a run of {limit} on `{cluster}`." for name in theirs["planner"]]
    return lines or ["Every run is within 3 % of the best plan known, and no baseline is ahead of any."]


def draw_irregular(ours: pd.DataFrame, others: pd.DataFrame, bound_s: pd.Series) -> Figure:
    """One panel per cluster: best step time over search time for every limit, the bound, the best baseline."""
    panels = ours.groupby("cluster", sort=False)
    figure, axes = framed(
        "Irregular clusters: the best plan so far",
        f"Step time by our cost model; median and range of up to {max(_LIMITS_S.values())} seeds where all have a plan",
        columns=len(panels),
        height=4.4,
        width=max(6.0, 3.1 * len(panels)),
    )
    for ax, (cluster, cluster_rows) in zip(axes, panels, strict=True):
        ends_s = []
        for k, (limit, runs) in enumerate(cluster_rows.groupby("limit", sort=False)):
            ends_s += progress(ax, runs, k, f"limit {limit}")
        rival_s = others.loc[others["cluster"] == cluster, "step_time_s"].min()
        ax.axhline(bound_s[cluster], color=MUTED, linestyle=":", linewidth=1.2, label="lower bound")
        if np.isfinite(rival_s):
            ax.axhline(rival_s, color=MUTED, linewidth=1, label="best baseline")
            ends_s.append(rival_s)
        if ends_s:
            ax.set_ylim(0.97 * bound_s[cluster], 1.1 * max(ends_s))
        ax.set_xlim(cluster_rows["time_limit_s"].min() / 10, cluster_rows["time_limit_s"].max() * 1.1)
        ax.set_title(cluster, fontsize=10, loc="left")
    axes[0].set_ylabel("best step time so far (s)")
    legend(figure, axes[0], 6 if len(axes) > 2 else 3)
    return figure


ours, others = rows[rows["planner"] == OURS.label], rows[~rows["planner"].isin([OURS.label, BOUND])]
bound_s, best_s = rows.groupby("cluster")["bound_s"].max(), rows.groupby("cluster")["step_time_s"].min()
lines: dict[str, dict[str, str]] = {}
for cluster, cluster_rows in ours.groupby("cluster", sort=False):
    lines[cluster] = {"bound": seconds(bound_s[cluster]), "first plan": seconds(cluster_rows["first_plan_s"].max())}
    for limit, runs in cluster_rows.groupby("limit", sort=False):
        lines[cluster][f"{limit}, {count(len(runs), 'seed')}"] = _spread(runs["step_time_s"])
    lines[cluster]["gap"] = share(1 - bound_s[cluster] / cluster_rows["step_time_s"].min())
step_s = grid(others, "planner", "cluster")
statuses = grid(others, "planner", "cluster", "status").map(lambda status: str(status).replace("_", " "))
other_cells = step_s.map(seconds).where(step_s.notna(), statuses)
show(
    {
        "Ours, by time limit": pd.DataFrame(lines).T.rename_axis("cluster"),
        f"Others, after {_RIVAL_S:g} s": other_cells.rename_axis("planner"),
    },
    irregular_claims(ours, others, best_s),
    draw_irregular(ours, others, bound_s),
    "Step times are medians over seeds (least and greatest in brackets). first plan: the latest of all runs; gap: of "
    f"the best plan to the bound. {CPU_LIMITS}",
    name="irregular",
)

# %%
medians_s = ours[ours["limit"] == "10 s"].groupby("cluster")["step_time_s"].median()
planned = others[others["step_time_s"].notna()]
assert quick() or (planned["step_time_s"] >= planned["cluster"].map(medians_s)).all(), (
    "After 10 s no baseline is ahead of the median."
)

# %% [markdown]
# # Split backwards and free depths
#
# What do split backwards, free depths and messages in 8 bits give, each alone and together?
#
# With split backwards (`space.split_backward=true`) gradients of weights come later than those of inputs; with free
# depths (`space.depth=true`) stages may have any number of micro-batches in flight. Both leave gradients as they are;
# hexiopt's executor trains both, and other trainers refuse most of these plans, so both are off by default. Messages
# between stages in 8 bits (`workload.message_precision=fp8`) are off as well, as they [change
# training](message_precision.md).

# %%
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.split_and_depth import ALL, BOTH, FAST, MODES, NEITHER, SLOW, problems, step_times
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import CPU_LIMITS, measured
from experiments.studies.frame.settings import quick

_LIMIT_S = 10.0
_AIMS = {(SLOW, BOTH): 0.90, (SLOW, ALL): 0.68, (FAST, BOTH): 0.92}  # of the step over that with neither, means
_FELL_SHORT = 1.02  # of the best plan known
_NOTES = (
    "Step times in seconds by our cost model, memory checked. In the first table each is of the best of all plans "
    "found for the problem, whatever they were found with: split or not, with the depths that it states, those that "
    f"its messages ask for or those of its schedule, whichever is shortest. Means are geometric. {CPU_LIMITS}"
)

# %%
limit_s = _LIMIT_S
specs = [
    OURS.search(own.grant(problem), limit_s, {"problem": name, "GB/s": rate, "mode": mode})
    for (name, rate), problem in problems(quick()).items()
    for mode, own in MODES.items()
]
specs = [replace(own, judge=step_times, cpu_time=True) for own in specs]
rows = measured(specs)


# %%
def mean(ratios: pd.DataFrame, by: pd.Series) -> pd.DataFrame:
    """The geometric means of groups of rows."""
    return np.exp(np.log(ratios).groupby(by, sort=False).mean())


def step(value_s: float) -> str:
    """A step time in seconds."""
    return "no plan" if pd.isna(value_s) else f"{value_s:.2f}"


def ratio(value: float) -> str:
    """A ratio of two step times."""
    return "" if pd.isna(value) else f"{value:.3f}"


def claims(best_s: pd.DataFrame, searched_s: pd.DataFrame, means: pd.DataFrame) -> list[str]:
    """Means beside what was aimed at, and how many searches stop short of a plan that another found."""
    said = [
        f"At {rate} GB/s a step with {mode.replace(',', ' and')} takes {of_step:.3f} of that with neither on average "
        f"(aim {aim:.2f})."
        for (rate, mode), aim in _AIMS.items()
        if rate in means.index and not pd.isna(of_step := means.at[rate, mode])
    ]
    behind = searched_s / best_s[list(searched_s)]
    if short := int((behind > _FELL_SHORT).sum().sum()):
        case, mode = behind.stack().idxmax()
        said.append(
            f"Of {searched_s.count().sum()} searches {short} stop more than {_FELL_SHORT - 1:.0%} above a plan that "
            f"another mode gave. The furthest, by {behind.at[case, mode] - 1:.0%}, is that with {mode} on "
            f"{case.replace(';', ',')} GB/s."
        )
    return said


def draw(over: pd.DataFrame) -> Figure:
    """Step times over those with neither."""
    figure, (ax,) = framed(
        "What split backwards, free depths and messages in 8 bits give",
        f"Step time of the best plan over that with neither; portfolio, {_LIMIT_S:g} s of CPU a search",
        width=13.0,
    )
    relative_bars(ax, over.set_axis([case.replace(", ", "\n").replace("; ", "\n") for case in over.index]))
    ax.tick_params(axis="x", labelsize=7)
    ax.set_ylabel("step time (neither = 1)")
    legend(figure, ax, 5)
    return figure


# %%
rows = rows.assign(case=rows["problem"] + "; " + rows["GB/s"])
rows = rows.reindex(columns=[*rows.columns, *(mode for mode in MODES if mode not in rows)])
about = rows.groupby("case", sort=False)[["problem", "GB/s"]].first()
best_s = rows.groupby("case", sort=False)[[*MODES]].min().astype(float)
searched_s = grid(rows, "case", "mode")
over = best_s.div(best_s[NEITHER], axis=0).drop(columns=NEITHER)
searched_over = searched_s.div(searched_s[NEITHER], axis=0).drop(columns=NEITHER)
means = mean(over, about["GB/s"])
best = {**best_s[[NEITHER, BOTH, ALL]].map(step), **over.map(ratio).add_suffix(" / neither")}
tables = {
    "The best of all plans found": about.assign(**best).set_index("problem"),
    "Means over neither, of the best of all plans": means.map(ratio),
    "What each search found": about.assign(**searched_s.map(step)).set_index("problem"),
    "Means over neither, of what each search found": mean(searched_over, about["GB/s"]).map(ratio),
}
show(tables, claims(best_s, searched_s, means), draw(over), _NOTES)

# %%
assert (over.loc[:, BOTH].dropna() <= 1 + 1e-9).all(), "Freedoms cost nothing in the best of all plans."
assert quick() or means.at[SLOW, BOTH] < 0.9, "Both freedoms gain a tenth on slow networks."

# %%
conditions(specs, rows)

# %% [markdown]
# # Split backwards and free depths
#
# What do split backwards, free depths and messages in 8 bits give, and how good is the order of a step?
#
# With split backwards (`space.split_backward=true`) gradients of weights come later than those of inputs; with free
# depths (`space.depth=true`) stages may have any number of micro-batches in flight. Both leave gradients as they are;
# hexiopt's executor trains both, and other trainers refuse most of these plans, so both are off by default. Messages
# between stages in 8 bits (`workload.message_precision=fp8`) are off as well, as they [change
# training](executor.md#messages-in-8-bits).

# %%
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.split_and_depth import ALL, BOTH, FAST, MODES, NEITHER, SLOW, problems, step_times
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import CPU_LIMITS, measured
from experiments.studies.frame.settings import quick
from experiments.studies.orders.comparison import compare, summary
from experiments.studies.orders.picture import draw_ratios
from experiments.studies.orders.pipelines import sample

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
    OURS.search(freedoms.grant(problem), limit_s, {"problem": name, "GB/s": rate, "mode": mode})
    for (name, rate), problem in problems(quick()).items()
    for mode, freedoms in MODES.items()
]
rows = measured([replace(spec, judge=step_times, cpu_time=True) for spec in specs])


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
    lines = [
        f"At {rate} GB/s a step with {mode.replace(',', ' and')} takes {of_step:.3f} of that with neither on average "
        f"(aim {aim:.2f})."
        for (rate, mode), aim in _AIMS.items()
        if rate in means.index and not pd.isna(of_step := means.at[rate, mode])
    ]
    behind = searched_s / best_s[list(searched_s)]
    if short := int((behind > _FELL_SHORT).sum().sum()):
        case, mode = behind.stack().idxmax()
        lines.append(
            f"Of {searched_s.count().sum()} searches {short} stop more than {_FELL_SHORT - 1:.0%} above a plan that "
            f"another mode gave. The furthest, by {behind.at[case, mode] - 1:.0%}, is that with {mode} on "
            f"{case.replace(';', ',')} GB/s."
        )
    return lines


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

# %% [markdown]
# ## The order of a step
#
# How far is a step from the one whose operations come in the best order? Constraint programming (OR-Tools' CP-SAT)
# finds the optimal schedule of a small pipeline: of all orders of forwards, backwards and gradients of weights that fit
# into memory, the one that ends first. Beside it stand ours by the clock: 1F1B with whole backwards, and `zb` with
# split ones.
#
# Forwards of the random pipelines' stages differ by up to four times; messages take nothing, up to 15 or up to 40 ticks
# where forwards take 10 to 40; memory holds what 1F1B has in flight and up to three micro-batches more.

# %%
orders = compare(sample(4 if quick() else 200))
table = summary(orders)
show(
    {"": table.astype(str).set_index("backwards")},
    figure=draw_ratios(orders),
    notes="Numbers of pipelines within 2 and 8 % of the optimum, how far ours are above it, and how many optima are "
    "proved. *Those of plans*: what searches give a plan with `space.depth=true`: 1F1B's numbers, or so many more "
    "that no round trip takes longer than a share of the period, whichever is shortest; shares fall from 1 until "
    "one is longer. *The best*: of all numbers in flight, stage by stage, that fit into memory and do not rise "
    "towards the last stage. What is left is the order: ours runs no backward before the forward whose turn it "
    "is, and puts off the gradients of weights of a whole micro-batch here, of a layer in plans.",
    caption="How near our orders are to the optimum",
    name="orders",
)
assert quick() or table.set_index("in flight").loc["those of plans", "mean (%)"].max() < 1, (
    "Orders of plans are within 1 % of the optimum on average."
)

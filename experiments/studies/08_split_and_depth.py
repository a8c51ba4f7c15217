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
# 200 random pipelines of 2 to 5 stages and 3 to 8 micro-batches (`python -m experiments.studies.orders`). Forwards of
# stages differ by up to four times; messages take nothing, up to 15 or up to 40 ticks where forwards take 10 to 40;
# memory holds what 1F1B has in flight and up to three micro-batches more. All 400 optima are proved.
#
# | backwards | micro-batches in flight | within 2 % | within 8 % | mean | worst |
# |---|---|--:|--:|--:|--:|
# | whole | 1F1B's | 117 | 158 | 4.30 % | 30.80 % |
# | whole | those of plans | 183 | 199 | 0.39 % | 8.40 % |
# | whole | the best | 190 | 200 | 0.22 % | 5.14 % |
# | split | 1F1B's | 112 | 170 | 3.41 % | 24.29 % |
# | split | those of plans | 169 | 199 | 0.74 % | 9.24 % |
# | split | the best | 178 | 200 | 0.49 % | 7.79 % |
#
# `those of plans`: what searches give a plan with `space.depth=true`: 1F1B's numbers, or so many more that no round
# trip takes longer than a share of the period, whichever is shortest. Shares fall from 1 until one is longer: two steps
# are timed per pipeline, where all numbers that fit are 38. `the best`: of all numbers in flight, stage by stage, that
# fit into memory and do not rise towards the last stage; no rule that chooses them does better.
#
# - **The numbers in flight are almost all of it**: where messages are long or stages unlike, those of 1F1B are too few.
#   Those that a round trip of a whole period asks for are about the steady state, which these pipelines of 3 to 8
#   micro-batches hardly reach: with them alone 138 and 116 are within 2 %.
# - **Split backwards at their optimum** take 10.5 % less time than whole ones at theirs, on average.
# - Of the 22 pipelines with split backwards that are then more than 2 % behind, 8 reach the optimum if only the
#   gradients of weights are placed anew, and 5 come nearer: a stage that would wait begins a block of them just before
#   the operation comes that the others wait for. Here the block is a whole micro-batch's; plans compute layers, which
#   are shorter.
# - In the other 9 that does not help. In four of them, read by hand, the optimal order runs a backward before the
#   forward whose turn it is; in at least two of these ours waits for that forward while the input of the backward is
#   there.
#
# Both by a script that is not kept, with the best numbers in flight, against the same optima:
#
# | | whole: within 2 %, worst | split: within 2 %, worst |
# |---|--:|--:|
# | as now | 190, 5.1 % | 178, 7.8 % |
# | gradients of weights in four layers | | 190, 4.9 % |
# | a backward overtakes a forward that is not there, where the step is then shorter | 200, 1.8 % | 184, 7.8 % |
# | both | | 197, 2.6 % |
#
# Measured 2026-11-29 on 2 cores, x86_64, Python 3.11, OR-Tools with one worker and a limit of 20 in its deterministic
# time, so that other machines find the same. A test holds the first 40 pipelines to these figures.

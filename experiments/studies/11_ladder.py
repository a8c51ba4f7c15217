# %% [markdown]
# # What a rival's plan owes to us
#
# Of the plans that other planners get here, which part is theirs, and which was lent by us?
#
# Against [rivals](rivals.md) we lend each our memory model, the best of what it does not choose, and prices by our cost
# model for its whole list. The ladder takes that apart: what a rival's released code chose; its first choice by its own
# published estimate; the best of the ten that it ranks best; the best of its space; ours within the freedoms that it
# has; and ours with all.

# %%
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.ladder import FIRST, FREEDOMS, INSIDE, LENT, PLANNERS, RUNGS, SPACE, TEN, problems
from experiments.studies.frame import published
from experiments.studies.frame.figures import GRID, framed, hue
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import CPU_LIMITS, SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import seconds, share, span, times
from hexiopt.problem.problem import Problem
from hexiopt.report.style import INK, MUTED

_LIMIT_S = 10.0  # CPU seconds of a search
_SLACK = 1.05  # a search that ends by the clock may miss what another with the same plans in its space has met
_FREE, _RELEASED = "ours", "its released code"
_STEPS = {  # what lies between two rungs
    (FIRST, TEN): "prices for ten of its plans instead of one",
    (TEN, SPACE): "prices for all of them, and what else we let it choose",
    (SPACE, INSIDE): "our search in the same freedoms",
    (INSIDE, _FREE): "freedoms that it lacks",
}
_NOTES = (
    "× is the step time over that of ours, geometric mean of the problems where the rung has a plan that fits; in "
    "brackets on how many it has none. *released code*: on one problem, as below. *first choice*: by the estimate that "
    "the system published, as reimplemented here (`solver.top_k=1`), priced as it is: where it does not fit memory, "
    "nothing is repaired. *best of its ten*: `solver.top_k=10`. *best of its space*: the solver as it is. *ours "
    f"within its freedoms*: the portfolio with the keys of the last table. {CPU_LIMITS} Ours has as many as a rival: "
    "its threads share them, though on few GPUs it proves in processes of their own."
)

# %% [markdown]
# ## From a rival's own choice to ours


# %%
def _specs(name: str, problem: Problem) -> list[SearchSpec]:
    """The searches of a problem: every rung of every rival, ours within its freedoms, and ours."""
    specs = [OURS.search(problem, _LIMIT_S, {"problem": name, "rival": _FREE, "rung": _FREE})]
    for planner in PLANNERS:
        labels = {"problem": name, "rival": planner.label}
        for rung, top_k in RUNGS.items():
            spec = planner.search(problem, _LIMIT_S, {**labels, "rung": rung})
            specs.append(spec if top_k is None else replace(spec, options={**spec.options, "top_k": top_k}))
        within = FREEDOMS[planner.solver].of(problem)
        specs.append(OURS.search(within, _LIMIT_S, {**labels, "rung": INSIDE}))
    return [replace(spec, cpu_time=True) for spec in specs]


PROBLEMS = problems()
rows = measured([spec for name, problem in PROBLEMS.items() for spec in _specs(name, problem)])

# %%
RELEASED = published.paper("released_plans")
_RUNGS = [*RUNGS, INSIDE]
_LABELS = [planner.label for planner in PLANNERS]
ours_s = rows[rows["rung"] == _FREE].set_index("problem")["step_time_s"].reindex(list(PROBLEMS))
theirs = rows[rows["rung"] != _FREE]


def rung_table(values: str, label: str) -> pd.DataFrame:
    """`values` of a rival, by problem and rung."""
    return grid(theirs[theirs["rival"] == label], "problem", "rung", values)


over = {
    label: rung_table("step_time_s", label).div(ours_s, axis=0).assign(**{_FREE: ours_s / ours_s}) for label in _LABELS
}
unfit = {label: rung_table("unfit_step_s", label).div(ours_s, axis=0) for label in _LABELS}


def mean(ratios: pd.Series) -> float:
    """The geometric mean of those known; NaN without any."""
    known = ratios.dropna()
    return float(np.exp(np.log(known).mean())) if len(known) else np.nan


def mean_cell(ratios: pd.Series) -> str:
    """The mean, and on how many problems there is no plan that fits."""
    missing = int(ratios.isna().sum())
    return " ".join(filter(None, (times(mean(ratios)), f"({missing} without)" if missing else "")))


def step_cell(row: pd.Series) -> str:
    """Seconds of a step; of a plan that does not fit, with the GiB that it lacks."""
    if pd.notna(row["step_time_s"]):
        return seconds(row["step_time_s"])
    if pd.notna(row["unfit_step_s"]):
        return f"{seconds(row['unfit_step_s'])}, {row['lacks_gib']:.1f} GiB out of memory"
    return str(row["status"]).replace("_", " ")


def step_factors(ratios: pd.DataFrame) -> dict[tuple[str, str], float]:
    """By pair of rungs, how many times as long a step takes on the lower one, where all have a plan; else empty."""
    whole = ratios.dropna()
    return {} if whole.empty else {(low, high): mean(whole[low] / whole[high]) for low, high in _STEPS}


def ladder_claims(over: Mapping[str, pd.DataFrame]) -> list[str]:
    """What each step of the ladder is worth, rival by rival, and first choices that do not fit."""
    lines = []
    for label, ratios in over.items():
        if factors := step_factors(ratios):
            first = mean(ratios.dropna()[FIRST])
            parts = ", ".join(f"{times(factors[pair])} {words}" for pair, words in _STEPS.items())
            lines.append(f"{label}: of {times(first)} from its first choice to ours, {parts}.")
        if missing := int(ratios[FIRST].isna().sum()):
            lines.append(f"{label}'s first choice is no plan that fits on {missing} of {len(ratios)} problems.")
    for label, ratios in over.items():
        for name, ratio in ratios[SPACE].items():
            if ratio < 1.0:
                lines.append(f"{label}'s best plan is ahead of ours on {name}: its step takes {share(1 - ratio)} less.")
    return lines


def draw(over: Mapping[str, pd.DataFrame], unfit: Mapping[str, pd.DataFrame]) -> Figure:
    """A panel for each rival: the rungs from left to right, a line for each problem and one for their mean."""
    figure, axes = framed(
        "From a rival's first choice to our plan",
        f"Step time over ours by our cost model, {_LIMIT_S:g} CPU s a search; grey: problems; line: geometric mean of "
        "those that fit; hollow: out of memory; stars: released code on one problem, out of memory, by its day's price",
        columns=len(over),
        height=4.6,
        width=2.05 * len(over) + 0.6,
    )
    places = {rung: x for x, rung in enumerate((_RELEASED, *_RUNGS, _FREE))}
    tops = [1.1, *(value for table in (*over.values(), *unfit.values()) for value in table.max() if pd.notna(value))]
    for k, (ax, (label, ratios)) in enumerate(zip(axes, over.items(), strict=True)):
        at = [places[rung] for rung in ratios]
        for name, line in ratios.iterrows():
            ax.plot(at, line, color=MUTED, alpha=0.45, linewidth=0.8, marker="o", markersize=3)
            ax.plot(at[:-1], unfit[label].loc[name], "o", color=MUTED, markersize=4, mfc="none")
        ax.plot(at, [mean(ratios[rung]) for rung in ratios], color=hue(k), linewidth=2, marker="o")
        if label in RELEASED["plans"]:
            stars = [step_s / RELEASED["ours_s"] for step_s in RELEASED["plans"][label]["step_s"]]
            ax.plot([0] * len(stars), stars, "*", color=hue(k), markersize=9, mfc="none")
            tops += stars
        ax.axhline(1.0, color=INK, linewidth=0.8)
        ax.set_yscale("log")
        ax.set_xticks(list(places.values()), list(places), rotation=60, ha="right", fontsize=7.5)
        ax.set_title(label, fontsize=9, loc="left")
        ax.grid(axis="y", color=GRID)
    ticks = [tick for tick in (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if tick <= 1.1 * max(tops)]
    for ax in axes:
        ax.set_ylim(0.9, 1.1 * max(tops))
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks] if ax is axes[0] else [""] * len(ticks))
        ax.minorticks_off()
    axes[0].set_ylabel("step time over ours")
    return figure


def released_cell(label: str) -> str:
    """What the released code of a rival chose on one problem, over our plan of the same day."""
    plan = RELEASED["plans"].get(label)
    return f"{span((s / RELEASED['ours_s'] for s in plan['step_s']), '.2f')} ×, out of memory" if plan else ""


means = pd.DataFrame(
    {label: {_RELEASED: released_cell(label)} | {r: mean_cell(over[label][r]) for r in _RUNGS} for label in _LABELS}
).T
show(
    {"Step time over ours": means.rename_axis("rival")},
    ladder_claims(over),
    draw(over, unfit),
    _NOTES,
)


# %%
def no_slower(lower: str, higher: str, labels: Sequence[str] = _LABELS) -> bool:
    """Whether, for these rivals, the `higher` rung has a plan wherever the `lower` one has, and that takes at most
    `_SLACK` times as long."""
    pairs = pd.concat([over[label][[lower, higher]] for label in labels]).dropna(subset=[lower])
    return bool((pairs[higher] <= _SLACK * pairs[lower]).all())


_BY = f"by more than {_SLACK - 1:.0%}"
_NESTED = no_slower(FIRST, TEN) and no_slower(TEN, SPACE)
assert quick() or _NESTED, f"Of more of a rival's plans the best is not slower {_BY}."

# %%
_WHOLE = [planner.label for planner in PLANNERS if not FREEDOMS[planner.solver].lacks]
assert quick() or no_slower(SPACE, INSIDE, _WHOLE), f"Within a rival's freedoms ours is not slower {_BY} than its best."

# %%
assert quick() or no_slower(SPACE, _FREE), f"No rival's plan is ahead of ours {_BY}."

# %% [markdown]
# ## What the released code chose
#
# Where a rival's code is public, it was run once. Its plans were not kept, so they are not priced again: they stand
# beside our plan by the price of the same day.


# %%
def released_table() -> pd.DataFrame:
    """The plans of released code, as they ran and with what they were granted."""
    lines = {}
    for label, plan in RELEASED["plans"].items():
        lacks = f" by {span(plan['lacks_gib'], '.1f')} GiB" if "lacks_gib" in plan else ""
        plainly = f"; a layout that needs no recompute {plan['plain_s']} s" if "plain_s" in plan else ""
        lines[label] = {
            "code": plan["source"],
            "as run": f"{span(plan['step_s'], '.1f')} s, out of memory{lacks}",
            "granted recompute and ZeRO-1": f"{span(plan['granted_s'], '.1f')} s{plainly}",
            "over ours then": f"{span((s / RELEASED['ours_s'] for s in plan['granted_s']), '.2f')} ×",
        }
    return pd.DataFrame(lines).T.rename_axis("rival")


def price_since() -> str:
    """Whose price the released plans have, and our plan by it and by today's."""
    where = f"`{RELEASED['cluster']}` with {RELEASED['model']}"
    then = f"Priced {RELEASED['priced']}, when ours took {RELEASED['ours_s']:g} s on {where}"
    today = ours_s.get(f"2 · {RELEASED['model']}", np.nan)
    return f"{then}; in the searches of this page it takes {seconds(today)}." if pd.notna(today) else f"{then}."


show({"": released_table()}, notes=price_since())

# %% [markdown]
# ## Problem by problem

# %%
tables = {}
for name in PROBLEMS:
    here = theirs[theirs["problem"] == name]
    cells = grid(here.assign(cell=here.apply(step_cell, axis=1)), "rival", "rung", "cell")
    tables[f"{name}: ours {seconds(ours_s[name]) or 'no plan'}"] = cells.rename_axis("rival")
show(tables)

# %% [markdown]
# ## What is lent, and how ours is restricted

# %%
show(
    {
        "": pd.DataFrame(
            {
                planner.label: {
                    "lent at its first choice": LENT[planner.label],
                    "ours within its freedoms": f"`{FREEDOMS[planner.solver].keys}`",
                    "which still has": FREEDOMS[planner.solver].wider,
                    "and lacks": FREEDOMS[planner.solver].lacks,
                }
                for planner in PLANNERS
            }
        ).T.rename_axis("rival")
    },
    notes="From the best of its ten to the best of its space a rival gets what [baselines](../baselines.md) names: "
    "other recompute policies, ZeRO-1 or none, further estimates, and climbing by our price.",
)

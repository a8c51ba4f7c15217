# %% [markdown]
# # Convergence against random partition
#
# How fast do the searches converge, compared with random partition with the same seed?

# %%
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.studies.frame import published
from experiments.studies.frame.figures import GRID, framed, hue, legend
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import OURS, Planner
from experiments.studies.frame.rows import best_at, time_to_s
from experiments.studies.frame.search import measured
from experiments.studies.frame.settings import first_models, quick
from experiments.studies.frame.words import seconds, times, tokens

RANDOM = Planner("random partition", "random")
PLANNERS = (RANDOM, Planner("HexiScale's partition", "hexiscale"), Planner("our portfolio", OURS.solver))
_LIMIT_S, SEEDS = 6.0, 2 if quick() else 5
_CURVE = 200  # points

# %%
specs = [
    planner.search(setting.problem(), _LIMIT_S, setting.labels, seed)
    for setting in first_models()
    for planner in PLANNERS
    for seed in range(SEEDS)
]
rows = measured(specs)


# %%
def draw(rows: pd.DataFrame) -> Figure:
    """One panel per setting: the best throughput so far over search time, mean and range over all seeds."""
    panels = rows.groupby("setting", sort=False)
    figure, axes = framed(
        "How fast the searches converge",
        f"Best throughput so far, by our cost model: geometric mean (line) and range (band) of {SEEDS} seeds, "
        "from where all have a plan",
        columns=len(panels),
        height=4.4,
        width=4.2 * len(panels) + (1.5 if len(panels) == 1 else 0.0),
    )
    for ax, (setting, own) in zip(axes, panels, strict=True):
        _panel(ax, own)
        ax.set_title(setting, fontsize=10, loc="left")
    axes[0].set_ylabel("best throughput so far (thousand tokens/s)")
    legend(figure, axes[0], 3)
    return figure


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    end_s = rows["time_limit_s"].max()
    start_s = rows["first_plan_s"].fillna(end_s).min()
    at_s = np.geomspace(max(start_s, end_s / 1000), end_s * 1.02, _CURVE)
    for k, (planner, own) in enumerate(rows.groupby("planner", sort=False)):
        best_s = np.array([best_at(points, at_s) for points in own["trajectory"]])
        ready = np.isfinite(best_s).all(axis=0)
        reached = own["tokens"].iloc[0] / best_s[:, ready] / 1e3
        if ready.any():
            mean = np.exp(np.log(reached).mean(axis=0))
            ax.plot(at_s[ready], mean, color=hue(k), linewidth=1.8, label=planner)
            ax.fill_between(at_s[ready], reached.min(axis=0), reached.max(axis=0), color=hue(k), alpha=0.2, linewidth=0)
        else:
            ax.plot([], [], color=hue(k), label=f"{planner} (not every seed has a plan)")
    ax.set_xscale("log")
    ax.set_xlim(at_s[0], at_s[-1])
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("search time (s)")
    ax.grid(color=GRID)


# %%
random_s = rows[rows["planner"] == RANDOM.label].set_index(["setting", "seed"])["step_time_s"]
beside_s = pd.Series([random_s[key] for key in zip(rows["setting"], rows["seed"], strict=True)], index=rows.index)
rows = rows.assign(over_random=beside_s / rows["step_time_s"])
rows["catches_up_s"] = [time_to_s(points, s) for points, s in zip(rows["trajectory"], beside_s, strict=True)]
cells: dict[str, dict[str, str]] = {}
means: dict[str, list[float]] = {}
said = []
for (setting, planner), own in rows.groupby(["setting", "planner"], sort=False):
    line, ratios = cells.setdefault(setting, {}), own["over_random"].dropna()
    line[f"{planner}: tokens/s"] = tokens(np.exp(np.log(own["tokens_per_s"]).mean()))
    if planner == RANDOM.label:
        continue
    solver, caught = own["solver"].iloc[0], own["catches_up_s"].dropna()
    mean = np.exp(np.log(ratios).mean())
    brackets = f" ({ratios.min():.2f} to {ratios.max():.2f})" if len(ratios) else ""
    line[f"× ({solver})"] = times(mean) + brackets
    line[f"catches up ({solver})"] = seconds(caught.median())
    if len(ratios):
        means.setdefault(planner, []).append(mean)
    if behind := len(ratios) - len(caught):
        said.append(f"{planner} stays behind random partition in {behind} of {len(ratios)} runs of setting {setting}.")
table = pd.DataFrame(cells).T.rename_axis("setting").assign(paper=published.ratio_range("random")).fillna("")
verdicts = [published.verdict("Random partition", own, "random", planner) for planner, own in means.items()]
show({"": table}, [*verdicts, *said], draw(rows))

# %%
assert quick() or min(means[PLANNERS[2].label]) > 1.0, "The portfolio is ahead of random partitions."

# %% [markdown]
# Tokens/s are geometric means over the seeds, × of the ratios to random partition with the same seed (range in
# brackets). *catches up* is the median time after which a search is as good as random partition after its whole time.
# Random partition and HexiScale complete a partition in the same way (layers, recompute and batches are computed), so
# only the partition differs; the portfolio runs on two cores and does not search only partitions.

# %%
conditions(specs, rows)

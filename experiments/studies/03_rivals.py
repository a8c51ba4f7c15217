# %% [markdown]
# # Against other planners on the same mixed clusters
#
# How do our plans compare with those of other planners on the same mixed cluster, all priced by our cost model?

# %%
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.frame import published
from experiments.studies.frame.figures import BAND, GRID, MARKERS, PAPER_COLOUR, framed, hue, legend, spread
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import LOWER_BOUND, OURS, RIVALS
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import BOUND, measured
from experiments.studies.frame.settings import quick, settings
from experiments.studies.frame.words import share, times, tokens
from hexiopt.report.style import INK, MUTED

_LIMITS_S = {OURS: 20.0, LOWER_BOUND: 40.0, **dict.fromkeys(RIVALS, 10.0)}
_COMPARED = [p.label for p in RIVALS if p.solver in published.paper("hexiscale")["rivals"]["names"]]
_NOTES = (
    "× is our throughput over the rival's on the same cluster. Each rival searches its own published plan space with "
    "its own estimate; of the plans that it ranks best, the best by our cost model counts, so that a poor estimate is "
    f"no handicap. Paper: {published.HEXISCALE}, {published.ratio_range('rivals')} over Metis, AMP and "
    "Espresso. gap: no plan of any planner has a step time shorter than ours by more than this share."
)

# %%
specs = [
    planner.search(setting.problem(), limit_s, setting.labels)
    for setting in settings()
    for planner, limit_s in _LIMITS_S.items()
]
rows = measured(specs)


# %%
def claims(over: pd.DataFrame, ours: pd.DataFrame) -> list[str]:
    """The rivals of the paper against its range, every rival that beats ours, and every missing plan."""
    said = []
    for label, ratios in over.iterrows():
        if label in _COMPARED and ratios.notna().any():
            said.append(published.verdict(str(label), ratios.dropna(), "rivals"))
        without = [setting for setting in ratios.index[ratios.isna()] if pd.notna(ours.at[setting, "step_time_s"])]
        if without:
            said.append(f"{label} has no plan at {', '.join(without)}.")
    for (setting, label), ratio in over.unstack().items():
        if ratio < 1.0:
            said.append(f"{label} beats ours at setting {setting}: its step takes {1 - ratio:.2%} less.")
    for setting in ours.index[ours["step_time_s"].isna()]:
        said.append(f"Ours has no plan at setting {setting}: {ours.at[setting, 'reason']}")
    return said


def draw(over: pd.DataFrame) -> Figure:
    """Our throughput over every rival's: one row per rival, one mark per setting."""
    figure, (ax,) = framed(
        "Our plan against other planners' on the same mixed cluster",
        f"Throughput by our cost model, ours over theirs; {10:g} s a rival, {20:g} s "
        "ours; band: what the paper says of Metis, AMP and Espresso",
        height=6.4,
        width=9.5,
    )
    rows: Sequence[str] = list(reversed(over.index))
    own = published.paper("hexiscale")["rivals"]
    offsets = list(reversed(spread(len(over.columns), 0.74)))
    for k, setting in enumerate(over):
        ys = [y + offsets[k] for y in range(len(rows))]
        marker = MARKERS[k % len(MARKERS)]
        ax.plot(over[setting].loc[rows], ys, marker, color=hue(k), markersize=7, label=setting, markeredgecolor="white")
    for y, label in enumerate(rows):
        if label in _COMPARED:
            name = f"paper: {published.ratio_range('rivals')}" if label == _COMPARED[0] else None
            ax.fill_betweenx((y - 0.42, y + 0.42), own["least"], own["most"], color=PAPER_COLOUR, zorder=0, label=name)
        if y % 2:
            ax.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=-1)
        ratios = over.loc[label].dropna()
        if len(ratios):
            ax.plot([np.exp(np.log(ratios).mean())] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.4, zorder=3)
        if missing := len(over.columns) - len(ratios):
            text = f"no plan at {missing} of {len(over.columns)}"
            ax.text(0.99, y, text, transform=ax.get_yaxis_transform(), color=MUTED, va="center", ha="right", fontsize=9)
    ax.plot([], [], color=INK, linewidth=1.4, label="geometric mean")
    ax.axvline(1.0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.95), max(high, own["most"] * 1.03))
    ax.grid(axis="x", color=GRID)
    ax.set_xlabel("our throughput over theirs (×)")
    legend(figure, ax, 4)
    return figure


# %%
ours = rows[rows["planner"] == OURS.label].set_index("setting")
gap = 1 - rows.groupby("setting", sort=False)["bound_s"].max() / ours["step_time_s"]
papers = [published.setting_figures(*pair) for pair in zip(ours["number"], ours["model"], strict=True)]
step_s = grid(rows[rows["solver"] != BOUND], "planner", "setting")
over = (step_s / step_s.loc[OURS.label]).drop(index=OURS.label)
mean = np.exp(np.log(over).mean(axis=1))
statuses = grid(rows, "planner", "setting", "status").map(lambda status: str(status).replace("_", " "))
theirs = over.map(times).where(over.notna(), statuses)
theirs["geometric mean"] = mean.map(times)
theirs["paper"] = [published.ratio_range("rivals") if label in _COMPARED else "" for label in theirs.index]
own = pd.DataFrame(
    {
        "ours: tokens/s": ours["tokens_per_s"].map(tokens),
        "MFU": ours["mfu"].map(share),
        "HexiScale's MFU (paper)": [share(paper.get("mfu", np.nan)) for paper in papers],
        "gap": gap.map(share),
    }
)
tables = {"Our plans": own, "Our throughput over theirs": theirs.rename_axis("ours over")}
show(tables, claims(over, ours), draw(over), _NOTES)

# %%
assert quick() or (over.stack() >= 1.0).all(), "No rival's plan is faster than ours."

# %%
conditions(specs, rows)

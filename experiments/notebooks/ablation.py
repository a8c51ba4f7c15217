# %% [markdown]
# # What is each asymmetry worth?
#
# A planner for mixed GPUs may split layers unevenly, give stages different TP degrees, let pipelines differ, and more.
# The study `ablation` plans without each of these freedoms in turn. This notebook explains how to read it: open it in
# Jupyter (with jupytext) or an editor that knows `# %%` cells, or run it:
# `python experiments/notebooks/ablation.py [--quick]`.

# %%
import sys
from pathlib import Path

from rich.console import Console

from experiments.studies import ablation
from experiments.studies.frame.figures import framed, legend, row_bars, save
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.study import Scale

OUT = Path("results")
quick = "--quick" in sys.argv  # a tiny cluster and model, in seconds
rows = ablation.STUDY.rows(Scale(quick=quick), OUT, Console(stderr=True))
print(rows[["setting", "space", "status", "step_time_s", "runtime_s"]].to_string(index=False))

# %% [markdown]
# A row is one search: the portfolio in one plan space. The step times that the searches found, in seconds:

# %%
found = grid(rows, "space", "setting")
print(found.to_string())

# %% [markdown]
# A search may miss a plan. But a plan of a restricted space is valid in every larger one, so the whole space has the
# best plan of all rows. `INSIDE` lists which spaces contain which; each is credited with the best plan inside it.

# %%
best = credited(found, ablation.INSIDE)
missed = found / best - 1
print("How far the plan of each search is above the best known plan of its space:")
print(missed.map("{:.2%}".format).to_string())

# %% [markdown]
# The price of a freedom is how much longer the best step takes without it. Losses do not add up: one freedom
# often makes up for another. Hence the last row, without all of them, says more than the sum of the others.

# %%
longer = (best / best.loc[ablation.UNSHARDED] - 1).drop(index=ablation.UNSHARDED)
figure, (ax,) = framed("What each asymmetry is worth", "How much longer a step takes without it")
row_bars(ax, longer)
ax.set_xlabel("longer step (%)")
legend(figure, ax, 4)
(OUT / "notebooks").mkdir(parents=True, exist_ok=True)
save(figure, OUT / "notebooks" / "ablation.png")
single = longer.drop(index=ablation.NONE)
print(f"Sum of the single losses, mean of the settings: {single.mean(axis=1).sum():.1%}")
print(f"Loss of all at once, mean of the settings:      {longer.loc[ablation.NONE].mean():.1%}")
print(OUT / "notebooks" / "ablation.png")

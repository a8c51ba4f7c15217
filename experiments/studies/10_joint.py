# %% [markdown]
# # Pipelines and sequence layouts planned together
#
# How much does planning DP, PP, TP and CP × HP jointly gain over pipelines alone and sequence layouts alone?
#
# At 128K tokens, on clusters of both papers and on a small lab.

# %%
from dataclasses import replace

import pandas as pd

from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.long_contexts import BOUND_S, JOINT, LAYOUTS, chosen
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import BOUND, SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import share, times, tokens
from hexiopt.problem.space import Space

_LIMIT_S = 20.0
PIPELINES, SEQUENCES, TOGETHER = "pipelines only", "sequence only", "joint"
WAYS = {
    PIPELINES: ("portfolio", Space(), _LIMIT_S),
    SEQUENCES: ("hexiseq", replace(LAYOUTS, num_stages=1), _LIMIT_S),
    TOGETHER: ("portfolio", LAYOUTS, _LIMIT_S),
    "bound": (BOUND, LAYOUTS, BOUND_S),
}

# %%
specs = [
    SearchSpec(
        setting.problem(space=space), solver, limit_s, {"setting": setting.label, "place": setting.place, "way": way}
    )
    for setting in chosen(JOINT)
    for way, (solver, space, limit_s) in WAYS.items()
]
rows = measured(specs)


# %%
def claims(joint: pd.Series, single: pd.Series, places: pd.Series) -> list[str]:
    """On how many clusters the joint plan beats both others, and by how much; tokens/s by setting."""
    better = joint[joint.fillna(0.0) > single.fillna(0.0)].index
    names = [places[s] + ("" if pd.isna(single[s]) else f" by {joint[s] / single[s] - 1:.1%}") for s in better]
    said = [
        f"Joint plans beat both others on {len(better)} of {len(joint)} "
        f"clusters{': ' if names else ''}{', '.join(names)}."
    ]
    for setting, per_s in joint.items():
        if pd.isna(per_s):
            said.append(f"{setting} has no joint plan.")
        elif single[setting] > per_s:
            behind = f"{single[setting] / per_s - 1:.1%}"
            said.append(f"At {setting} the joint search ends {behind} behind the better single one.")
    return said


# %%
per_s = grid(rows, "setting", "way", "tokens_per_s").drop(columns="bound")
together = rows[rows["way"] == TOGETHER].set_index("setting")
certain = rows[rows["way"].isin([TOGETHER, "bound"])].groupby("setting", sort=False)["bound_s"].max()
gap = 1 - certain / together["step_time_s"]
cells = per_s.map(tokens).rename(columns="{} (tokens/s)".format)
for way in (PIPELINES, SEQUENCES):
    cells[f"× {way}"] = (per_s[TOGETHER] / per_s[way]).map(times)
cells["MFU"], cells["gap"] = together["mfu"].map(share), gap.map(share)
single = per_s[[PIPELINES, SEQUENCES]].max(axis=1)
figure, (ax,) = framed(
    "Pipelines, tensor parallelism and sequence layouts planned together",
    f"Throughput by our cost model over the better of the two single ways; {_LIMIT_S:g} s a search",
)
bars = per_s.div(single.fillna(per_s[TOGETHER]), axis=0)
relative_bars(ax, bars.set_axis(together["place"].str.replace(" · ", "\n")))
ax.set_ylabel("throughput (better single way = 1)")
legend(figure, ax, 3)
show({"": cells}, claims(per_s[TOGETHER], single, together["place"]), figure)

# %%
assert quick() or (per_s[TOGETHER] > single).mean() > 0.5, "Joint plans beat both others on most clusters."

# %% [markdown]
# pipelines only: the portfolio without sequence layouts; sequence only: `hexiseq` with data-parallel pipelines of one
# stage each, as in its paper; joint: the portfolio, which decides stage by stage between tensor parallelism and a
# sequence layout.

# %%
conditions(specs, rows)

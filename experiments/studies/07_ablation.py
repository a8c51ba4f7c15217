# %% [markdown]
# # What each asymmetry is worth
#
# What is each asymmetry worth? The portfolio plans without each freedom in turn, and without all of them.

# %%
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments.studies.frame.figures import framed, legend, row_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.search import measured
from experiments.studies.frame.settings import first_models, quick
from experiments.studies.frame.words import change, span, tokens
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.report.style import FAINT
from hexiopt.schedules.registry import ONE_F_ONE_B

_LIMIT_S = 10.0
_SMALL = 0.0005  # losses below 0.05 % count as none


@dataclass(frozen=True)
class PlanSpace:
    """A plan space: the switches that are off, and the schedule."""

    off: tuple[str, ...] = ()
    schedule: str = "auto"

    @property
    def space(self) -> Space:
        """As the planner takes it."""
        return replace(Space(), **dict[str, Any](dict.fromkeys(self.off, False)))

    def holds(self, other: "PlanSpace") -> bool:
        """Whether every plan of `other` is in this space too."""
        without = {*other.off, "recompute_per_layer"} if "recompute_per_stage" in other.off else {*other.off}
        return set(self.off) <= without and self.schedule in ("auto", other.schedule)


_LABELS = {
    "replicas": "no replicated stages",
    "uneven_layers": "equal layers in a pipeline",
    "uneven_tp": "one TP degree",
    "uneven_batch": "equal batches of pipelines",
    "uneven_structure": "pipelines all alike",
    "recompute_per_stage": "one recompute policy",
    "recompute_per_layer": "one policy a stage",
}
UNSHARDED, NONE = "the whole plan space", "none of them (all off)"
SPACES = {
    UNSHARDED: PlanSpace(),
    **{_LABELS[name]: PlanSpace((name,)) for name in SWITCHES},
    "1F1B only": PlanSpace(schedule=ONE_F_ONE_B.name),
    NONE: PlanSpace(SWITCHES),
}
INSIDE = {name: [other for other in SPACES if own.holds(SPACES[other])] for name, own in SPACES.items()}

# %%
specs = [
    OURS.search(setting.problem(space=own.space, schedule=own.schedule), _LIMIT_S, {**setting.labels, "space": name})
    for setting in first_models()
    for name, own in SPACES.items()
]
rows = measured(specs)


# %%
def claims(found: pd.DataFrame, best: pd.DataFrame, longer: pd.DataFrame) -> list[str]:
    """The value of all freedoms and of the most valuable one, those worth nothing, and searches that fell short."""
    said = []
    if NONE in longer.index and longer.loc[NONE].notna().any():
        said.append(f"Without any asymmetry a step takes {span(longer.loc[NONE], '.1%')} longer.")
    single = longer.drop(index=NONE, errors="ignore").dropna(how="all")
    means, worst = single.mean(axis=1), single.max(axis=1)
    if len(means) and means.max() > _SMALL:
        said.append(f"The most expensive single loss is “{means.idxmax()}”: {means.max():.1%} on average.")
    if len(free := [f"“{name}”" for name in worst.index[worst <= _SMALL]]):
        said.append(f"By these searches, nothing is lost by {', '.join(free)}.")
    for setting in found:
        over = found.at[UNSHARDED, setting] / best.at[UNSHARDED, setting] - 1
        if over > _SMALL:
            said.append(
                f"At setting {setting} the search of the whole space stops {over:.1%} above the best known plan, "
                f"which “{found[setting].idxmin()}” gave."
            )
        said += [f"Setting {setting} has no plan found in “{name}”." for name in best.index[best[setting].isna()]]
    if NONE in longer.index and longer.loc[NONE].notna().any():
        sums = single.drop(index="1F1B only", errors="ignore").sum()
        said.append(
            f"Single losses sum to {span(sums, '.1%')}, and together they are {span(longer.loc[NONE], '.1%')}: one "
            "freedom may make up for another."
        )
    return said


# %%
found = grid(rows, "space", "setting")
best = credited(found, INSIDE)
longer = (best / best.loc[UNSHARDED] - 1).drop(index=UNSHARDED)
per_s = rows.groupby("setting", sort=False)["tokens"].first() / best.loc[UNSHARDED]
whole = pd.DataFrame(
    {
        "whole plan space: tokens/s": per_s.map(tokens),
        "its own search": (found.loc[UNSHARDED] / best.loc[UNSHARDED]).map(lambda ratio: change(ratio, 2)),
    }
)
figure, (ax,) = framed(
    "What each asymmetry is worth",
    f"How much longer a step takes without it, by our cost model; portfolio, {_LIMIT_S:g} s a search",
    height=5.0,
    width=9.5,
)
row_bars(ax, longer)
if NONE in longer.index:
    ax.axhline(0.5, color=FAINT, linewidth=1)
ax.set_xlabel("longer step (%)")
legend(figure, ax, 4)
lost = (longer + 1).map(change).replace("", "no plan").rename_axis("without it")
tables = {"": whole.rename_axis("setting"), "How much longer a step takes": lost}
show(tables, claims(found, best, longer), figure)

# %%
assert (longer.stack() >= -1e-9).all(), "The whole space holds every other."
assert quick() or longer.loc[NONE].min() > 0.1, "All freedoms together are worth a tenth of a step and more."

# %% [markdown]
# The increase of the step time over that in the whole plan space. A plan of a smaller space is in every larger one, so
# a space is credited with the best plan of any search inside it; the CSV has each search's own result.

# %%
conditions(specs, rows)

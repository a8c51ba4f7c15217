# %% [markdown]
# # What each freedom of a sequence layout is worth
#
# What are uneven tokens, heads and groups, and the order of tokens, each worth in a sequence layout?

# %%
from dataclasses import dataclass

import pandas as pd

from experiments.studies.frame.figures import framed, legend, row_bars
from experiments.studies.frame.long_contexts import ABLATION, OURS_S, chosen
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.search import SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import span, tokens

_UNEVEN = ("tokens", "heads", "groups")


@dataclass(frozen=True)
class Freedoms:
    """What may be uneven, and the order of tokens; None leaves the order to the search."""

    uneven: tuple[str, ...] = _UNEVEN
    order: str | None = None

    @property
    def options(self) -> dict[str, str | bool]:
        """Options of the solver."""
        off: dict[str, str | bool] = {f"uneven_{what}": False for what in _UNEVEN if what not in self.uneven}
        return off | ({"order": self.order} if self.order else {})

    def holds(self, other: "Freedoms") -> bool:
        """Whether every layout that `other` allows is allowed here too."""
        return set(other.uneven) <= set(self.uneven) and self.order in (None, other.order)


EVEN, ALL = "nothing uneven", "all of them uneven"
VARIANTS = {
    EVEN: Freedoms(()),
    **{f"uneven {what} only": Freedoms((what,)) for what in _UNEVEN},
    ALL: Freedoms(),
    **{f"all uneven, {order}": Freedoms(order=order) for order in ("contiguous", "zigzag")},
}
INSIDE = {name: [other for other in VARIANTS if own.holds(VARIANTS[other])] for name, own in VARIANTS.items()}

# %%
specs = [
    SearchSpec(
        setting.problem(),
        "hexiseq",
        OURS_S,
        {"setting": setting.label, "variant": name, "tokens": setting.global_batch * setting.seq_len},
        options=own.options,
    )
    for setting in chosen(ABLATION)
    for name, own in VARIANTS.items()
]
rows = measured(specs)

# %%


# %%
best = credited(grid(rows, "variant", "setting"), INSIDE)
gain = (best.loc[EVEN] / best).drop(index=EVEN)
per_s = rows.groupby("setting", sort=False)["tokens"].first() / best
ends = {name: per_s.loc[name].map(tokens) for name in (EVEN, ALL) if name in per_s.index}
said = [
    f"{name} reaches {span(own.dropna(), '.3f')} × of even layouts."
    for name, own in gain.iterrows()
    if own.notna().any()
]
said += [f"{setting} has no plan with {name}." for (setting, name), s in best.unstack().items() if pd.isna(s)]
figure, (ax,) = framed(
    "What each freedom of a sequence layout is worth",
    f"Throughput over even layouts, by our cost model; hexiseq, {OURS_S:g} s a search",
    height=5.0,
    width=9.5,
)
row_bars(ax, gain - 1)
ax.set_xlabel("more throughput than even layouts (%)")
legend(figure, ax, 2)
cells = gain.map(lambda ratio: "no plan" if pd.isna(ratio) else f"{ratio:.3f} ×").rename_axis("layouts")
tables = {"Tokens/s": pd.DataFrame(ends).rename_axis("setting"), "Throughput over even layouts": cells}
show(tables, said, figure)

# %%
assert (gain.stack() >= 1 - 1e-9).all(), "Every variant holds even layouts."
assert quick() or (gain.loc["uneven tokens only"] > 0.95 * gain.loc[ALL]).all(), "Nearly all comes from uneven tokens."

# %% [markdown]
# Throughput over that of even layouts, which have equally many tokens and heads on every device and groups of one size.
# A layout with fewer freedoms is valid with more, so a variant is credited with the best plan of any search inside it;
# the CSV has each search's own result.

# %%
conditions(specs, rows)

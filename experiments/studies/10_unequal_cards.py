# %% [markdown]
# # Adapters on unequal cards
#
# What does a plan give owners of unequal cards who train low-rank adapters (LoRA) of 8 to 32 billion parameters?
#
# Four fleets: one PC with two cards, one with four, a lab with two machines of two generations, two PCs at home. Beside
# our plan stands what their owners do: `device_map`, which puts layers one after another on the cards of a machine and
# runs one micro-batch at a time; data parallelism with the same batch on every card, where the slowest decides; and the
# best card alone.

# %%
import re
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.cards import BATCH, COLUMNS, FLEETS, MAP, MODELS, RANK, SEQ_LEN, STORAGES, owners
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.search import CPU_LIMITS, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import times, tokens

_LIMIT_S = 4.0
_NOTES = (
    f"LoRA of rank {RANK} on all matrices, {BATCH} sequences of {SEQ_LEN:,} tokens a step. Each column has the "
    "faster of 16-bit and NF4 matrices, × is our tokens per second over theirs. All are priced by our cost model, with "
    "our runtime's kernels; the others with their best micro-batch of 1, 2, 4, 8 or 16 sequences, and all layers or "
    "none recomputed, as trainers offer it. *device_map*: the better of accelerate's balanced split "
    "(huggingface/accelerate, src/accelerate/utils/modeling.py, `get_balanced_memory` and `infer_auto_device_map` at "
    "cdde654: equal parts and 1.25 layers more, the first card without room for its largest module, the last with what "
    "is left) and of layers in proportion to memory, in either order of the cards, of the best machine, since it does "
    "not cross machines; a step is as many times one micro-batch alone as it takes. *equal data parallel*: all cards "
    "hold the model and get equally many sequences, with the least batch "
    f"from {BATCH} that divides so; gradients are summed once. {CPU_LIMITS}"
)

# %%
specs = []
for fleet in FLEETS[: 1 if quick() else None]:
    for model in MODELS[: 1 if quick() else None]:
        for storage in ("nf4",) if quick() else STORAGES:
            labels = {"fleet": fleet.words, "cluster": fleet.cluster, "model": model, "storage": storage}
            spec = OURS.search(fleet.problem(model, storage), _LIMIT_S, labels)
            specs.append(replace(spec, judge=owners, cpu_time=True))
rows = measured(specs)


# %%
def _fastest(by_storage: pd.Series) -> str:
    known = by_storage.dropna()
    return STORAGES[str(known.idxmax())] if len(known) else ""


def claims(over: pd.DataFrame, ours: pd.Series) -> list[str]:
    """Ranges of what ours gains, where it is behind, and what does not fit [(fleet, model), what owners do]."""
    lines = []
    planned = ours.notna()
    for name in over:
        known = over[name].dropna()
        without = int((planned & over[name].isna()).sum())
        if len(known):
            gain = f"{known.min():.2f} to {known.max():.2f} ×, {known.median():.2f} at the median of {len(known)}"
            lines.append(
                f"Over {name}: {gain}." + (f" It does not fit in {without} of {planned.sum()}." if without else "")
            )
        elif planned.any():
            lines.append(f"{name} fits nowhere.")
        for (fleet, model), ratio in known[known < 1.0].items():
            lines.append(f"Behind {name} by {1 / ratio - 1:.1%}: `{model}` on {fleet}.")
    lines += [f"Ours has no plan of `{model}` on {fleet}." for fleet, model in ours.index[~planned]]
    return lines


def draw(over: pd.DataFrame) -> Figure:
    """Bars a fleet and model."""
    figure, (ax,) = framed(
        "Adapters on unequal cards: our plan over what owners do",
        f"Tokens per second by our cost model, ours over theirs; {_LIMIT_S:g} s of CPU time a search",
        width=12.5,
    )
    names = [
        "\n".join([model.removeprefix("qwen3_").upper(), *re.split(r" \+ |, |; ", fleet)])
        for fleet, model in over.index
    ]
    relative_bars(ax, over.set_axis(names))
    ax.tick_params(axis="x", labelsize=7)
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set_ylabel("ours over theirs")
    legend(figure, ax, 3)
    return figure


# %%
rows = rows.reindex(columns=[*rows.columns, *(name for name in COLUMNS.values() if name not in rows)])
best = rows.groupby(["fleet", "model"], sort=False)[["tokens_per_s", *COLUMNS.values()]].max()
over = pd.DataFrame({name: best["tokens_per_s"] / best[column] for name, column in COLUMNS.items()})
storages = rows.pivot(index=["fleet", "model"], columns="storage", values="tokens_per_s").reindex(best.index)
tables = {}
for fleet, ratios in over.groupby(level=0, sort=False):
    ours = best.loc[fleet, "tokens_per_s"]
    theirs = ratios.loc[fleet].map(times).replace("", "does not fit")
    fastest = [_fastest(storages.loc[(fleet, model)]) for model in ours.index]
    cells = pd.DataFrame({"ours: tokens/s": ours.map(tokens), "matrices": fastest}, index=ours.index)
    tables[str(fleet)] = cells.join(theirs.where(ours.notna(), "")).rename_axis("model")
show(tables, claims(over, best["tokens_per_s"]), draw(over), _NOTES)

# %%
assert quick() or over[MAP].min() > 1.0, "Every plan is faster than device_map."

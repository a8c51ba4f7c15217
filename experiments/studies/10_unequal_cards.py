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
import math
import re
import time
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

import hexiopt as hx
from experiments.studies.cases.cards import (
    BATCH,
    COLUMNS,
    FLEETS,
    MAP,
    MODELS,
    NEEDS_GB,
    PAIRS,
    RANK,
    SEQ_LEN,
    STORAGES,
    owners,
    pair_problem,
)
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.search import CPU_LIMITS, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import times, tokens
from hexiopt.study.jobs import provenance
from hexiopt.units import GIB

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
_LINE_NOTES = (
    f"`hexiopt fit gpus=[A,B] model=MODEL workload.training=lora`: LoRA of rank {RANK} on all matrices, {BATCH} "
    f"sequences of {SEQ_LEN:,} tokens a step, FP16 where a card has no BF16; the second table is of "
    "`workload.lora.storage=nf4`, asked where 16 bits do not fit. Cells: tokens per second of the plan by our cost "
    "model; *impossible* is proved; *not found*: no plan was seen at once. *U*, *L*: the tables of unsloth (its "
    "requirements page, “absolute minimum”) and LLaMA-Factory (README at 00409ff, Hardware Requirement, “estimated”, "
    "by its rule of 2 and 1/2 GB a billion parameters for sizes that it does not list): the model fits on the larger "
    "card (1), in as much memory as both have (2), or not (0). Neither table knows the context, the batch, or a second "
    "card."
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

# %% [markdown]
# ## One line for two unequal cards
#
# What does `hexiopt fit` say to owners of two unequal cards who ask whether adapters of a model fit, and what do the
# tables say that trainers publish? Twelve pairs of cards, each in one PC, and six models of 7 to 70 billion parameters.


# %%
def ask(pair: tuple[str, str], model: str, storage: str) -> dict[str, object]:
    """What the line says of a pair and a model, and its CPU seconds."""
    start_s = time.process_time()
    problem = pair_problem(pair, model, storage)
    answer = hx.verdict(problem)
    cpu_s = time.process_time() - start_s
    speed = answer.plan.cost.tokens_per_s if answer.plan else math.nan
    return {
        "cards": " + ".join(pair).upper(),
        "model": model,
        "storage": storage,
        "fits": answer.fits,
        "tokens_per_s": speed,
        "table": NEEDS_GB[model].by_table(
            [gpu.memory_bytes / GIB for gpu in problem.cluster.types], storage != "16bit"
        ),
        "behind": any(rate > speed * 1.001 for rate in answer.owners.values()),
        "cpu_s": cpu_s,
    }


answers = []
for pair in PAIRS[: 1 if quick() else None]:
    for model in list(NEEDS_GB)[: 2 if quick() else None]:
        answers.append(ask(pair, model, "16bit"))
        if answers[-1]["fits"] != "yes":
            answers.append(ask(pair, model, "nf4"))
cases = pd.DataFrame(answers)


# %%
def agreement(cases: pd.DataFrame) -> pd.DataFrame:
    """Numbers of cases by what the line says (they fit or not) and where they fit by a table."""
    lines = {}
    for storage, of in cases.groupby("storage", sort=False):
        for letter, trainer in (("U", "unsloth"), ("L", "LLaMA-Factory")):
            says = of["table"].str.extract(f"{letter}([012])")[0]
            cells = {}
            for words, fits in (("fits", of["fits"] == "yes"), ("does not fit", of["fits"] != "yes")):
                for place, name in (("1", "larger card"), ("2", "both"), ("0", "nowhere")):
                    cells[f"{words}; by the table: {name}"] = str((fits & (says == place)).sum())
            lines[f"{STORAGES[str(storage)]}, {trainer}"] = cells
    return pd.DataFrame(lines).T.rename_axis("matrices, table")


def line_claims(cases: pd.DataFrame) -> list[str]:
    """How many fit, where the plan is behind what owners do, and CPU seconds."""
    fit = cases[cases["fits"] == "yes"].groupby("storage").size()
    totals = cases.groupby("storage").size()
    lines = [
        f"{fit.get(storage, 0)} of {number} fit with {STORAGES[str(storage)]} matrices."
        for storage, number in totals.items()
    ]
    behind = cases[cases["behind"]]
    lines += [f"Behind what owners do: `{row.model}` on {row.cards}." for row in behind.itertuples()]
    if behind.empty:
        lines.append("In no case is the plan behind a layer split by memory, equal batches, or the best card alone.")
    cpu_s = cases["cpu_s"]
    return [*lines, f"CPU seconds a question: {cpu_s.median():.2f} at the median, {cpu_s.max():.2f} at most."]


tables = {}
for storage, of in cases.groupby("storage", sort=False):
    rates = of["tokens_per_s"].map(tokens).where(of["fits"] == "yes", of["fits"])
    wide = of.assign(text=rates + " (" + of["table"] + ")").pivot(index="cards", columns="model", values="text")
    order = cases["cards"].unique(), cases["model"].unique()
    tables[f"{STORAGES[str(storage)]} matrices"] = (
        wide.reindex(index=order[0], columns=order[1]).astype(object).fillna("").rename_axis(index="cards")
    )
tables["What the line says, by what a table says (cases)"] = agreement(cases)
show(tables, line_claims(cases), notes=_LINE_NOTES)

# %%
measured = provenance()
show(claims=[f"Asked {measured['date']} on {measured['machine']}; code {measured['code'][:8]}."])

# %% [markdown]
# # One line for two unequal cards
#
# What does `hexiopt fit` say to owners of two unequal cards who ask whether adapters (LoRA) of a model fit, and what do
# the tables say that trainers publish?
#
# Twelve pairs of cards, each in one PC, and six models of 7 to 70 billion parameters.

# %%
import math
import time

import pandas as pd

import hexiopt as hx
from experiments.studies.cases.cards import BATCH, NEEDS_GB, PAIRS, RANK, SEQ_LEN, STORAGES, pair_problem
from experiments.studies.frame.page import show
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import tokens
from hexiopt.study.jobs import provenance
from hexiopt.units import GIB

_NOTES = (
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


rows = []
for pair in PAIRS[: 1 if quick() else None]:
    for model in list(NEEDS_GB)[: 2 if quick() else None]:
        rows.append(ask(pair, model, "16bit"))
        if rows[-1]["fits"] != "yes":
            rows.append(ask(pair, model, "nf4"))
cases = pd.DataFrame(rows)


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


def claims(cases: pd.DataFrame) -> list[str]:
    """How many fit, where the plan is behind what owners do, and CPU seconds."""
    fit = cases[cases["fits"] == "yes"].groupby("storage").size()
    asked = cases.groupby("storage").size()
    lines = [
        f"{fit.get(storage, 0)} of {number} fit with {STORAGES[str(storage)]} matrices."
        for storage, number in asked.items()
    ]
    behind = cases[cases["behind"]]
    lines += [f"Behind what owners do: `{row.model}` on {row.cards}." for row in behind.itertuples()]
    if behind.empty:
        lines.append("In no case is the plan behind a layer split by memory, equal batches, or the best card alone.")
    cpu_s = cases["cpu_s"]
    return [*lines, f"CPU seconds a question: {cpu_s.median():.2f} at the median, {cpu_s.max():.2f} at most."]


tables = {}
for storage, of in cases.groupby("storage", sort=False):
    said = of["tokens_per_s"].map(tokens).where(of["fits"] == "yes", of["fits"])
    wide = of.assign(text=said + " (" + of["table"] + ")").pivot(index="cards", columns="model", values="text")
    order = cases["cards"].unique(), cases["model"].unique()
    tables[f"{STORAGES[str(storage)]} matrices"] = (
        wide.reindex(index=order[0], columns=order[1]).fillna("").rename_axis(index="cards")
    )
tables["What the line says, by what a table says (cases)"] = agreement(cases)
show(tables, claims(cases), notes=_NOTES)

# %%
measured = provenance()
show(claims=[f"Measured {measured['date']} on {measured['machine']}; code {measured['code'][:8]}."])

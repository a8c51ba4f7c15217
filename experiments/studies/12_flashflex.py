# %% [markdown]
# # Against the released FlashFlex scheduler, by its own formulas
#
# How do our plans compare with those of the released FlashFlex scheduler by FlashFlex's own formulas?
#
# Its cost and memory formulas (github.com/Relaxed-System-Lab/FlashFlex, `experimental/cost_modeling.py`) are
# reimplemented in `solvers/baselines/`: full recompute, 20 GB/s inside machines and 400 inside A800's, TFLOPS of 1024⁴,
# GB of 1024³. For each row of `experiments/data/flashflex_rows.yaml` the portfolio searches three times: under the
# formulas with free micro-batches; under the formulas with FlashFlex's micro-batch rule, as in the reference figures;
# and under our own cost and memory model, where FlashFlex's formulas then judge the plan.

# %%
import numpy as np
import pandas as pd

from experiments.studies.cases.flashflex import by_rule, judged, problem_of, read_rows
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import times, tokens
from solvers.baselines.flashflex.pricer import FlashFlexPricer

_LIMIT_S = 5.0
_FORMULAS, _RULE, _OWN, _OWN_RULE = "ours, its formulas", "ours, its rule", "ours, our model", "the same by its rule"

# %%
rows = read_rows()[: 1 if quick() else None]
limit_s = _LIMIT_S
specs = [
    SearchSpec(
        problem_of(row), "portfolio", limit_s, {"row": k, "search": name, **vars(row)}, pricer=pricer, judge=judged
    )
    for k, row in enumerate(rows, start=1)
    for name, pricer in ((_FORMULAS, FlashFlexPricer), (_RULE, by_rule), (_OWN, None))
]
rows = measured(specs)

# %%


# %%
judgements = ["formulas_tokens_per_s", "rule_tokens_per_s", "formulas_fit", "rule_fits"]
rows = rows.reindex(columns=[*rows.columns, *(name for name in judgements if name not in rows)])  # no plan at all
free, ruled = (grid(rows, "row", "search", name) for name in judgements[:2])
about = rows.drop_duplicates("row").set_index("row")
reached = pd.DataFrame(
    {"annealer": about["annealer_tokens_per_s"], _FORMULAS: free[_FORMULAS], _RULE: ruled[_RULE], _OWN: free[_OWN]}
).assign(**{_OWN_RULE: ruled[_OWN]})
over = reached.div(about["flashflex_tokens_per_s"], axis=0)
mean = np.exp(np.log(over).mean(skipna=False))  # no value where a search has no plan
cells = about[["setting", "model", "inter_gb_per_s", "flashflex_tokens_per_s"]].astype(object)
cells.columns = pd.Index(["setting", "model", "GB/s", "FlashFlex"])
cells["FlashFlex"] = cells["FlashFlex"].map(tokens)
for name in reached:
    cells[name], cells[f"× ({name})"] = reached[name].map(tokens), over[name].map(times)
fits = {(1.0, 1.0): "yes", (1.0, 0.0): "not by rule", (0.0, 1.0): "by rule", (0.0, 0.0): "no"}
own = rows[rows["search"] == _OWN].set_index("row")
cells["its memory accepts"] = [fits.get(k, "") for k in zip(own["formulas_fit"], own["rule_fits"], strict=True)]
last = {"model": "geometric mean"} | {f"× ({name})": times(mean[name]) for name in over}
cells = pd.concat([cells, pd.DataFrame([last])]).fillna("").set_index("setting")
figure, (ax,) = framed(
    "Our plans beside FlashFlex's, by FlashFlex's own formulas",
    f"Throughput over FlashFlex's plan; portfolio, {_LIMIT_S:g} s a search",
)
names = [f"{row.setting} · {row.model}\n{row.inter_gb_per_s:g} GB/s" for row in about.itertuples()]
relative_bars(ax, over.set_axis(names))
ax.set_ylabel("throughput (FlashFlex = 1)")
legend(figure, ax, 5)
said = [
    f"{name} reaches {times(mean[name])} of FlashFlex's plan (geometric mean), {over[name].min():.2f} × at least."
    for name in over.columns[1:]
    if over[name].notna().all()
]
show({"": cells}, said, figure)

# %%
assert quick() or over[_RULE].min() > 1.5, "A plan made for FlashFlex's rule is well ahead of FlashFlex's."

# %% [markdown]
# Tokens/s by FlashFlex's formulas; × is the ratio to FlashFlex's plan. *FlashFlex* is its released search, corrected to
# count only the sequences that it processes, 30 iterations for each of 1 to 8 pipelines; *annealer* is an earlier,
# quick one of ours. Its rule fixes 8 micro-batches of ⌊32 / pipelines⌋ sequences for every pipeline; its formulas alone
# allow any. *its formulas*: our search minimises them, micro-batches free. *its rule*: likewise, with the rule imposed,
# as in both reference columns. *our model*: our search minimises our own cost model; FlashFlex's formulas judge the
# plan as it is, and then with the rule imposed, for which the plan was not made. Plans have no replicated stages. GB/s
# are those between machines.

# %%
conditions(specs, rows)

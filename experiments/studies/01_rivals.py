# %% [markdown]
# # Against other planners and systems
#
# How do our plans compare with those of other planners?
#
# On the same mixed clusters; with existing systems on homogeneous clusters of similar FLOPS; with random partitions of
# the same seed; and with the released FlashFlex scheduler by its own formulas. All else is priced by our cost model.

# %%
from typing import Any

import numpy as np
import pandas as pd

from experiments.studies.cases.flashflex import by_rule, judged, problem_of, read_rows
from experiments.studies.frame import published
from experiments.studies.frame.figures import (
    MARKERS,
    PAPER_COLOUR,
    framed,
    hue,
    legend,
    progress,
    relative_bars,
    row_marks,
    spread,
)
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import HOMOGENEOUS, LOWER_BOUND, OURS, RIVALS, Planner
from experiments.studies.frame.rows import grid, time_to_s
from experiments.studies.frame.search import BOUND, SearchSpec, measured
from experiments.studies.frame.settings import first_models, quick, settings
from experiments.studies.frame.words import bold, change, seconds, share, span, times, tokens
from solvers.baselines.flashflex.pricer import FlashFlexPricer

_OURS_S, _BOUND_S, _RIVAL_S, _PARTITION_S, _FORMULAS_S = 20.0, 40.0, 10.0, 6.0, 5.0
_COMPARED = [p.label for p in RIVALS if p.solver in published.paper("hexiscale")["rivals"]["names"]]


def mean(ratios: Any, axis: int = 0) -> Any:
    """The geometric mean."""
    return np.exp(np.log(ratios).mean(axis=axis))


# %% [markdown]
# ## Other planners on the same mixed clusters

# %%
limits_s = {OURS: _OURS_S, LOWER_BOUND: _BOUND_S, **dict.fromkeys(RIVALS, _RIVAL_S)}
rows = measured(
    [
        planner.search(setting.problem(), limit_s, setting.labels)
        for setting in settings()
        for planner, limit_s in limits_s.items()
    ]
)


# %%
def rival_claims(over: pd.DataFrame, ours: pd.DataFrame) -> list[str]:
    """The rivals of the paper against its range, every rival that beats ours, and every missing plan."""
    lines = []
    for label, ratios in over.iterrows():
        if label in _COMPARED and ratios.notna().any():
            lines.append(published.verdict(str(label), ratios.dropna(), "rivals"))
        without = [setting for setting in ratios.index[ratios.isna()] if pd.notna(ours.at[setting, "step_time_s"])]
        if without:
            lines.append(f"{label} has no plan at {', '.join(without)}.")
    for (setting, label), ratio in over.unstack().items():
        if ratio < 1.0:
            lines.append(f"{label} beats ours at setting {setting}: its step takes {1 - ratio:.2%} less.")
    for setting in ours.index[ours["step_time_s"].isna()]:
        lines.append(f"Ours has no plan at setting {setting}: {ours.at[setting, 'reason']}")
    return lines


ours = rows[rows["planner"] == OURS.label].set_index("setting")
gap = 1 - rows.groupby("setting", sort=False)["bound_s"].max() / ours["step_time_s"]
papers = [published.setting_figures(*pair) for pair in zip(ours["number"], ours["model"], strict=True)]
step_s = grid(rows[rows["solver"] != BOUND], "planner", "setting")
over = (step_s / step_s.loc[OURS.label]).drop(index=OURS.label)
statuses = grid(rows, "planner", "setting", "status").map(lambda status: str(status).replace("_", " "))
theirs = over.map(times).where(over.notna(), statuses)
theirs["geometric mean"] = mean(over, axis=1).map(times)
theirs["paper"] = [published.ratio_range("rivals") if label in _COMPARED else "" for label in theirs.index]
plans = {
    "ours: tokens/s": ours["tokens_per_s"].map(tokens),
    "MFU": ours["mfu"].map(share),
    "HexiScale's MFU (paper)": [share(paper.get("mfu", np.nan)) for paper in papers],
    "gap": gap.map(share),
}
figure, (ax,) = framed(
    "Our plan against other planners' on the same mixed cluster",
    f"Throughput by our cost model, ours over theirs; {_RIVAL_S:g} s a rival, {_OURS_S:g} s ours; band: what the paper "
    "says of Metis, AMP and Espresso",
    height=6.4,
    width=9.5,
)
offsets = reversed(spread(len(over.columns), 0.74))
styles = [
    {"color": hue(k), "marker": MARKERS[k % len(MARKERS)], "label": setting} for k, setting in enumerate(over.columns)
]
row_marks(ax, over, list(zip(offsets, styles, strict=True)))
paper = published.paper("hexiscale")["rivals"]
for y, label in enumerate(reversed(over.index)):
    if label in _COMPARED:
        ax.fill_betweenx((y - 0.42, y + 0.42), paper["least"], paper["most"], color=PAPER_COLOUR, zorder=0)
ax.set_xlabel("throughput over theirs")
legend(figure, ax, 4)
show(
    {"Our plans": pd.DataFrame(plans), "Our throughput over theirs": theirs.rename_axis("ours over")},
    rival_claims(over, ours),
    figure,
    "× is our throughput over the rival's on the same cluster. Each rival searches its own published plan space with "
    "its own estimate; of the plans that it ranks best, the best by our cost model counts, so that a poor estimate is "
    f"no handicap. Paper: {published.HEXISCALE}, {published.ratio_range('rivals')} over Metis, AMP and Espresso. gap: "
    "no plan of any planner has a step time shorter than ours by more than this share.",
)

# %%
assert quick() or (over.stack() >= 1.0).all(), "No rival's plan is faster than ours."

# %% [markdown]
# ## Homogeneous clusters of similar FLOPS

# %%
_MIXED, _PARTNER = "ours, mixed", ", homogeneous"
specs = []
for setting in settings():
    mixed, partner = setting.problem(), setting.partner_problem()
    here, there = (task.cluster.total_peak_flops(task.workload.precision) for task in (mixed, partner))
    labels = {**setting.labels, "flops": here / there}
    specs.append(OURS.search(mixed, _OURS_S, {**labels, "where": _MIXED}))
    for planner in (OURS, *HOMOGENEOUS):
        specs.append(planner.search(partner, _RIVAL_S, {**labels, "where": f"{planner.label}{_PARTNER}"}))
rows = measured(specs)


# %%
def homogeneous_claims(ratio: pd.Series, fastest: pd.Series, priced: pd.Series, measured: pd.Series) -> list[str]:
    """A summary of the ratios, and every baseline that does better than the paper says.

    By setting: our throughput over the best baseline's; its name; the MFU of Megatron-LM, priced, and as measured.
    """
    ratio, paper = ratio.dropna(), published.paper("hexiscale")["homogeneous"]
    if ratio.empty:
        return ["No setting has both a plan of ours and one of a baseline."]
    lines = [
        f"Against the best homogeneous baseline ours reaches {ratio.mean():.2f} × on average and {ratio.max():.2f} × "
        f"at most ({published.HEXISCALE}: {paper['mean']:g} × and {paper['most']:g} ×)."
    ]
    for setting, value in ratio[ratio < paper["mean"]].items():
        lines.append(
            f"{fastest[setting].removesuffix(_PARTNER)} does better here than the paper says at setting {setting}: "
            f"ours on the mixed cluster reaches {value:.2f} × of it, the paper's average is {paper['mean']:g} ×."
        )
    both = priced.notna() & measured.notna()
    if (priced[both] > measured[both]).any():
        lines.append(
            f"By our cost model Megatron-LM reaches an MFU of {span(priced[both], '.1%')} on the homogeneous "
            f"clusters; the paper's README measured {span(measured[both], '.1%')} on A100 PCIe over TCP."
        )
    return lines


per_s, mfu = (grid(rows, "setting", "where", values) for values in ("tokens_per_s", "mfu"))
first = rows.drop_duplicates("setting").set_index("setting")
papers = pd.DataFrame(
    [published.setting_figures(*pair) for pair in zip(first["number"], first["model"], strict=True)],
    index=per_s.index,
    columns=["flops", "mfu", "megatron", "times"],
    dtype=float,
)
there = per_s[[name for p in HOMOGENEOUS if (name := f"{p.label}{_PARTNER}") in per_s]]
best, flops = there.max(axis=1), first["flops"]
ratio = per_s[_MIXED] / best
cells = {"FLOPS": flops.map(lambda x: change(x, 2)), "(paper)": papers["flops"].map(lambda x: change(x, 2))}
for name in there:
    cells[f"× {name.removesuffix(_PARTNER)}"] = (per_s[_MIXED] / there[name]).map(times)
megatron = mfu.get(f"{HOMOGENEOUS[0].label}{_PARTNER}", pd.Series(np.nan, mfu.index))
cells |= {
    "(paper, Megatron-LM)": papers["times"].map(times),
    "**× best**": ratio.map(times).map(bold),
    "MFU": mfu[_MIXED].map(share),
    "(paper, HexiScale)": papers["mfu"].map(share),
    "Megatron-LM's MFU": megatron.map(share),
    "(paper, Megatron)": papers["megatron"].map(share),
}
figure, (ax,) = framed(
    "Mixed clusters against homogeneous ones of like FLOPS",
    f"Throughput by our cost model over the best homogeneous baseline's; {_OURS_S:g} s on a mixed cluster, "
    f"{_RIVAL_S:g} s on a homogeneous one",
)
paper = published.paper("hexiscale")["homogeneous"]
band = f"paper: {paper['mean']:g} on average to {paper['most']:g} at most"
ax.axhspan(paper["mean"], paper["most"], color=PAPER_COLOUR, zorder=0, label=band)
bars = per_s.div(best.fillna(per_s.max(axis=1)), axis=0)
bars = bars[[_MIXED, *there, f"{OURS.label}{_PARTNER}"]].set_axis([f"{s}\n{change(f)} FLOPS" for s, f in flops.items()])
relative_bars(ax, bars)
ax.set_ylabel("throughput (best baseline = 1)")
legend(figure, ax, 3)
fastest = there.dropna(how="all").idxmax(axis=1)
show(
    {"Tokens/s": per_s.map(tokens), "Our throughput on the mixed cluster over theirs": pd.DataFrame(cells)},
    homogeneous_claims(ratio, fastest, megatron, papers["megatron"]),
    figure,
    "× is the throughput of our plan on the mixed cluster over that of the system on the homogeneous cluster, tokens/s "
    "over tokens/s. The paper's × is its measured MFU over Megatron's times FLOPS "
    f"({published.HEXISCALE}, README of its code). MFU counts causal attention half; the paper does not state how it "
    "counts.",
    name="homogeneous",
)

# %%
assert quick() or ratio.min() > 0.85, "Mixed clusters come near homogeneous ones of like FLOPS."

# %% [markdown]
# ## Random partitions of the same seed

# %%
RANDOM = Planner("random partition", "random")
PLANNERS = (RANDOM, Planner("HexiScale's partition", "hexiscale"), Planner("our portfolio", OURS.solver))
SEEDS = 2 if quick() else 5
rows = measured(
    [
        planner.search(setting.problem(), _PARTITION_S, setting.labels, seed)
        for setting in first_models()
        for planner in PLANNERS
        for seed in range(SEEDS)
    ]
)

# %%
random_s = rows[rows["planner"] == RANDOM.label].set_index(["setting", "seed"])["step_time_s"]
beside_s = pd.Series([random_s[key] for key in zip(rows["setting"], rows["seed"], strict=True)], index=rows.index)
rows = rows.assign(over_random=beside_s / rows["step_time_s"])
rows["catches_up_s"] = [time_to_s(points, s) for points, s in zip(rows["trajectory"], beside_s, strict=True)]
lines: dict[str, dict[str, str]] = {}
means: dict[str, list[float]] = {}
behind = []
for (setting, planner), runs in rows.groupby(["setting", "planner"], sort=False):
    line, ratios = lines.setdefault(setting, {}), runs["over_random"].dropna()
    line[f"{planner}: tokens/s"] = tokens(mean(runs["tokens_per_s"]))
    if planner == RANDOM.label:
        continue
    solver, caught = runs["solver"].iloc[0], runs["catches_up_s"].dropna()
    brackets = f" ({ratios.min():.2f} to {ratios.max():.2f})" if len(ratios) else ""
    line[f"× ({solver})"] = times(mean(ratios)) + brackets
    line[f"catches up ({solver})"] = seconds(caught.median())
    if len(ratios):
        means.setdefault(planner, []).append(mean(ratios))
    if late := len(ratios) - len(caught):
        behind.append(f"{planner} stays behind random partition in {late} of {len(ratios)} runs of setting {setting}.")
panels = rows.groupby("setting", sort=False)
figure, axes = framed(
    "How fast the searches converge",
    f"Step time of the best plan so far, by our cost model: median and range of {SEEDS} seeds, from where all have one",
    columns=len(panels),
    height=4.4,
    width=4.2 * len(panels) + (1.5 if len(panels) == 1 else 0.0),
)
for ax, (setting, runs) in zip(axes, panels, strict=True):
    for k, (planner, planner_runs) in enumerate(runs.groupby("planner", sort=False)):
        progress(ax, planner_runs, k, str(planner))
    ax.set_title(setting, fontsize=10, loc="left")
axes[0].set_ylabel("best step time so far (s)")
legend(figure, axes[0], 3)
show(
    {"": pd.DataFrame(lines).T.rename_axis("setting").assign(paper=published.ratio_range("random")).fillna("")},
    [*(published.verdict("Random partition", values, "random", name) for name, values in means.items()), *behind],
    figure,
    "Tokens/s are geometric means over the seeds, × of the ratios to random partition with the same seed (range in "
    "brackets). *catches up* is the median time after which a search is as good as random partition after its whole "
    "time. Random partition and HexiScale complete a partition in the same way (layers, recompute and batches are "
    "computed), so only the partition differs; the portfolio runs on two cores and does not search only partitions.",
    name="convergence",
)

# %%
assert quick() or min(means[PLANNERS[2].label]) > 1.0, "The portfolio is ahead of random partitions."

# %% [markdown]
# ## The released FlashFlex scheduler, by its own formulas
#
# Its cost and memory formulas (github.com/Relaxed-System-Lab/FlashFlex, `experimental/cost_modeling.py`) are
# reimplemented in `solvers/baselines/`: full recompute, 20 GB/s inside machines and 400 inside A800's, TFLOPS of 1024⁴,
# GB of 1024³. For each row of `experiments/data/flashflex_rows.yaml` the portfolio searches three times: under the
# formulas with free micro-batches; under the formulas with FlashFlex's micro-batch rule, as in the reference figures;
# and under our own cost and memory model, where FlashFlex's formulas then judge the plan.

# %%
_FREE, _RULE, _MODEL, _MODEL_RULE = "ours, its formulas", "ours, its rule", "ours, our model", "the same by its rule"
specs = [
    SearchSpec(
        problem_of(row), OURS.solver, _FORMULAS_S, {"row": k, "search": name, **vars(row)}, pricer=pricer, judge=judged
    )
    for k, row in enumerate(read_rows()[: 1 if quick() else None], start=1)
    for name, pricer in ((_FREE, FlashFlexPricer), (_RULE, by_rule), (_MODEL, None))
]
rows = measured(specs)

# %%
judgements = ["formulas_tokens_per_s", "rule_tokens_per_s", "formulas_fit", "rule_fits"]
rows = rows.reindex(columns=[*rows.columns, *(name for name in judgements if name not in rows)])  # no plan at all
free, ruled = (grid(rows, "row", "search", name) for name in judgements[:2])
about = rows.drop_duplicates("row").set_index("row")
reached = pd.DataFrame(
    {"annealer": about["annealer_tokens_per_s"], _FREE: free[_FREE], _RULE: ruled[_RULE], _MODEL: free[_MODEL]}
).assign(**{_MODEL_RULE: ruled[_MODEL]})
over = reached.div(about["flashflex_tokens_per_s"], axis=0)
of_all = np.exp(np.log(over).mean(skipna=False))  # no value where a search has no plan
cells = about[["setting", "model", "inter_gb_per_s", "flashflex_tokens_per_s"]].astype(object)
cells.columns = pd.Index(["setting", "model", "GB/s", "FlashFlex"])
cells["FlashFlex"] = cells["FlashFlex"].map(tokens)
for name in reached:
    cells[name], cells[f"× ({name})"] = reached[name].map(tokens), over[name].map(times)
fits = {(1.0, 1.0): "yes", (1.0, 0.0): "not by rule", (0.0, 1.0): "by rule", (0.0, 0.0): "no"}
by_model = rows[rows["search"] == _MODEL].set_index("row")
cells["its memory accepts"] = [
    fits.get(k, "") for k in zip(by_model["formulas_fit"], by_model["rule_fits"], strict=True)
]
last = {"model": "geometric mean"} | {f"× ({name})": times(of_all[name]) for name in over}
cells = pd.concat([cells, pd.DataFrame([last])]).fillna("").set_index("setting")
figure, (ax,) = framed(
    "Our plans beside FlashFlex's, by FlashFlex's own formulas",
    f"Throughput over FlashFlex's plan; portfolio, {_FORMULAS_S:g} s a search",
)
names = [f"{row.setting} · {row.model}\n{row.inter_gb_per_s:g} GB/s" for row in about.itertuples()]
relative_bars(ax, over.set_axis(names))
ax.set_ylabel("throughput (FlashFlex = 1)")
legend(figure, ax, 5)
show(
    {"": cells},
    [
        f"{name} reaches {times(of_all[name])} of FlashFlex's plan (geometric mean), {over[name].min():.2f} × at least."
        for name in over.columns[1:]
        if over[name].notna().all()
    ],
    figure,
    "Tokens/s by FlashFlex's formulas; × is the ratio to FlashFlex's plan. *FlashFlex* is its released search, "
    "corrected to count only the sequences that it processes, 30 iterations for each of 1 to 8 pipelines; *annealer* "
    "is an earlier, quick one of ours. Its rule fixes 8 micro-batches of ⌊32 / pipelines⌋ sequences for every "
    "pipeline; its formulas alone allow any. *its formulas*: our search minimises them, micro-batches free. *its "
    "rule*: likewise, with the rule imposed, as in both reference columns. *our model*: our search minimises our own "
    "cost model; FlashFlex's formulas judge the plan as it is, and then with the rule imposed, for which the plan was "
    "not made. Plans have no replicated stages. GB/s are those between machines.",
    name="flashflex",
)

# %%
assert quick() or over[_RULE].min() > 1.5, "A plan made for FlashFlex's rule is well ahead of FlashFlex's."

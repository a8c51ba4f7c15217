# %% [markdown]
# # Sequence layouts on long contexts
#
# What do uneven sequence layouts give on long contexts, alone and together with pipelines?
#
# Against Ring Attention, Ulysses and USP, which divide sequences evenly: on HexiSeq's mixed testbed (16K to 256K
# tokens), on its simulated clusters 1 to 3 (to 1,024K), and on its clusters 4 and 5 against homogeneous ones of similar
# FLOPS. Then what each freedom of a layout is worth, layouts and pipelines planned together, and how long scheduling
# takes.

# %%
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.frame import published
from experiments.studies.frame.figures import (
    PAPER_COLOUR,
    framed,
    gpus_axis,
    legend,
    line,
    relative_bars,
    row_bars,
    seconds_axis,
    sizes_axis,
)
from experiments.studies.frame.long_contexts import (
    ABLATION,
    ALL,
    BASELINE_S,
    BASELINES,
    BOUND_S,
    EVEN,
    GLOBAL_BATCH,
    HEXISEQ,
    IF_BY_PEAK,
    INSIDE,
    JOINT,
    LAYOUTS,
    OURS_S,
    PAIRS,
    PARTNERS,
    SIMULATIONS,
    TESTBED,
    VARIANTS,
    LongSetting,
    chosen,
    context,
)
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import LOWER_BOUND, OURS
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.search import BOUND, SearchSpec, measured
from experiments.studies.frame.settings import quick, sizes, synthetic
from experiments.studies.frame.words import bold, change, seconds, share, span, times, tokens
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.report.style import INK
from solvers.sequence.token_allocation import RateTable

_OURS, _HERE, _THERE = HEXISEQ.label, ", mixed", ", homogeneous"
_LABELS = [planner.label for planner in BASELINES]
_LIMITS_S = {HEXISEQ: OURS_S, **dict.fromkeys(BASELINES, BASELINE_S), LOWER_BOUND: BOUND_S}
_NOTES = (
    "× is the throughput of our plan over that of the baseline, each with its full space: data-parallel degrees, "
    "micro-batch sizes, recompute, ZeRO and orders of tokens of its own. balance: the value of dividing compute by "
    "calibrated speeds over equal shares on all GPUs, without communication and memory. gap: of our plan to the best "
    "bound that any search or the bound of all plans has proven."
)
_LIMITS = f"{OURS_S:g} s a search of ours, {BASELINE_S:g} s of a baseline"
_BY_PEAK = " × best by peak: the same where every type of GPU is as efficient as an A100."
_PAIR_NOTES = (
    "× is the throughput of our plan on the mixed cluster over that on the homogeneous cluster; FLOPS: the ratio of "
    "the clusters' dense peaks; possible: the ratio that no plan on the mixed cluster exceeds, by the bound of all "
    "plans (an H100 is worth fewer A100 by calibrated efficiencies than by peaks). By peak: the same where "
    "every type of GPU is as efficient as an A100."
)


def _contest(part: str, setting: LongSetting) -> list[SearchSpec]:
    problem = setting.problem()
    labels = {**setting.labels, "part": part, "balance": balance(problem)}
    return [planner.search(problem, limit_s, labels) for planner, limit_s in _LIMITS_S.items()]


def _pair(setting: LongSetting) -> list[SearchSpec]:
    mixed, partner = setting.problem(), setting.problem(cluster=PARTNERS[setting.cluster])
    mixed_flops, flops = (task.cluster.total_peak_flops(task.workload.precision) for task in (mixed, partner))
    labels = {**setting.labels, "part": "pairs", "flops": mixed_flops / flops}
    placed = [(mixed, HEXISEQ, _HERE), (mixed, LOWER_BOUND, ""), *((partner, p, _THERE) for p in (HEXISEQ, *BASELINES))]
    return [
        planner.search(problem, _LIMITS_S[planner], {**labels, "where": planner.label + where})
        for problem, planner, where in placed
    ]


def balance(problem: Problem) -> float:
    """The compute speedup of dividing the work by the GPUs' speeds, over equal shares."""
    rates = RateTable(PlanPricer(problem)).of(range(problem.cluster.num_devices), "none")
    sequence_s = rates.of_sequence_s(problem.workload.seq_len, problem.model.num_heads)
    return float(sequence_s.max() * (1.0 / sequence_s).mean())


# %%
specs = []
for part, settings in (("testbed", TESTBED), ("simulations", SIMULATIONS), ("pairs", PAIRS)):
    peaks = () if part == "testbed" else tuple(replace(setting, by_peak=True) for setting in chosen(settings))
    for setting in (*chosen(settings), *peaks):
        specs += _pair(setting) if part == "pairs" else _contest(part, setting)
rows = measured(specs)


# %%
def contest(rows: pd.DataFrame) -> pd.DataFrame:
    """By setting: tokens/s of each planner, the best baseline, our ratio to it, our gap, and the value of balance."""
    table = grid(rows, "setting", "planner", "tokens_per_s")
    baselines = table[[label for label in _LABELS if label in table]]
    ours = rows[rows["planner"] == _OURS].set_index("setting")
    table["best"] = baselines.dropna(how="all").idxmax(axis=1)
    table["ratio"] = table[_OURS] / baselines.max(axis=1)
    table["gap"] = 1 - rows.groupby("setting", sort=False)["bound_s"].max() / ours["step_time_s"]
    return table.join(ours[["mfu", "runtime_s", "balance", "place", "seq_len"]])


def show_contest(part: str, where: str) -> float:
    """Show ours beside the baselines on the same clusters, `where` in words; returns the mean of × best."""
    paper, rows_of_part = published.paper("hexiseq")[part], rows[rows["part"] == part]
    calibrated = rows_of_part["speeds"] == "calibrated"
    table = contest(rows_of_part[calibrated])
    peaks = None if calibrated.all() else contest(rows_of_part[~calibrated])
    cells = pd.DataFrame({"ours (tokens/s)": table[_OURS].map(tokens)})
    for label in _LABELS:
        if label in table:
            cells[label] = table[label].map(tokens)
    cells["best"] = table["best"].fillna("none")
    cells["**× best**"] = table["ratio"].map(times).map(bold)
    if peaks is not None:
        cells["× best by peak"] = peaks["ratio"].map(times)
    cells["balance"], cells["MFU"], cells["gap"] = (
        table["balance"].map(times),
        table["mfu"].map(share),
        table["gap"].map(share),
    )
    cells["found in"] = table["runtime_s"].where(table[_OURS].notna()).map(lambda s: "" if pd.isna(s) else f"{s:.1f} s")
    lines = contest_claims(table, paper)
    if peaks is not None and peaks["ratio"].notna().any():
        lines.append(
            f"{IF_BY_PEAK}, ours would be {peaks['ratio'].mean():.2f} × as fast as the best baseline on average and "
            f"{peaks['ratio'].max():.2f} × at most ({peaks['ratio'].idxmax()})."
        )
    figure = _draw(table, paper, f"Long contexts: {where}")
    show({"": cells}, lines, figure, _NOTES + (_BY_PEAK if peaks is not None else ""), name=part)
    return float(table["ratio"].mean())


def contest_claims(table: pd.DataFrame, paper: dict[str, float]) -> list[str]:
    """A summary of the ratios next to the paper's, of where baselines are as good, and of missing plans."""
    both = table[table["ratio"].notna()]
    if both.empty:
        return ["No setting has both a plan of ours and one of a baseline."]
    ratio = both["ratio"]
    lines = [
        f"Against the best baseline of each setting ours is {ratio.mean():.2f} × as fast on average, "
        f"{ratio.max():.2f} × at most ({ratio.idxmax()}), {ratio.min():.2f} × at least ({ratio.idxmin()}); "
        f"{published.HEXISEQ}, says {paper['mean']:g} × on average and {paper['most']:g} × at most."
    ]
    if ratio.mean() < paper["mean"]:
        lines.append(
            "The baselines do better here than the paper says: equal shares alone would cost them "
            f"{table['balance'].mean():.2f} × on average, by how fast the cluster's GPUs are to each other."
        )
    possible = (ratio / (1 - both["gap"])).mean()
    lines.append(
        f"No plan at all takes less than {1 - table['gap'].max():.1%} of our step time anywhere, or "
        f"{1 - table['gap'].mean():.1%} on average: no planner could be more than {possible:.2f} × as fast as the best "
        "baseline on average."
    )
    lines += [f"Ours has no plan at {setting}." for setting in table.index[table[_OURS].isna()]]
    alone = table[table[_OURS].notna() & table["best"].isna()].index
    return lines + [f"No baseline has a plan at {setting}; ours has." for setting in alone]


def _draw(table: pd.DataFrame, paper: dict[str, float], title: str) -> Figure:
    """Throughput over the best baseline, and the certified gap, against the sequence length; one line per cluster."""
    below = f"Throughput by our cost model over the best of {', '.join(_LABELS)}; {_LIMITS}"
    figure, (left, right) = framed(title, below, columns=2)
    for k, (place, group) in enumerate(table.groupby("place", sort=False)):
        left.plot(group["seq_len"], group["ratio"], label=place, **line(k))
        right.plot(group["seq_len"], 100 * group["gap"], **line(k))
    label = f"paper: {paper['mean']:g} mean, {paper['most']:g} most"
    left.axhspan(paper["mean"], paper["most"], color=PAPER_COLOUR, zorder=0, label=label)
    left.set_ylabel("throughput (best baseline = 1)")
    left.set_ylim(bottom=min(0.95, left.get_ylim()[0]))
    right.set_ylabel("gap to the lower bound (%)")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        sizes_axis(ax, "tokens of a sequence", {int(n): context(int(n)) for n in table["seq_len"].unique()})
    legend(figure, left, 4)
    return figure


def pair(rows: pd.DataFrame) -> pd.DataFrame:
    """By setting: tokens/s here and there, the best baseline there, ours over it and over ours, and what is
    possible."""
    table = grid(rows, "setting", "where", "tokens_per_s").drop(columns=BOUND)
    there = table[[name for label in _LABELS if (name := label + _THERE) in table]]
    table["best"] = there.dropna(how="all").idxmax(axis=1).str.removesuffix(_THERE)
    table["ratio"] = table[_OURS + _HERE] / there.max(axis=1)
    table["over_ours"] = table[_OURS + _HERE] / table[_OURS + _THERE]
    mixed = rows[rows["where"].isin([_OURS + _HERE, BOUND])].groupby("setting", sort=False)
    baselines_s = grid(rows, "setting", "where")[list(there)].min(axis=1)
    table["possible"] = baselines_s / mixed["bound_s"].max()
    return table.join(mixed["flops"].first())


def show_pairs() -> None:
    """Show mixed clusters beside homogeneous ones."""
    table, peaks = (
        pair(rows[(rows["part"] == "pairs") & (rows["speeds"] == speeds)]) for speeds in ("calibrated", "by peak")
    )
    cells = pd.DataFrame({"FLOPS": table["flops"].map(change)})
    for name in (_OURS + _HERE, _OURS + _THERE, *(label + _THERE for label in _LABELS)):
        if name in table:
            cells[f"{name} (tokens/s)" if name == _OURS + _HERE else name] = table[name].map(tokens)
    cells["best"], cells["**× best**"] = table["best"].fillna("none"), table["ratio"].map(times).map(bold)
    cells["possible"] = table["possible"].map(lambda ratio: "" if pd.isna(ratio) else f"≤ {ratio:.2f} ×")
    cells["× best by peak"], cells["× ours"] = peaks["ratio"].map(times), table["over_ours"].map(times)
    figure, (ax,) = framed(
        "Long contexts: mixed clusters against homogeneous ones of like FLOPS",
        f"Throughput by our cost model over the best homogeneous baseline's; {_LIMITS}",
    )
    within = published.paper("hexiseq")["pairs"]
    ax.axhspan(1 - within, 1 + within, color=PAPER_COLOUR, zorder=0, label=f"paper: within {within:.1%}")
    there = [label + _THERE for label in _LABELS if label + _THERE in table]
    bars = pd.DataFrame({_OURS + _HERE: table[_OURS + _HERE], "the same, speeds by peak": peaks[_OURS + _HERE]})
    bars = bars.join(table[[*there, _OURS + _THERE]])
    best = table[there].max(axis=1)
    bars = bars.div(best.fillna(bars.max(axis=1)), axis=0)
    relative_bars(ax, bars.rename(index=lambda setting: setting.replace(" · ", "\n")))
    ax.set_ylabel("throughput (best baseline = 1)")
    legend(figure, ax, 3)
    lines = pair_claims(table)
    if peaks["ratio"].notna().any():
        lines.append(f"{IF_BY_PEAK}, mixed clusters would reach {span(peaks['ratio'], '.3f')} ×.")
    show({"": cells}, lines, figure, _PAIR_NOTES, name="pairs")


def pair_claims(table: pd.DataFrame) -> list[str]:
    """The distance of the mixed clusters to the homogeneous ones, next to the paper's."""
    within, ratio, lines = published.paper("hexiseq")["pairs"], table["ratio"].dropna(), []
    if len(ratio):
        lines.append(
            f"Mixed clusters reach {span(ratio, '.3f')} × of the best baseline on the homogeneous cluster "
            f"({published.HEXISEQ}: within {within:.1%})."
        )
    lines += [
        f"{setting} lacks a plan on one of its clusters." for setting in table.index.difference(ratio.index, sort=False)
    ]
    for setting, value in ratio[ratio < 1 - within].items():
        lines.append(f"At {setting} the mixed cluster stays {1 - value:.1%} behind {table.at[setting, 'best']}.")
    if table["possible"].max() < 1 - within:
        lines.append(
            f"No plan on a mixed cluster can: the bound of all plans leaves {table['possible'].max():.2f} × at most."
        )
    return lines


# %% [markdown]
# ## On a mixed testbed of H100 and A100

# %%
over_testbed = show_contest("testbed", "on a mixed testbed of H100 and A100")

# %% [markdown]
# ## On clusters of three and four GPU types

# %%
over_simulations = show_contest("simulations", "on clusters of three and four GPU types")
assert quick() or min(over_testbed, over_simulations) > 1.1, "Uneven layouts are a tenth faster than even ones."

# %% [markdown]
# ## Mixed clusters against homogeneous ones of like FLOPS

# %%
show_pairs()

# %% [markdown]
# ## What each freedom of a layout is worth

# %%
rows = measured(
    [
        SearchSpec(
            setting.problem(),
            HEXISEQ.solver,
            OURS_S,
            {"setting": setting.label, "variant": name, "tokens": setting.global_batch * setting.seq_len},
            options=layout.options,
        )
        for setting in chosen(ABLATION)
        for name, layout in VARIANTS.items()
    ]
)

# %%
best_s = credited(grid(rows, "variant", "setting"), INSIDE)
gain = (best_s.loc[EVEN] / best_s).drop(index=EVEN)
per_s = rows.groupby("setting", sort=False)["tokens"].first() / best_s
lines = [
    f"{name} reaches {span(ratios.dropna(), '.3f')} × of even layouts."
    for name, ratios in gain.iterrows()
    if ratios.notna().any()
]
lines += [f"{setting} has no plan with {name}." for (setting, name), s in best_s.unstack().items() if pd.isna(s)]
figure, (ax,) = framed(
    "What each freedom of a sequence layout is worth",
    f"Throughput over even layouts, by our cost model; hexiseq, {OURS_S:g} s a search",
    height=5.0,
    width=9.5,
)
row_bars(ax, gain - 1)
ax.set_xlabel("more throughput than even layouts (%)")
legend(figure, ax, 2)
ends = {name: per_s.loc[name].map(tokens) for name in (EVEN, ALL)}
cells = gain.map(lambda ratio: "no plan" if pd.isna(ratio) else f"{ratio:.3f} ×").rename_axis("layouts")
show(
    {"Tokens/s": pd.DataFrame(ends).rename_axis("setting"), "Throughput over even layouts": cells},
    lines,
    figure,
    "Throughput over that of even layouts, which have equally many tokens and heads on every device and groups of one "
    "size. A layout with fewer freedoms is valid with more, so a variant is credited with the best plan of any search "
    "inside it.",
    name="layouts",
)

# %%
even_inside = [name for name in gain.index if EVEN in INSIDE[name]]
assert (gain.loc[even_inside].stack() >= 1 - 1e-9).all(), "A variant that holds even layouts is no slower."
assert quick() or (gain.loc["uneven tokens only"] > 0.95 * gain.loc[ALL]).all(), "Nearly all comes from uneven tokens."

# %% [markdown]
# ## Pipelines and layouts planned together
#
# At 128K tokens, on clusters of both papers and on a small lab. pipelines only: the portfolio without sequence layouts;
# sequence only: `hexiseq` with data-parallel pipelines of one stage each, as in its paper; joint: the portfolio, which
# decides stage by stage between tensor parallelism and a sequence layout.

# %%
_JOINT_S = 20.0
PIPELINES, SEQUENCES, TOGETHER = "pipelines only", "sequence only", "joint"
WAYS = {
    PIPELINES: (OURS.solver, Space(), _JOINT_S),
    SEQUENCES: (HEXISEQ.solver, replace(LAYOUTS, num_stages=1), _JOINT_S),
    TOGETHER: (OURS.solver, LAYOUTS, _JOINT_S),
    "bound": (BOUND, LAYOUTS, BOUND_S),
}
rows = measured(
    [
        SearchSpec(
            setting.problem(space=space),
            solver,
            limit_s,
            {"setting": setting.label, "place": setting.place, "way": way},
        )
        for setting in chosen(JOINT)
        for way, (solver, space, limit_s) in WAYS.items()
    ]
)


# %%
def joint_claims(joint: pd.Series, single: pd.Series, places: pd.Series) -> list[str]:
    """On how many clusters the joint plan beats both others, and by how much; tokens/s by setting."""
    better = joint[joint.fillna(0.0) > single.fillna(0.0)].index
    names = [places[s] + ("" if pd.isna(single[s]) else f" by {joint[s] / single[s] - 1:.1%}") for s in better]
    lines = [
        f"Joint plans beat both others on {len(better)} of {len(joint)} "
        f"clusters{': ' if names else ''}{', '.join(names)}."
    ]
    for setting, per_s in joint.items():
        if pd.isna(per_s):
            lines.append(f"{setting} has no joint plan.")
        elif single[setting] > per_s:
            behind = f"{single[setting] / per_s - 1:.1%}"
            lines.append(f"At {setting} the joint search ends {behind} behind the better single one.")
    return lines


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
    f"Throughput by our cost model over the better of the two single ways; {_JOINT_S:g} s a search",
)
bars = per_s.div(single.fillna(per_s[TOGETHER]), axis=0)
relative_bars(ax, bars.set_axis(together["place"].str.replace(" · ", "\n")))
ax.set_ylabel("throughput (better single way = 1)")
legend(figure, ax, 3)
show({"": cells}, joint_claims(per_s[TOGETHER], single, together["place"]), figure, name="joint")

# %%
assert quick() or (per_s[TOGETHER] > 0.99 * single).all(), "Joint searches end within 1 % of the better single way."

# %% [markdown]
# ## Scheduling time against cluster size
#
# Synthetic clusters of machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal
# shares; a GPT-style 7B, sequences of 128K tokens, one per sixteen GPUs and at least eight.

# %%
_SEQ_LEN, _QUICK_SEQ_LEN, _GPUS_A_SEQUENCE = 131_072, 4096, 16
_SCHEDULING_NOTES = (
    "first plan: seconds to the first plan; search: seconds in total; gap: to the best bound that any search has "
    "proven for that size. A search that ends at its limit, a baseline's included, has not covered its whole space."
)
_SCHEDULING_S = {128: 0.9, 1024: 9.0, 10_240: 110.0}  # (GPUs, at most; seconds): with loading, 1, 10 and 120 s


def limit_s(gpus: int) -> float:
    """The time limit on a cluster of `gpus`."""
    return next((limit for most, limit in _SCHEDULING_S.items() if gpus <= most), max(_SCHEDULING_S.values()))


SIZES = sorted({*sizes(), *([] if quick() else published.paper("hexiseq")["scheduling_s"])})
specs = []
for gpus in SIZES:
    workload = Workload(max(GLOBAL_BATCH, gpus // _GPUS_A_SEQUENCE), _QUICK_SEQ_LEN if quick() else _SEQ_LEN)
    problem = synthetic(gpus, "gpt_7b", workload, LAYOUTS)
    specs += [planner.search(problem, limit_s(gpus), {"gpus": gpus}) for planner in (HEXISEQ, *BASELINES)]
rows = measured(specs)


# %%
def scheduling_claims(rows: pd.DataFrame, paper_s: pd.Series) -> list[str]:
    """Our times next to the paper's, and the quality of our plans."""
    lines = []
    for gpus, size_rows in rows.groupby("gpus"):
        ours, best_s = (
            size_rows[size_rows["planner"] == HEXISEQ.label].iloc[0],
            size_rows["step_time_s"][size_rows["planner"] != HEXISEQ.label].min(),
        )
        if pd.isna(ours["step_time_s"]):
            lines.append(f"{gpus:,} GPUs: no plan in {seconds(ours['time_limit_s'])}.")
            continue
        paper_words = f" ({published.HEXISEQ}: {paper_s[gpus]:g} s)" if gpus in paper_s else ""
        than = "" if pd.isna(best_s) else f", {best_s / ours['step_time_s']:.2f} × as fast as the best baseline's"
        lines.append(f"{gpus:,} GPUs: a plan in {seconds(ours['runtime_s'])}{paper_words}{than}.")
    return lines


paper_s = pd.Series(published.paper("hexiseq")["scheduling_s"], dtype=float)
gap = 1 - rows.groupby("gpus")["bound_s"].transform("max") / rows["step_time_s"]
cells = pd.DataFrame(
    {
        "GPUs": rows["gpus"].map("{:,}".format),
        "planner": rows["planner"],
        "tokens/s": rows["tokens_per_s"].map(tokens),
        "gap": gap.map(share),
        "first plan": rows["first_plan_s"].map(seconds),
        "search": rows["runtime_s"].map(seconds),
        "(paper)": rows["gpus"].map(paper_s).where(rows["planner"] == HEXISEQ.label).map(seconds),
        "limit": rows["time_limit_s"].map(seconds),
        "memory": rows["peak_gib"].map("{:.1f} GiB".format),
        "status": rows["status"].str.replace("_", " "),
    }
)
spent_s = grid(rows, "gpus", "planner", "runtime_s")
figure, (ax,) = framed(
    "Scheduling time of sequence layouts",
    f"Synthetic clusters of H100, A100, RTX 4090 and RTX 3090; {'tiny' if quick() else 'gpt_7b'}",
    height=4.6,
    width=9.0,
)
for k, planner in enumerate(spent_s):
    ax.plot(spent_s.index, spent_s[planner], label=planner, **line(k))
known = paper_s[paper_s.index.isin(spent_s.index)]
if len(known):
    ax.plot(known.index, known, "*", color=INK, markersize=11, label="HexiSeq (paper)")
gpus_axis(ax, list(spent_s.index))
seconds_axis(ax, "search (s)")
legend(figure, ax, 5)
show({"": cells.set_index("GPUs")}, scheduling_claims(rows, paper_s), figure, _SCHEDULING_NOTES, name="scheduling")

# %%
ours = rows[rows["planner"] == HEXISEQ.label].set_index("gpus")["runtime_s"]
assert quick() or (ours[paper_s.index] < 1.1 * paper_s).all(), "Scheduling takes no longer than the paper's."

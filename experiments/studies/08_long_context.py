# %% [markdown]
# # Sequence layouts on long contexts
#
# Are uneven sequence layouts faster than Ring Attention, Ulysses and USP, which divide sequences evenly?
#
# On HexiSeq's mixed testbed (16K to 256K tokens), on its simulated clusters 1 to 3 (to 1,024K), and on its clusters 4
# and 5 against homogeneous ones of similar FLOPS.

# %%
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.frame import published
from experiments.studies.frame.figures import PAPER_COLOUR, framed, legend, line, relative_bars, sizes_axis
from experiments.studies.frame.long_contexts import (
    BASELINE_S,
    BASELINES,
    BOUND_S,
    HEXISEQ,
    IF_BY_PEAK,
    OURS_S,
    PAIRS,
    PARTNERS,
    SIMULATIONS,
    TESTBED,
    LongSetting,
    chosen,
    context,
)
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import LOWER_BOUND
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import BOUND, SearchSpec, measured
from experiments.studies.frame.settings import quick
from experiments.studies.frame.words import bold, change, share, span, times, tokens
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
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
    own, other = (one.cluster.total_peak_flops(one.workload.precision) for one in (mixed, partner))
    labels = {**setting.labels, "part": "pairs", "flops": own / other}
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
for part, own in (("testbed", TESTBED), ("simulations", SIMULATIONS), ("pairs", PAIRS)):
    peaks = () if part == "testbed" else tuple(replace(setting, by_peak=True) for setting in chosen(own))
    for setting in (*chosen(own), *peaks):
        specs += _pair(setting) if part == "pairs" else _contest(part, setting)
rows = measured(specs)


# %%
def contest(rows: pd.DataFrame) -> pd.DataFrame:
    """By setting: tokens/s of each planner, the best baseline, our ratio to it, our gap, and the value of balance."""
    found = grid(rows, "setting", "planner", "tokens_per_s")
    baselines = found[[label for label in _LABELS if label in found]]
    ours = rows[rows["planner"] == _OURS].set_index("setting")
    found["best"] = baselines.dropna(how="all").idxmax(axis=1)
    found["ratio"] = found[_OURS] / baselines.max(axis=1)
    found["gap"] = 1 - rows.groupby("setting", sort=False)["bound_s"].max() / ours["step_time_s"]
    return found.join(ours[["mfu", "runtime_s", "balance", "place", "seq_len"]])


def show_contest(part: str, where: str) -> float:
    """Show ours beside the baselines on the same clusters, `where` in words; returns the mean of × best."""
    paper, rows_of_part = published.paper("hexiseq")[part], rows[rows["part"] == part]
    calibrated = rows_of_part["speeds"] == "calibrated"
    own = contest(rows_of_part[calibrated])
    peaks = None if calibrated.all() else contest(rows_of_part[~calibrated])
    cells = pd.DataFrame({"ours (tokens/s)": own[_OURS].map(tokens)})
    for label in _LABELS:
        if label in own:
            cells[label] = own[label].map(tokens)
    cells["best"] = own["best"].fillna("none")
    cells["**× best**"] = own["ratio"].map(times).map(bold)
    if peaks is not None:
        cells["× best by peak"] = peaks["ratio"].map(times)
    cells["balance"], cells["MFU"], cells["gap"] = (
        own["balance"].map(times),
        own["mfu"].map(share),
        own["gap"].map(share),
    )
    cells["found in"] = own["runtime_s"].where(own[_OURS].notna()).map(lambda s: "" if pd.isna(s) else f"{s:.1f} s")
    said = claims(own, paper)
    if peaks is not None and peaks["ratio"].notna().any():
        said.append(
            f"{IF_BY_PEAK}, ours would be {peaks['ratio'].mean():.2f} × as fast as the best baseline on average and "
            f"{peaks['ratio'].max():.2f} × at most ({peaks['ratio'].idxmax()})."
        )
    figure = _draw(own, paper, f"Long contexts: {where}")
    show({"": cells}, said, figure, _NOTES + (_BY_PEAK if peaks is not None else ""), name=part)
    return float(own["ratio"].mean())


def claims(own: pd.DataFrame, paper: dict[str, float]) -> list[str]:
    """A summary of the ratios next to the paper's, of where baselines are as good, and of missing plans."""
    both = own[own["ratio"].notna()]
    if both.empty:
        return ["No setting has both a plan of ours and one of a baseline."]
    ratio = both["ratio"]
    said = [
        f"Against the best baseline of each setting ours is {ratio.mean():.2f} × as fast on average, "
        f"{ratio.max():.2f} × at most ({ratio.idxmax()}), {ratio.min():.2f} × at least ({ratio.idxmin()}); "
        f"{published.HEXISEQ}, says {paper['mean']:g} × on average and {paper['most']:g} × at most."
    ]
    if ratio.mean() < paper["mean"]:
        said.append(
            "The baselines do better here than the paper says: equal shares alone would cost them "
            f"{own['balance'].mean():.2f} × on average, by how fast the cluster's GPUs are to each other."
        )
    possible = (ratio / (1 - both["gap"])).mean()
    said.append(
        f"No plan at all takes less than {1 - own['gap'].max():.1%} of our step time anywhere, or "
        f"{1 - own['gap'].mean():.1%} on average: no planner could be more than {possible:.2f} × as fast as the best "
        "baseline on average."
    )
    said += [f"Ours has no plan at {setting}." for setting in own.index[own[_OURS].isna()]]
    alone = own[own[_OURS].notna() & own["best"].isna()].index
    return said + [f"No baseline has a plan at {setting}; ours has." for setting in alone]


def _draw(own: pd.DataFrame, paper: dict[str, float], title: str) -> Figure:
    """Throughput over the best baseline, and the certified gap, against the sequence length; one line per cluster."""
    below = f"Throughput by our cost model over the best of {', '.join(_LABELS)}; {_LIMITS}"
    figure, (left, right) = framed(title, below, columns=2)
    for k, (place, group) in enumerate(own.groupby("place", sort=False)):
        left.plot(group["seq_len"], group["ratio"], label=place, **line(k))
        right.plot(group["seq_len"], 100 * group["gap"], **line(k))
    label = f"paper: {paper['mean']:g} mean, {paper['most']:g} most"
    left.axhspan(paper["mean"], paper["most"], color=PAPER_COLOUR, zorder=0, label=label)
    left.set_ylabel("throughput (best baseline = 1)")
    left.set_ylim(bottom=min(0.95, left.get_ylim()[0]))
    right.set_ylabel("gap to the lower bound (%)")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        sizes_axis(ax, "tokens of a sequence", {int(n): context(int(n)) for n in own["seq_len"].unique()})
    legend(figure, left, 4)
    return figure


def pair(rows: pd.DataFrame) -> pd.DataFrame:
    """By setting: tokens/s here and there, the best baseline there, ours over it and over ours, and what is "
    "possible."""
    found = grid(rows, "setting", "where", "tokens_per_s").drop(columns=BOUND)
    there = found[[name for label in _LABELS if (name := label + _THERE) in found]]
    found["best"] = there.dropna(how="all").idxmax(axis=1).str.removesuffix(_THERE)
    found["ratio"] = found[_OURS + _HERE] / there.max(axis=1)
    found["over_ours"] = found[_OURS + _HERE] / found[_OURS + _THERE]
    mixed = rows[rows["where"].isin([_OURS + _HERE, BOUND])].groupby("setting", sort=False)
    baselines_s = grid(rows, "setting", "where")[list(there)].min(axis=1)
    found["possible"] = baselines_s / mixed["bound_s"].max()
    return found.join(mixed["flops"].first())


def show_pairs() -> None:
    """Show mixed clusters beside homogeneous ones."""
    own, peaks = (
        pair(rows[(rows["part"] == "pairs") & (rows["speeds"] == speeds)]) for speeds in ("calibrated", "by peak")
    )
    cells = pd.DataFrame({"FLOPS": own["flops"].map(change)})
    for name in (_OURS + _HERE, _OURS + _THERE, *(label + _THERE for label in _LABELS)):
        if name in own:
            cells[f"{name} (tokens/s)" if name == _OURS + _HERE else name] = own[name].map(tokens)
    cells["best"], cells["**× best**"] = own["best"].fillna("none"), own["ratio"].map(times).map(bold)
    cells["possible"] = own["possible"].map(lambda ratio: "" if pd.isna(ratio) else f"≤ {ratio:.2f} ×")
    cells["× best by peak"], cells["× ours"] = peaks["ratio"].map(times), own["over_ours"].map(times)
    figure, (ax,) = framed(
        "Long contexts: mixed clusters against homogeneous ones of like FLOPS",
        f"Throughput by our cost model over the best homogeneous baseline's; {_LIMITS}",
    )
    within = published.paper("hexiseq")["pairs"]
    ax.axhspan(1 - within, 1 + within, color=PAPER_COLOUR, zorder=0, label=f"paper: within {within:.1%}")
    there = [label + _THERE for label in _LABELS if label + _THERE in own]
    bars = pd.DataFrame({_OURS + _HERE: own[_OURS + _HERE], "the same, speeds by peak": peaks[_OURS + _HERE]})
    bars = bars.join(own[[*there, _OURS + _THERE]])
    best = own[there].max(axis=1)
    bars = bars.div(best.fillna(bars.max(axis=1)), axis=0)
    relative_bars(ax, bars.rename(index=lambda setting: setting.replace(" · ", "\n")))
    ax.set_ylabel("throughput (best baseline = 1)")
    legend(figure, ax, 3)
    said = pair_claims(own)
    if peaks["ratio"].notna().any():
        said.append(f"{IF_BY_PEAK}, mixed clusters would reach {span(peaks['ratio'], '.3f')} ×.")
    show({"": cells}, said, figure, _PAIR_NOTES, name="pairs")


def pair_claims(own: pd.DataFrame) -> list[str]:
    """The distance of the mixed clusters to the homogeneous ones, next to the paper's."""
    within, ratio, said = published.paper("hexiseq")["pairs"], own["ratio"].dropna(), []
    if len(ratio):
        said.append(
            f"Mixed clusters reach {span(ratio, '.3f')} × of the best baseline on the homogeneous cluster "
            f"({published.HEXISEQ}: within {within:.1%})."
        )
    said += [
        f"{setting} lacks a plan on one of its clusters." for setting in own.index.difference(ratio.index, sort=False)
    ]
    for setting, value in ratio[ratio < 1 - within].items():
        said.append(f"At {setting} the mixed cluster stays {1 - value:.1%} behind {own.at[setting, 'best']}.")
    if own["possible"].max() < 1 - within:
        said.append(
            f"No plan on a mixed cluster can: the bound of all plans leaves {own['possible'].max():.2f} × at most."
        )
    return said


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

# %%
conditions(specs, rows)

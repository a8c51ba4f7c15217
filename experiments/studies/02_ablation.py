# %% [markdown]
# # What each freedom is worth
#
# What is each freedom of a plan worth?
#
# The portfolio plans HexiScale's settings without each asymmetry in turn, and without all of them; then within what
# Megatron-LM expresses, with equal layers in all stages and with any; then with split backwards, free depths and
# messages in 8 bits, which are off by default. Last, how good is the order of a step?

# %%
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.cases.split_and_depth import ALL, BOTH, FAST, MODES, NEITHER, SLOW, problems, step_times
from experiments.studies.frame.figures import framed, legend, relative_bars, row_bars
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import credited, grid
from experiments.studies.frame.search import CPU_LIMITS, measured
from experiments.studies.frame.settings import first_models, quick
from experiments.studies.frame.words import change, span, tokens
from experiments.studies.orders.comparison import compare, summary
from experiments.studies.orders.picture import draw_ratios
from experiments.studies.orders.pipelines import sample
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
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
WHOLE, NONE = "the whole plan space", "none of them (all off)"
SPACES = {
    WHOLE: PlanSpace(),
    **{_LABELS[name]: PlanSpace((name,)) for name in SWITCHES},
    "1F1B only": PlanSpace(schedule=ONE_F_ONE_B.name),
    NONE: PlanSpace(SWITCHES),
}
INSIDE = {name: [other for other in SPACES if space.holds(SPACES[other])] for name, space in SPACES.items()}

# %% [markdown]
# ## Without each asymmetry, and without all

# %%
rows = measured(
    [
        OURS.search(
            setting.problem(space=freedoms.space, schedule=freedoms.schedule),
            _LIMIT_S,
            {**setting.labels, "space": name},
        )
        for setting in first_models()
        for name, freedoms in SPACES.items()
    ]
)


# %%
def claims(step_s: pd.DataFrame, best_s: pd.DataFrame, longer: pd.DataFrame) -> list[str]:
    """The value of all freedoms and of the most valuable one, those worth nothing, and searches that fell short."""
    lines, together = [], longer.loc[NONE]
    if together.notna().any():
        lines.append(f"Without any asymmetry a step takes {span(together, '.1%')} longer.")
    single = longer.drop(index=NONE).dropna(how="all")
    means, worst = single.mean(axis=1), single.max(axis=1)
    if len(means) and means.max() > _SMALL:
        lines.append(f"The most expensive single loss is “{means.idxmax()}”: {means.max():.1%} on average.")
    if free := [f"“{name}”" for name in worst.index[worst <= _SMALL]]:
        lines.append(f"By these searches, nothing is lost by {', '.join(free)}.")
    for setting in step_s:
        over = step_s.at[WHOLE, setting] / best_s.at[WHOLE, setting] - 1
        if over > _SMALL:
            lines.append(
                f"At setting {setting} the search of the whole space stops {over:.1%} above the best known plan, "
                f"which “{step_s[setting].idxmin()}” gave."
            )
        lines += [f"Setting {setting} has no plan found in “{name}”." for name in best_s.index[best_s[setting].isna()]]
    if together.notna().any():
        sums = single.drop(index="1F1B only", errors="ignore").sum()
        lines.append(
            f"Single losses sum to {span(sums, '.1%')}, and together they are {span(together, '.1%')}: one freedom may "
            "make up for another."
        )
    return lines


step_s = grid(rows, "space", "setting")
best_s = credited(step_s, INSIDE)
longer = (best_s / best_s.loc[WHOLE] - 1).drop(index=WHOLE)
per_s = rows.groupby("setting", sort=False)["tokens"].first() / best_s.loc[WHOLE]
whole = pd.DataFrame(
    {
        "whole plan space: tokens/s": per_s.map(tokens),
        "its own search": (step_s.loc[WHOLE] / best_s.loc[WHOLE]).map(lambda ratio: change(ratio, 2)),
    }
)
figure, (ax,) = framed(
    "What each asymmetry is worth",
    f"How much longer a step takes without it, by our cost model; portfolio, {_LIMIT_S:g} s a search",
    height=5.0,
    width=9.5,
)
row_bars(ax, longer)
ax.axhline(0.5, color=FAINT, linewidth=1)
ax.set_xlabel("longer step (%)")
legend(figure, ax, 4)
lost = (longer + 1).map(change).replace("", "no plan").rename_axis("without it")
show(
    {"": whole.rename_axis("setting"), "How much longer a step takes": lost},
    claims(step_s, best_s, longer),
    figure,
    "The increase of the step time over that in the whole plan space. A plan of a smaller space is in every larger "
    "one, so a space is credited with the best plan of any search inside it.",
)

# %%
assert (longer.stack() >= -1e-9).all(), "The whole space holds every other."
assert quick() or longer.loc[NONE].min() > 0.1, "All freedoms together are worth a tenth of a step and more."

# %% [markdown]
# ## Uneven layers for Megatron-LM
#
# What an uneven layer split gains for Megatron-LM as it is: the portfolio plans within what it expresses
# (`space.preset=megatron`), once with equal layers in all stages, which is what it does by default, and once with any,
# which `--pipeline-model-parallel-layout` takes. Stages of equal layers may differ by one layer here, where the layers
# do not divide; Megatron-LM's default refuses then.

# %%
_STEPS, _QUICK_STEPS, _STEPS_LIMIT_S = 1000, 20, 600.0  # the steps bind
EQUAL, FREE = "equal layers", "any layers"
_MODELS = ("llama2_7b", "llama3_8b", "llama2_13b")
_SIZES = {"h100_80gb_sxm": (50.0, "H100 SXM"), "a100_80gb_sxm": (25.0, "A100 SXM"), "rtx_4090": (12.5, "RTX 4090")}
_MIXED = (*(f"hexiscale_setting_{k}" for k in (1, 2, 3)), "hexiscale_case_study", "hexiseq_testbed")


def clusters() -> Mapping[str, Cluster]:
    """Five homogeneous and five mixed clusters by their name in tables; a small one if `quick()`."""
    if quick():
        return {"small, mixed": named_cluster("small_mixed")}
    return {
        "16 × A800 PCIe": named_cluster("homogeneous_2x8_a800_pcie"),
        "32 × A800 PCIe": named_cluster("homogeneous_4x8_a800_pcie"),
        **{f"32 × {words}": Cluster.of({gpu: 32}, rate, name=gpu) for gpu, (rate, words) in _SIZES.items()},
        **{f"{name}, mixed": named_cluster(name) for name in _MIXED},
    }


specs = []
for name, cluster in clusters().items():
    for model in ("tiny",) if quick() else _MODELS:
        workload = Workload(32, 512) if quick() else Workload()
        problem = restrict(Problem(cluster, named_model(model), workload), TRAINERS["megatron"])
        for split in (EQUAL, FREE):
            space = problem.space.replace(uneven_layers=split == FREE)
            labels = {"cluster": name, "model": model, "setting": f"{name} · {model}", "split": split}
            spec = OURS.search(problem.replace(space=space), _STEPS_LIMIT_S, labels)
            specs.append(replace(spec, max_steps=_QUICK_STEPS if quick() else _STEPS))
rows = measured(specs)


# %%
def split_claims(gain: pd.DataFrame) -> list[str]:
    """The gains on homogeneous and on mixed clusters, and where there is none."""
    mixed, lines = gain.index.str.endswith("mixed"), []
    for kind, kind_gain in (("homogeneous", gain[~mixed]), ("mixed", gain[mixed])):
        values = kind_gain.stack().dropna()
        if len(values):
            without = int((values <= _SMALL).sum())
            where = f"in {without} of {len(values)} cases it gains nothing" if without else "it gains in each case"
            gains = f"{span(values, '.1%')}, {values.mean():.1%} on average"
            lines.append(f"On {kind} clusters an uneven split gains {gains}; {where}.")
    return lines


best_s = credited(grid(rows, "split", "setting"), {EQUAL: [EQUAL], FREE: [EQUAL, FREE]})
gain = (best_s.loc[EQUAL] / best_s.loc[FREE] - 1).rename("gain")
about = rows.drop_duplicates("setting").set_index("setting")[["cluster", "model"]]
table = about.join(gain).pivot(index="cluster", columns="model", values="gain")
table = table.reindex(index=about["cluster"].unique(), columns=about["model"].unique())
figure, (ax,) = framed(
    "What an uneven layer split gains for Megatron-LM",
    f"Throughput over that of equal layers within space.preset=megatron, by our cost model; {_STEPS:,} steps each",
    height=7.5,
    width=9.5,
)
row_bars(ax, table)
ax.set_xlabel("more throughput (%)")
legend(figure, ax, 3)
shown = (table + 1).map(change).replace("", "no plan").rename_axis("cluster")
show(
    {"More throughput than with equal layers": shown},
    split_claims(table),
    figure,
    "The step time of the best plan of equal layers over that of the best of any, less 1. A plan of equal layers is "
    "one of any layers too, so that the latter is credited with the better of both searches. H100, A100 and RTX 4090 "
    "clusters: 8 GPUs a machine; 50, 25 and 12.5 GB/s a machine.",
    name="layer_split",
)

# %%
assert (table.stack() >= -1e-9).all(), "Any layers hold equal ones."
assert quick() or table[table.index.str.endswith("mixed")].mean(axis=None) > 0.2, (
    "Uneven layers gain on mixed clusters."
)

# %% [markdown]
# ## Split backwards, free depths and messages in 8 bits
#
# With split backwards (`space.split_backward=true`) gradients of weights come later than those of inputs; with free
# depths (`space.depth=true`) stages may have any number of micro-batches in flight. Both leave gradients as they are;
# hexiopt's executor trains both, and other trainers refuse most of these plans, so both are off by default. Messages
# between stages in 8 bits (`workload.message_precision=fp8`) are off as well, as they [change
# training](executor.md#messages-in-8-bits).

# %%
_AIMS = {(SLOW, BOTH): 0.90, (SLOW, ALL): 0.68, (FAST, BOTH): 0.92}  # of the step over that with neither, means
_FELL_SHORT = 1.02  # of the best plan known
_MODE_NOTES = (
    "Step times in seconds by our cost model, memory checked. In the first table each is of the best of all plans "
    "found for the problem, whatever they were found with: split or not, with the depths that it states, those that "
    f"its messages ask for or those of its schedule, whichever is shortest. Means are geometric. {CPU_LIMITS}"
)
specs = [
    OURS.search(freedoms.grant(problem), _LIMIT_S, {"problem": name, "GB/s": rate, "mode": mode})
    for (name, rate), problem in problems(quick()).items()
    for mode, freedoms in MODES.items()
]
rows = measured([replace(spec, judge=step_times, cpu_time=True) for spec in specs])


# %%
def mean(ratios: pd.DataFrame, by: pd.Series) -> pd.DataFrame:
    """The geometric means of groups of rows."""
    return np.exp(np.log(ratios).groupby(by, sort=False).mean())


def step(value_s: float) -> str:
    """A step time in seconds."""
    return "no plan" if pd.isna(value_s) else f"{value_s:.2f}"


def ratio(value: float) -> str:
    """A ratio of two step times."""
    return "" if pd.isna(value) else f"{value:.3f}"


def mode_claims(best_s: pd.DataFrame, searched_s: pd.DataFrame, means: pd.DataFrame) -> list[str]:
    """Means beside what was aimed at, and how many searches stop short of a plan that another found."""
    lines = [
        f"At {rate} GB/s a step with {mode.replace(',', ' and')} takes {of_step:.3f} of that with neither on average "
        f"(aim {aim:.2f})."
        for (rate, mode), aim in _AIMS.items()
        if rate in means.index and not pd.isna(of_step := means.at[rate, mode])
    ]
    behind = searched_s / best_s[list(searched_s)]
    if short := int((behind > _FELL_SHORT).sum().sum()):
        case, mode = behind.stack().idxmax()
        lines.append(
            f"Of {searched_s.count().sum()} searches {short} stop more than {_FELL_SHORT - 1:.0%} above a plan that "
            f"another mode gave. The furthest, by {behind.at[case, mode] - 1:.0%}, is that with {mode} on "
            f"{case.replace(';', ',')} GB/s."
        )
    return lines


def draw_modes(over: pd.DataFrame) -> Figure:
    """Step times over those with neither."""
    figure, (ax,) = framed(
        "What split backwards, free depths and messages in 8 bits give",
        f"Step time of the best plan over that with neither; portfolio, {_LIMIT_S:g} s of CPU a search",
        width=13.0,
    )
    relative_bars(ax, over.set_axis([case.replace(", ", "\n").replace("; ", "\n") for case in over.index]))
    ax.tick_params(axis="x", labelsize=7)
    ax.set_ylabel("step time (neither = 1)")
    legend(figure, ax, 5)
    return figure


# %%
rows = rows.assign(case=rows["problem"] + "; " + rows["GB/s"])
rows = rows.reindex(columns=[*rows.columns, *(mode for mode in MODES if mode not in rows)])
about = rows.groupby("case", sort=False)[["problem", "GB/s"]].first()
best_s = rows.groupby("case", sort=False)[[*MODES]].min().astype(float)
searched_s = grid(rows, "case", "mode")
over = best_s.div(best_s[NEITHER], axis=0).drop(columns=NEITHER)
searched_over = searched_s.div(searched_s[NEITHER], axis=0).drop(columns=NEITHER)
means = mean(over, about["GB/s"])
best = {**best_s[[NEITHER, BOTH, ALL]].map(step), **over.map(ratio).add_suffix(" / neither")}
tables = {
    "The best of all plans found": about.assign(**best).set_index("problem"),
    "Means over neither, of the best of all plans": means.map(ratio),
    "What each search found": about.assign(**searched_s.map(step)).set_index("problem"),
    "Means over neither, of what each search found": mean(searched_over, about["GB/s"]).map(ratio),
}
show(tables, mode_claims(best_s, searched_s, means), draw_modes(over), _MODE_NOTES, name="split_and_depth")

# %%
assert (over.loc[:, BOTH].dropna() <= 1 + 1e-9).all(), "Freedoms cost nothing in the best of all plans."
assert quick() or means.at[SLOW, BOTH] < 0.9, "Both freedoms gain a tenth on slow networks."

# %% [markdown]
# ## The order of a step
#
# How far is a step from the one whose operations come in the best order? Constraint programming (OR-Tools' CP-SAT)
# finds the optimal schedule of a small pipeline: of all orders of forwards, backwards and gradients of weights that fit
# into memory, the one that ends first. Beside it stand ours by the clock: 1F1B with whole backwards, and `zb` with
# split ones.
#
# Forwards of the random pipelines' stages differ by up to four times; messages take nothing, up to 15 or up to 40 ticks
# where forwards take 10 to 40; memory holds what 1F1B has in flight and up to three micro-batches more.

# %%
orders = compare(sample(4 if quick() else 200))
table = summary(orders)
show(
    {"": table.astype(str).set_index("backwards")},
    figure=draw_ratios(orders),
    notes="Numbers of pipelines within 2 and 8 % of the optimum, how far ours are above it, and how many optima are "
    "proved. *Those of plans*: what searches give a plan with `space.depth=true`: 1F1B's numbers, or so many more "
    "that no round trip takes longer than a share of the period, whichever is shortest; shares fall from 1 until "
    "one is longer. *The best*: of all numbers in flight, stage by stage, that fit into memory and do not rise "
    "towards the last stage. What is left is the order: ours runs no backward before the forward whose turn it "
    "is, and puts off the gradients of weights of a whole micro-batch here, of a layer in plans.",
    caption="How near our orders are to the optimum",
    name="orders",
)
assert quick() or table.set_index("in flight").loc["those of plans", "mean (%)"].max() < 1, (
    "Orders of plans are within 1 % of the optimum on average."
)

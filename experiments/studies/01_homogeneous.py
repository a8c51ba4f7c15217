# %% [markdown]
# # Mixed clusters against homogeneous ones of like FLOPS
#
# How fast is a mixed cluster with our planner, compared with a homogeneous one of similar FLOPS with existing systems?

# %%
import numpy as np
import pandas as pd

from experiments.studies.frame import published
from experiments.studies.frame.figures import PAPER_COLOUR, framed, legend, relative_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import HOMOGENEOUS, OURS
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import measured
from experiments.studies.frame.settings import quick, settings
from experiments.studies.frame.words import bold, change, share, span, times, tokens

_MIXED, _PARTNER = "ours, mixed", ", homogeneous"
_BASELINES = [planner.label for planner in HOMOGENEOUS]
_NOTES = (
    "× is the throughput of our plan on the mixed cluster over that of the system on the homogeneous cluster, "
    f"tokens/s over tokens/s. The paper's × is its measured MFU over Megatron's times FLOPS ({published.HEXISCALE}, "
    "README of its code). MFU counts causal attention half; the paper does not state how it counts."
)

# %%
specs = []
for setting in settings():
    mixed, partner = setting.problem(), setting.partner_problem()
    own, other = (one.cluster.total_peak_flops(one.workload.precision) for one in (mixed, partner))
    labels = {**setting.labels, "flops": own / other}
    specs.append(OURS.search(mixed, 20.0, {**labels, "where": _MIXED}))
    for planner in (OURS, *HOMOGENEOUS):
        where = f"{planner.label}{_PARTNER}"
        specs.append(planner.search(partner, 10.0, {**labels, "where": where}))
rows = measured(specs)


# %%
def claims(ratio: pd.Series, fastest: pd.Series, megatron: pd.Series, measured: pd.Series) -> list[str]:
    """A summary of the ratios, and every baseline that does better than the paper says.

    By setting: our throughput over the best baseline's; its name; the MFU of Megatron-LM, priced, and as measured.
    """
    ratio, own = ratio.dropna(), published.paper("hexiscale")["homogeneous"]
    if ratio.empty:
        return ["No setting has both a plan of ours and one of a baseline."]
    said = [
        f"Against the best homogeneous baseline ours reaches {ratio.mean():.2f} × on average and {ratio.max():.2f} × "
        f"at most ({published.HEXISCALE}: {own['mean']:g} × and {own['most']:g} ×)."
    ]
    for setting, value in ratio[ratio < own["mean"]].items():
        said.append(
            f"{fastest[setting].removesuffix(_PARTNER)} does better here than the paper says at setting {setting}: "
            f"ours on the mixed cluster reaches {value:.2f} × of it, the paper's average is {own['mean']:g} ×."
        )
    both = megatron.notna() & measured.notna()
    if (megatron[both] > measured[both]).any():
        said.append(
            f"By our cost model Megatron-LM reaches an MFU of {span(megatron[both], '.1%')} on the homogeneous "
            f"clusters; the paper's README measured {span(measured[both], '.1%')} on A100 PCIe over TCP."
        )
    return said


# %%
per_s, mfu = (grid(rows, "setting", "where", values) for values in ("tokens_per_s", "mfu"))
first = rows.drop_duplicates("setting").set_index("setting")
papers = pd.DataFrame(
    [published.setting_figures(*pair) for pair in zip(first["number"], first["model"], strict=True)],
    index=per_s.index,
    columns=["flops", "mfu", "megatron", "times"],
    dtype=float,
)
there = per_s[[name for label in _BASELINES if (name := f"{label}{_PARTNER}") in per_s]]
over = there.rdiv(per_s[_MIXED], axis=0).rename(columns=lambda name: name.removesuffix(_PARTNER))
best = there.max(axis=1)
ratio = per_s[_MIXED] / best
flops = first["flops"]
ratios = pd.DataFrame(
    {"FLOPS": flops.map(lambda x: change(x, 2)), "(paper)": papers["flops"].map(lambda x: change(x, 2))}
)
for label in over:
    ratios[f"× {label}"] = over[label].map(times)
ratios["(paper, Megatron-LM)"] = papers["times"].map(times)
ratios["**× best**"] = ratio.map(times).map(bold)
ratios["MFU"], ratios["(paper, HexiScale)"] = mfu[_MIXED].map(share), papers["mfu"].map(share)
megatron = mfu.get(f"{_BASELINES[0]}{_PARTNER}", pd.Series(np.nan, mfu.index))
ratios["Megatron-LM's MFU"], ratios["(paper, Megatron)"] = megatron.map(share), papers["megatron"].map(share)

figure, (ax,) = framed(
    "Mixed clusters against homogeneous ones of like FLOPS",
    f"Throughput by our cost model over the best homogeneous baseline's; {20:g} s on a mixed "
    f"cluster, {10:g} s on a homogeneous one",
)
own = published.paper("hexiscale")["homogeneous"]
label = f"paper: {own['mean']:g} on average to {own['most']:g} at most"
ax.axhspan(own["mean"], own["most"], color=PAPER_COLOUR, zorder=0, label=label)
bars = per_s.div(best.fillna(per_s.max(axis=1)), axis=0)
bars = bars[[_MIXED, *there, f"{OURS.label}{_PARTNER}"]].set_axis([f"{s}\n{change(f)} FLOPS" for s, f in flops.items()])
relative_bars(ax, bars)
ax.set_ylabel("throughput (best baseline = 1)")
legend(figure, ax, 3)
fastest = there.dropna(how="all").idxmax(axis=1)
tables = {"Tokens/s": per_s.map(tokens), "Our throughput on the mixed cluster over theirs": ratios}
show(tables, claims(ratio, fastest, megatron, papers["megatron"]), figure, _NOTES)

# %%
assert quick() or ratio.min() > 0.85, "Mixed clusters come near homogeneous ones of like FLOPS."

# %%
conditions(specs, rows)

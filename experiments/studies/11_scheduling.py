# %% [markdown]
# # Long contexts: scheduling time against cluster size
#
# How does the scheduling time of sequence layouts grow with the size of the cluster?
#
# Synthetic clusters of machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal
# shares; a GPT-style 7B, sequences of 128K tokens, one per sixteen GPUs and at least eight.

# %%
import pandas as pd

from experiments.studies.frame import published
from experiments.studies.frame.figures import framed, gpus_axis, legend, line, seconds_axis
from experiments.studies.frame.long_contexts import BASELINES, GLOBAL_BATCH, HEXISEQ, LAYOUTS
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import measured
from experiments.studies.frame.settings import quick, sizes, synthetic
from experiments.studies.frame.words import seconds, share, tokens
from hexiopt.problem.workload import Workload
from hexiopt.report.style import INK

_SEQ_LEN, _QUICK_SEQ_LEN, _GPUS_A_SEQUENCE = 131_072, 4096, 16
_LIMITS_S = {128: 0.9, 1024: 9.0, 10_240: 110.0}  # (GPUs, at most; seconds): with loading, 1, 10 and 120 s


def limit_s(gpus: int) -> float:
    """The time limit on a cluster of `gpus`."""
    return next((limit for most, limit in _LIMITS_S.items() if gpus <= most), max(_LIMITS_S.values()))


SIZES = sorted({*sizes(), *([] if quick() else published.paper("hexiseq")["scheduling_s"])})


# %%
specs = []
for gpus in SIZES:
    workload = Workload(max(GLOBAL_BATCH, gpus // _GPUS_A_SEQUENCE), _QUICK_SEQ_LEN if quick() else _SEQ_LEN)
    problem = synthetic(gpus, "gpt_7b", workload, LAYOUTS)
    specs += [planner.search(problem, limit_s(gpus), {"gpus": gpus}) for planner in (HEXISEQ, *BASELINES)]
rows = measured(specs)


# %%
def claims(rows: pd.DataFrame, paper_s: pd.Series) -> list[str]:
    """Our times next to the paper's, and the quality of our plans."""
    said = []
    for gpus, own in rows.groupby("gpus"):
        ours, best_s = (
            own[own["planner"] == HEXISEQ.label].iloc[0],
            own["step_time_s"][own["planner"] != HEXISEQ.label].min(),
        )
        if pd.isna(ours["step_time_s"]):
            said.append(f"{gpus:,} GPUs: no plan in {seconds(ours['time_limit_s'])}.")
            continue
        beside = f" ({published.HEXISEQ}: {paper_s[gpus]:g} s)" if gpus in paper_s else ""
        than = "" if pd.isna(best_s) else f", {best_s / ours['step_time_s']:.2f} × as fast as the best baseline's"
        said.append(f"{gpus:,} GPUs: a plan in {seconds(ours['runtime_s'])}{beside}{than}.")
    return said


# %%
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
own = paper_s[paper_s.index.isin(spent_s.index)]
if len(own):
    ax.plot(own.index, own, "*", color=INK, markersize=11, label="HexiSeq (paper)")
gpus_axis(ax, list(spent_s.index))
seconds_axis(ax, "search (s)")
legend(figure, ax, 5)
show({"": cells.set_index("GPUs")}, claims(rows, paper_s), figure)

# %%
ours = rows[rows["planner"] == HEXISEQ.label].set_index("gpus")["runtime_s"]
assert quick() or (ours[paper_s.index] < 1.1 * paper_s).all(), "Scheduling takes no longer than the paper's."

# %% [markdown]
# first plan: seconds to the first plan; search: seconds in total; gap: to the best bound that any search has proven for
# that size. A search that ends at its limit, a baseline's included, has not covered its whole space.

# %%
conditions(specs, rows)

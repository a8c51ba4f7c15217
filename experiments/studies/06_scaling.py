# %% [markdown]
# # Scheduling time and gap against cluster size
#
# How do the scheduling time and the gap of every solver grow with the size of the cluster?
#
# Synthetic clusters of machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal
# shares; Llama-2 13B, eight sequences per GPU.

# %%
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.frame.figures import framed, gpus_axis, legend, line, seconds_axis
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.rows import grid, time_to_s
from experiments.studies.frame.search import BOUND, SearchSpec, measured
from experiments.studies.frame.settings import quick, sizes, synthetic
from experiments.studies.frame.words import seconds, share, tokens
from hexiopt.problem.workload import Workload
from hexiopt.report.style import MUTED
from solvers.registry import for_any_problem, names

_SEQUENCES = 8  # a GPU
_LIMIT_S, _REFERENCE = 20.0, 1024  # number of GPUs at which the limit holds
_LEAST, _MOST = 1 / 6, 5.0  # times the limit, for other sizes
_CLOSE = 1.01  # a search has settled within this share of its last step time

# %%
specs = []
for gpus in sizes():
    workload = Workload(_SEQUENCES * gpus, 512) if quick() else Workload(_SEQUENCES * gpus)
    problem = synthetic(gpus, "llama2_13b", workload)
    limit_s = _LIMIT_S * min(_MOST, max(_LEAST, gpus / _REFERENCE))
    specs += [SearchSpec(problem, solver, limit_s, {"gpus": gpus}) for solver in (*names(for_any_problem), BOUND)]
rows = measured(specs)


# %%
def claims(rows: pd.DataFrame) -> list[str]:
    """The best solver at each size, and the solvers without a plan."""
    said = []
    for gpus, own in rows.groupby("gpus"):
        if own["step_time_s"].isna().all():
            said.append(f"No solver has a plan for {gpus:,} GPUs.")
            continue
        best = own.loc[own["step_time_s"].idxmin()]
        over = own.loc[own["solver"] == OURS.solver, "step_time_s"].min() / best["step_time_s"] - 1
        longer = f"; a step of `{OURS.solver}`'s takes {over:.1%} longer" if over > 0 else ""
        said.append(
            f"{gpus:,} GPUs: `{best['solver']}` has the best plan, at most {best['gap']:.1%} from the optimum{longer}."
        )
    for solver, own in rows.groupby("solver", sort=False):
        refused = own[own["status"] == "refused"]
        without = own[own["step_time_s"].isna() & (own["status"] != "refused")]
        if len(refused):
            said.append(f"`{solver}` does not take {_sizes(refused)}: {refused['reason'].iloc[0]}.")
        if len(without):
            said.append(f"`{solver}` has no plan in time for {_sizes(without)}.")
    return said


def _sizes(rows: pd.DataFrame) -> str:
    return f"{', '.join(f'{gpus:,}' for gpus in rows['gpus'])} GPUs"


def draw(rows: pd.DataFrame) -> Figure:
    """Gap and settling time against the number of GPUs, one line per solver."""
    limits_s = rows.groupby("gpus")["time_limit_s"].max()
    sizes = list(limits_s.index)
    figure, (left, right) = framed(
        f"From {sizes[0]:,} to {sizes[-1]:,} GPUs" if len(sizes) > 1 else f"{sizes[0]:,} GPUs",
        f"Synthetic clusters of H100, A100, RTX 4090 and RTX 3090; {'tiny' if quick() else 'llama2_13b'}, "
        f"{_SEQUENCES} sequences per GPU; one seed",
        columns=2,
        height=4.6,
    )
    gaps, settled_s = (grid(rows, "gpus", "solver", values) for values in ("gap", "settled_s"))
    for k, solver in enumerate(gaps):
        if gaps[solver].notna().any():
            left.plot(sizes, 100 * gaps[solver], label=solver, **line(k))
            right.plot(sizes, settled_s[solver], **line(k))
    right.plot(sizes, limits_s, ":", color=MUTED, linewidth=1.2)
    at = sizes[0], limits_s.iloc[0]
    right.annotate("time limit", at, (4, 4), textcoords="offset points", color=MUTED, fontsize=9)
    for ax in (left, right):
        gpus_axis(ax, sizes)
    left.set_ylabel("gap to the lower bound (%)")
    left.set_ylim(bottom=0)
    seconds_axis(right, "time to within 1 % of its last plan (s)")
    legend(figure, left, 7)
    return figure


# %%
bound_s = rows.groupby("gpus")["bound_s"].max()
rows = rows.assign(gap=1 - rows["gpus"].map(bound_s) / rows["step_time_s"])
rows["settled_s"] = [
    time_to_s(points, _CLOSE * s) for points, s in zip(rows["trajectory"], rows["step_time_s"], strict=True)
]
solvers, program = rows[rows["solver"] != BOUND], rows[rows["solver"] == BOUND].set_index("gpus")
best = solvers.groupby("gpus")[["step_time_s", "gap"]].min()
bounds = pd.DataFrame(
    {
        "time limit": program["time_limit_s"].map(lambda s: f"{s:.3g} s"),
        "bound": bound_s.map(seconds),
        "of the linear program": program["bound_s"].map(lambda s: seconds(s) if s else "not in time"),
        "after": program["runtime_s"].map(seconds),
        "best step time": best["step_time_s"].map(seconds).replace("", "no plan"),
        "best gap": best["gap"].map(share),
    }
)
quoted = solvers[solvers["status"] != "refused"]
cells = pd.DataFrame(
    {
        "GPUs": quoted["gpus"].map("{:,}".format),
        "solver": quoted["solver"].map("`{}`".format),
        "step time": quoted["step_time_s"].map(seconds),
        "tokens/s": quoted["tokens_per_s"].map(tokens),
        "gap": quoted["gap"].map(share),
        "first plan": quoted["first_plan_s"].map(seconds),
        "settled": quoted["settled_s"].map(seconds),
        "search": quoted["runtime_s"].map(seconds),
        "memory": quoted["peak_gib"].map("{:.1f} GiB".format),
        "status": quoted["status"].str.replace("_", " "),
    }
)
bounds.index = bounds.index.map("{:,}".format)
tables = {"Bounds": bounds.rename_axis("GPUs"), "Solvers": cells.set_index("GPUs")}
show(tables, claims(solvers), draw(solvers))

# %%
large = grid(solvers[solvers["gpus"] >= 256], "gpus", "solver")
assert quick() or (large[OURS.solver] <= large.min(axis=1) * (1 + 1e-9)).all(), (
    "The portfolio is the best from 256 GPUs."
)

# %% [markdown]
# first plan: seconds to the first plan; settled: seconds until the search was within 1 % of its final plan; search:
# seconds in total; gap: to the best bound that any solver or the linear program has proven for that size; memory: peak
# of the search's processes.

# %%
conditions(specs, rows)

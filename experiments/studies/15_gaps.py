# %% [markdown]
# # What gaps consist of
#
# What keeps our plans from their lower bounds? Each cause is taken away in turn, and plan and bound are sought again.
#
# Networks between machines 100 times as fast take away messages and gradient sync, 16 times the memory takes away its
# limit, and 8 times the batch spreads filling, gradient sync and optimizer over more work. A cause whose removal closes
# the gap is what opened it. What remains without all three is due to whole layers and micro-batches, or to a loose
# bound. A search six times as long shows how much is a plan not found.

# %%
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.fleets import FLEETS
from experiments.studies.cases.gaps import parts_of_step
from experiments.studies.frame.figures import framed, legend, row_bars
from experiments.studies.frame.page import conditions, show
from experiments.studies.frame.planners import LOWER_BOUND, OURS
from experiments.studies.frame.search import BOUND, CPU_LIMITS, measured
from experiments.studies.frame.settings import first_models, quick, synthetic
from experiments.studies.frame.words import seconds, share
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload

_LIMIT_S, _BOUND_S, _LONGER = 2.0, 4.0, 6
_FASTER, _MORE_MEMORY, _MORE_BATCH = 100.0, 16.0, 8
_GBIT_PER_S = 100, 5  # between machines, of HexiScale's settings
_PARTS = (
    *("compute", "recompute", "TP collectives", "gathers, scatters and slower holders", "messages", "bubble"),
    *("gradient sync", "optimizer", "weight all-gather"),
)
_TINY = 5e-4  # share of a step
_NOTES = (
    "gap: 1 − bound / step time of the plan, of the problem as it is and without a cause. The columns do not add up: "
    "two causes may hide each other, and the bound of a relaxed problem is tight or loose in its own way. "
    "Where the step goes: of the device that ends last, in the plan of the longer search; waiting is for other stages, "
    f"slower or not yet begun. {CPU_LIMITS}"
)


def _fast_network(problem: Problem) -> Problem:
    cluster = problem.cluster
    faster = cluster.replace(
        machines=tuple(map(_with_fast_interfaces, cluster.machines)),
        inter_bandwidth_bytes_per_s=_FASTER * cluster.inter_bandwidth_bytes_per_s,
        inter_latency_s=cluster.inter_latency_s / _FASTER,
        groups=tuple(replace(group, uplink_bytes_per_s=_FASTER * group.uplink_bytes_per_s) for group in cluster.groups),
        links=(),
    )
    return problem.replace(cluster=faster)


def _with_fast_interfaces(machine: Machine) -> Machine:
    rate = _FASTER * machine.nic_bandwidth_bytes_per_s
    return machine.replace(nic_bandwidth_bytes_per_s=rate, nic_latency_s=machine.nic_latency_s / _FASTER)


def _ample_memory(problem: Problem) -> Problem:
    machines = []
    for machine in problem.cluster.machines:
        gpu = machine.gpu
        more = replace(
            gpu,
            memory_bytes=_MORE_MEMORY * gpu.memory_bytes,
            process_memory_bytes=_MORE_MEMORY * gpu.process_memory_bytes,
        )
        machines.append(machine.replace(gpu=more))
    return problem.replace(cluster=problem.cluster.replace(machines=tuple(machines)))


def _long_batch(problem: Problem) -> Problem:
    workload = problem.workload
    return problem.replace(workload=workload.replace(global_batch=_MORE_BATCH * workload.global_batch))


AS_IT_IS, ALL, LONGER = "as it is", "all three", f"{_LONGER} × the time"
_ONE: Mapping[str, Callable[[Problem], Problem]] = {
    "fast network": _fast_network,
    "ample memory": _ample_memory,
    f"{_MORE_BATCH} × the batch": _long_batch,
}
RELAXED: Mapping[str, Callable[[Problem], Problem]] = {
    AS_IT_IS: lambda problem: problem,
    **_ONE,
    ALL: lambda problem: reduce(lambda made, relax: relax(made), _ONE.values(), problem),
}


def _problems() -> dict[str, Problem]:
    found = {
        f"{setting.label}, {gbit} Gbit/s": setting.problem(inter_gb_per_s=gbit / 8)
        for gbit in _GBIT_PER_S
        for setting in first_models()
    }
    if not quick():
        found["1,024 GPUs · llama2_13b"] = synthetic(1024, "llama2_13b", Workload(8192))
        found |= {f"{fleet.cluster} · {fleet.model}": fleet.problem() for fleet in FLEETS}
    return found


# %%
specs = []
for name, problem in _problems().items():
    for without, relax in RELAXED.items():
        labels = {"problem": name, "without": without}
        specs.append(OURS.search(relax(problem), _LIMIT_S, labels))
        specs.append(LOWER_BOUND.search(relax(problem), _BOUND_S, labels))
    longer = OURS.search(problem, _LONGER * _LIMIT_S, {"problem": name, "without": LONGER})
    specs.append(replace(longer, judge=parts_of_step))
specs = [replace(one, cpu_time=True) for one in specs]
rows = measured(specs)


# %%
def gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """The gap of each problem (rows) without each cause (columns); NaN where there is no plan."""
    ours = rows[rows["solver"] == OURS.solver].pivot(index="problem", columns="without", values="step_time_s")
    bound = rows[rows["solver"] == BOUND].pivot(index="problem", columns="without", values="bound_s")
    bound[LONGER] = bound[AS_IT_IS]
    ours[LONGER] = ours[[LONGER, AS_IT_IS]].min(axis=1)  # the longer search holds the shorter one's plan
    order = [*RELAXED, LONGER]
    return (1 - bound[order] / ours[order].astype(float)).loc[list(dict.fromkeys(rows["problem"]))]


def step_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Parts of the step of the longer search's plan, as shares, and the bound's share of the step."""
    ours = rows[(rows["solver"] == OURS.solver) & (rows["without"] == LONGER)].set_index("problem")
    bound = rows[(rows["solver"] == BOUND) & (rows["without"] == AS_IT_IS)].set_index("problem")["bound_s"]
    ours = ours[ours["step_time_s"].notna()]
    steps = ours["step_time_s"]
    parts = [name for name in _PARTS if name in ours and (ours[name] > _TINY * steps).any()]
    cells = {name: [share(part) for part in ours[name] / steps] for name in parts}
    seen = [share(part) for part in bound[ours.index] / steps]
    table = pd.DataFrame({"step": [seconds(s) for s in steps], "the bound knows": seen, **cells}, index=ours.index)
    return table.rename(columns={"bubble": "waiting", "gathers, scatters and slower holders": "lockstep"})


def claims(found: pd.DataFrame) -> list[str]:
    """For each cause, where its removal closes most of the gap."""
    said = []
    for cause in (*_ONE, LONGER):
        closes = (found[AS_IT_IS] - found[cause]).dropna()
        most = closes[closes > 0.01].sort_values(ascending=False)
        if len(most):
            names = ", ".join(f"{name} ({100 * points:.0f} points)" for name, points in most.head(3).items())
            said.append(f"{cause.capitalize()} closes the gap most on {names}.")
    left = found[ALL].dropna()
    if len(left):
        said.append(f"Without all three causes {share(left.min())} to {share(left.max())} remain.")
    return said


def draw(found: pd.DataFrame) -> Figure:
    """Groups of bars, a problem each."""
    figure, (ax,) = framed(
        "What keeps plans from their lower bounds",
        f"Gap with each cause taken away; portfolio {_LIMIT_S:g} s, bound {_BOUND_S:g} s",
        height=1.6 + 0.75 * len(found),
        width=9.5,
    )
    row_bars(ax, found)
    ax.set_xlabel("gap (%)")
    legend(figure, ax, columns=len(found.columns))
    return figure


# %%
found = gaps(rows)
base = rows[(rows["solver"] == OURS.solver) & (rows["without"] == AS_IT_IS)].set_index("problem")["step_time_s"]
table = found.map(share)
table.insert(0, "step", [seconds(base[name]) or "no plan" for name in found.index])
tables = {"": table, "Where the step goes, and what of it the bound knows": step_parts(rows)}
show(tables, claims(found), draw(found), _NOTES)

# %%
assert (found.stack() >= -1e-9).all(), "A bound is below every plan."
assert quick() or found[ALL].max() < 0.1, "Without all three causes less than 10 % remain."

# %%
conditions(specs, rows)

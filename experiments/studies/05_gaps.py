# %% [markdown]
# # How far plans may be from the best
#
# How far can our plans be from the best, by a bound that holds for every plan, and what keeps them from it?
#
# Plan and bound are sought for a minute each. Then, in seconds, each cause is taken away in turn, and both are sought
# again. Networks between machines 100 times as fast take away messages and gradient sync, 16 times the memory takes
# away its limit, and 8 times the batch spreads filling, gradient sync and optimizer over more work. A cause whose
# removal closes the gap is what opened it. What remains without all three is due to whole layers and micro-batches, or
# to a loose bound. The minute shows how much is a plan not found.

# %%
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.cases.fleets import FLEETS
from experiments.studies.cases.gaps import parts_of_step
from experiments.studies.frame.figures import framed, legend, row_bars
from experiments.studies.frame.page import show
from experiments.studies.frame.planners import LOWER_BOUND, OURS
from experiments.studies.frame.search import BOUND, CPU_LIMITS, measured
from experiments.studies.frame.settings import first_models, quick, synthetic
from experiments.studies.frame.words import seconds, share, span
from hexiopt.bounds.compute import compute_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload

_LIMIT_S, _BOUND_S, _LONG_S = 2.0, 4.0, 60.0
_FASTER, _MORE_MEMORY, _MORE_BATCH = 100.0, 16.0, 8
_AIMS = {100: 0.10, 5: 0.20}  # of the gap, by Gbit/s between machines of HexiScale's settings
_PARTS = (
    *("compute", "recompute", "TP collectives", "gathers, scatters and slower holders", "messages", "bubble"),
    *("gradient sync", "optimizer", "weight all-gather"),
)
_TINY = 5e-4  # share of a step
_NOTES = (
    "gap: 1 − bound / step time of the plan, of the problem as it is and without a cause. The columns do not add up: "
    "two causes may hide each other, and the bound of a relaxed problem is tight or loose in its own way. "
    "Where the step goes: of the device that ends last, in the plan of the longer search; waiting is for other stages, "
    "slower or not yet begun. compute bound: all devices compute all the time; certified bound: the linear program "
    "over chains of stages, with its seconds in brackets. The program mixes fractions of pipelines and charges network "
    "interfaces for gradients, not for activations; a bound of its own counts what machines receive of both, but not "
    f"how pipelines fill, so at 5 Gbit/s the bound is still loose. {CPU_LIMITS}"
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


AS_IT_IS, ALL, LONGER = "as it is", "all three", "a minute"
_ONE: Mapping[str, Callable[[Problem], Problem]] = {
    "fast network": _fast_network,
    "ample memory": _ample_memory,
    f"{_MORE_BATCH} × the batch": _long_batch,
}
RELAXED: Mapping[str, Callable[[Problem], Problem]] = {
    AS_IT_IS: lambda problem: problem,
    **_ONE,
    ALL: lambda problem: reduce(lambda relaxed, relax: relax(relaxed), _ONE.values(), problem),
}


def _problems() -> dict[tuple[str, str], Problem]:
    problems = {
        (setting.label, f"{gbit}"): setting.problem(inter_gb_per_s=gbit / 8)
        for gbit in _AIMS
        for setting in first_models()
    }
    if not quick():
        problems["1,024 GPUs · llama2_13b", "100"] = synthetic(1024, "llama2_13b", Workload(8192))
        problems |= {(f"{fleet.cluster} · {fleet.model}", "as shipped"): fleet.problem() for fleet in FLEETS}
    return problems


# %%
specs = []
for (name, gbit), problem in _problems().items():
    about = {"problem": f"{name}, {gbit} Gbit/s" if gbit.isdigit() else name, "Gbit/s": gbit}
    about["compute_bound_s"] = compute_bound_s(PlanPricer(problem))
    for without, relax in RELAXED.items():
        specs.append(OURS.search(relax(problem), _LIMIT_S, {**about, "without": without}))
        specs.append(LOWER_BOUND.search(relax(problem), _BOUND_S, {**about, "without": without}))
    specs.append(replace(OURS.search(problem, _LONG_S, {**about, "without": LONGER}), judge=parts_of_step))
    specs.append(LOWER_BOUND.search(problem, _LONG_S, {**about, "without": LONGER}))
rows = measured([replace(spec, cpu_time=True) for spec in specs])


# %%
def gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """The gap of each problem (rows) without each cause (columns); NaN where there is no plan."""
    ours = rows[rows["solver"] == OURS.solver].pivot(index="problem", columns="without", values="step_time_s")
    bound = rows[rows["solver"] == BOUND].pivot(index="problem", columns="without", values="bound_s")
    bound[LONGER] = bound[[LONGER, AS_IT_IS]].max(axis=1)
    ours[LONGER] = ours[[LONGER, AS_IT_IS]].min(axis=1)  # the longer search holds the shorter one's plan
    order = [*RELAXED, LONGER]
    return (1 - bound[order] / ours[order].astype(float)).loc[list(dict.fromkeys(rows["problem"]))]


def step_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Parts of the step of the longer search's plan, as shares, and the bound's share of the step."""
    ours = rows[(rows["solver"] == OURS.solver) & (rows["without"] == LONGER)].set_index("problem")
    bound = rows[(rows["solver"] == BOUND) & (rows["without"] == LONGER)].set_index("problem")["bound_s"]
    ours = ours[ours["step_time_s"].notna()]
    steps = ours["step_time_s"]
    parts = [name for name in _PARTS if name in ours and (ours[name] > _TINY * steps).any()]
    cells = {name: [share(part) for part in ours[name] / steps] for name in parts}
    seen = [share(part) for part in bound[ours.index] / steps]
    table = pd.DataFrame({"step": [seconds(s) for s in steps], "the bound knows": seen, **cells}, index=ours.index)
    return table.rename(columns={"bubble": "waiting", "gathers, scatters and slower holders": "lockstep"})


def bounds_of_a_minute(rows: pd.DataFrame, gap: pd.Series) -> pd.DataFrame:
    """Plan and bounds of the longer search by problem, in texts; `gap` is of these."""
    ours, bound = (
        rows[(rows["solver"] == solver) & (rows["without"] == LONGER)].set_index("problem")
        for solver in (OURS.solver, BOUND)
    )
    aims = [f"≤ {_AIMS[int(gbit)]:.0%}" if gbit.isdigit() else "" for gbit in ours["Gbit/s"]]
    certified = [
        f"{seconds(s)} ({seconds(spent)})" for s, spent in zip(bound["bound_s"], bound["runtime_s"], strict=True)
    ]
    cells = {
        "step": ours["step_time_s"].map(seconds).replace("", "no plan"),
        "compute bound": bound["compute_bound_s"].map(seconds),
        "certified bound": certified,
        "gap": gap.map(share),
        "aim": aims,
    }
    return pd.DataFrame(cells, index=ours.index)


def aim_claims(gap: pd.Series) -> list[str]:
    """Gaps by bandwidth, next to the aims; `gap` is by problem and Gbit/s."""
    lines = []
    for gbit, aim in _AIMS.items():
        known = gap[gap.index.get_level_values(1) == str(gbit)].droplevel(1).dropna()
        if len(known):
            within = [str(name) for name in known.index[known <= aim]]
            reached = f"reached by {', '.join(within)}" if within else "reached nowhere"
            lines.append(f"At {gbit} Gbit/s the gap is {span(known, '.1%')}; the aim of {aim:.0%} is {reached}.")
    return lines


def claims(gap: pd.DataFrame) -> list[str]:
    """For each cause, where its removal closes most of the gap."""
    lines = []
    for cause in (*_ONE, LONGER):
        closes = (gap[AS_IT_IS] - gap[cause]).dropna()
        most = closes[closes > 0.01].sort_values(ascending=False)
        if len(most):
            names = ", ".join(f"{name} ({100 * points:.0f} points)" for name, points in most.head(3).items())
            lines.append(f"{cause.capitalize()} closes the gap most on {names}.")
    left = gap[ALL].dropna()
    if len(left):
        lines.append(f"Without all three causes {share(left.min())} to {share(left.max())} remain.")
    return lines


def draw(gap: pd.DataFrame) -> Figure:
    """Groups of bars, a problem each."""
    figure, (ax,) = framed(
        "What keeps plans from their lower bounds",
        f"Gap with each cause taken away; portfolio {_LIMIT_S:g} s, bound {_BOUND_S:g} s, and {_LONG_S:g} s each",
        height=1.6 + 0.75 * len(gap),
        width=9.5,
    )
    row_bars(ax, gap)
    ax.set_xlabel("gap (%)")
    legend(figure, ax, columns=len(gap.columns))
    return figure


# %%
gap = gaps(rows)
about = rows.drop_duplicates("problem").set_index("problem")["Gbit/s"]
by_rate = gap[LONGER].set_axis(pd.MultiIndex.from_arrays([gap.index, about[gap.index]]))
step_s = rows[(rows["solver"] == OURS.solver) & (rows["without"] == AS_IT_IS)].set_index("problem")["step_time_s"]
table = gap.map(share)
table.insert(0, "step", [seconds(step_s[name]) or "no plan" for name in gap.index])
tables = {
    "A minute for the plan, a minute for the bound": bounds_of_a_minute(rows, gap[LONGER]),
    "Gaps with a cause taken away": table,
    "Where the step goes, and what of it the bound knows": step_parts(rows),
}
show(tables, [*aim_claims(by_rate), *claims(gap)], draw(gap), _NOTES)

# %%
assert (gap.stack() >= -1e-9).all(), "A bound is below every plan."
assert quick() or gap[ALL].max() < 0.1, "Without all three causes less than 10 % remain."
assert quick() or by_rate.xs("100", level=1).max() < 0.3, "At 100 Gbit/s less than 30 % is left open."

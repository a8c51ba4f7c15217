"""What do split backwards, free depths and messages in 8 bits give, each alone and together?

With split backwards (`space.split_backward=true`) gradients of weights come later than those of inputs; with free
depths (`space.depth=true`) stages may have any number of micro-batches in flight. Both leave gradients as they are;
hexiopt's executor trains both, and other trainers refuse most of these plans, so both are off by default. Messages
between stages in 8 bits (`workload.message_precision=fp8`) are off as well, as they
[change training](message_precision.md).

python -m experiments.studies split_and_depth          # about 12 minutes on two cores; --quick: seconds
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.figures import framed, legend, relative_bars
from experiments.studies.frame.rows import grid
from experiments.studies.frame.search import CPU_LIMITS, SearchSpec
from experiments.studies.frame.settings import OURS
from experiments.studies.frame.study import Report, Scale, Study
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.messages import FP8, TRAINING
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from solvers.completion.pricing import price_plan
from solvers.core.zero import LOCKSTEP

_LIMIT_S = 10.0
_NEITHER, _DEPTH, _SPLIT, _BOTH, _EIGHT, _ALL = "neither", "depth", "split", "both", "8 bits", "both, 8 bits"
_SLOW, _FAST, _SHIPPED = "0.625", "5", "as shipped"  # GB/s between machines
_AIMS = {(_SLOW, _BOTH): 0.90, (_SLOW, _ALL): 0.68, (_FAST, _BOTH): 0.92}  # of the step over that with neither, means
_FELL_SHORT = 1.02  # of the best plan known
_NOTES = (
    "Step times in seconds by our cost model, memory checked. In the first table each is of the best of all plans "
    "found for the problem, whatever they were found with: split or not, with the depths that it states, those that "
    f"its messages ask for or those of its schedule, whichever is shortest. Means are geometric. {CPU_LIMITS}"
)


@dataclass(frozen=True)
class SearchMode:
    """What a search allows beyond the default."""

    split: bool = False
    depth: bool = False
    message_precision: str = TRAINING

    def grant(self, problem: Problem) -> Problem:
        """The problem with these freedoms."""
        space = replace(problem.space, split_backward=self.split, depth=self.depth)
        workload = replace(problem.workload, message_precision=self.message_precision)
        return replace(problem, space=space, workload=workload)

    def step_s(self, problem: Problem, plan: Plan) -> float:
        """The shortest step in seconds of what `plan` becomes with these freedoms; NaN where nothing fits."""
        pricer = PlanPricer(self.grant(problem))
        priced = [price_plan(pricer, form) for form in self._forms(plan)]
        return min((own.cost.step_time_s for own in priced if own is not None and own.cost.fits), default=nan)

    def _forms(self, plan: Plan) -> Iterator[Plan]:
        whole = plan.schedule.whole()
        late = [schedule for schedule in SPLIT_SCHEDULES if schedule.whole() == whole]
        schedules = [whole, *(late if self.split and plan.sharding.stage < LOCKSTEP else [])]
        for form in [usual_depths(plan), *([plan] if self.depth and any(plan.other_depths()) else [])]:
            yield from (replace(form, schedule=schedule) for schedule in schedules)


MODES = {
    _NEITHER: SearchMode(),
    _DEPTH: SearchMode(depth=True),
    _SPLIT: SearchMode(split=True),
    _BOTH: SearchMode(split=True, depth=True),
    _EIGHT: SearchMode(message_precision=FP8),
    _ALL: SearchMode(split=True, depth=True, message_precision=FP8),
}


def usual_depths(plan: Plan) -> Plan:
    """The plan with as many micro-batches in flight as its schedule has."""
    pipelines = [
        replace(line, stages=tuple([replace(stage, in_flight=None) for stage in line.stages]))
        for line in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


def problems(quick: bool = False) -> dict[tuple[str, str], Problem]:
    """The problems by name and GB/s between machines."""
    if quick:
        return {
            ("small_mixed", _SHIPPED): Problem(named_cluster("small_mixed"), named_model("tiny"), Workload(32, 512))
        }
    settings = ((1, "llama2_7b"), (2, "llama2_7b"), (3, "llama2_7b"), (3, "llama2_13b"), (3, "llama_30b"))
    found = {
        (f"setting {number}, {model}", rate): Problem(
            named_cluster(f"hexiscale_setting_{number}", inter_gb_per_s=float(rate)), named_model(model), Workload()
        )
        for rate in (_SLOW, _FAST)
        for number, model in settings
        if (number, model, rate) != (3, "llama2_7b", _SLOW)  # has the plans of setting 2, whose GPUs it has too
    }
    for cluster, model, batch in (("four_machines", "llama2_7b", 32), ("small_mixed", "llama2_7b", 16)):
        found[f"{cluster}, {model}, batch {batch}", _SHIPPED] = Problem(
            named_cluster(cluster), named_model(model), Workload(batch)
        )
    found["campus, llama2_13b", _SHIPPED] = Problem(named_cluster("campus"), named_model("llama2_13b"), Workload())
    return found


def step_times(problem: Problem, plan: Plan) -> dict[str, float]:
    """The step of a plan in every mode, in seconds."""
    return {mode: own.step_s(problem, plan) for mode, own in MODES.items()}


def searches(scale: Scale) -> list[SearchSpec]:
    """Every problem in every mode; limits count CPU time, so that other work on the machine changes nothing."""
    limit_s = scale.limit_s(_LIMIT_S)
    found = [
        OURS.search(own.grant(problem), limit_s, {"problem": name, "GB/s": rate, "mode": mode})
        for (name, rate), problem in problems(scale.quick).items()
        for mode, own in MODES.items()
    ]
    return [replace(own, judge=step_times, cpu_time=True) for own in found]


def report(rows: pd.DataFrame, scale: Scale) -> list[Report]:
    """Of all plans the best in every mode, and what each search found."""
    rows = rows.assign(case=rows["problem"] + "; " + rows["GB/s"])
    rows = rows.reindex(columns=[*rows.columns, *(mode for mode in MODES if mode not in rows)])
    about = rows.groupby("case", sort=False)[["problem", "GB/s"]].first()
    best_s = rows.groupby("case", sort=False)[[*MODES]].min().astype(float)
    searched_s = grid(rows, "case", "mode")
    over = best_s.div(best_s[_NEITHER], axis=0).drop(columns=_NEITHER)
    searched_over = searched_s.div(searched_s[_NEITHER], axis=0).drop(columns=_NEITHER)
    means = mean(over, about["GB/s"])
    best = {**best_s[[_NEITHER, _BOTH, _ALL]].map(step), **over.map(ratio).add_suffix(" / neither")}
    tables = {
        "The best of all plans found": about.assign(**best).set_index("problem"),
        "Means over neither, of the best of all plans": means.map(ratio),
        "What each search found": about.assign(**searched_s.map(step)).set_index("problem"),
        "Means over neither, of what each search found": mean(searched_over, about["GB/s"]).map(ratio),
    }
    return [Report(tables, claims(best_s, searched_s, means), draw(over, scale), _NOTES)]


def mean(ratios: pd.DataFrame, by: pd.Series) -> pd.DataFrame:
    """The geometric means of groups of rows."""
    return np.exp(np.log(ratios).groupby(by, sort=False).mean())


def step(value_s: float) -> str:
    """A step time in seconds."""
    return "no plan" if pd.isna(value_s) else f"{value_s:.2f}"


def ratio(value: float) -> str:
    """A ratio of two step times."""
    return "" if pd.isna(value) else f"{value:.3f}"


def claims(best_s: pd.DataFrame, searched_s: pd.DataFrame, means: pd.DataFrame) -> list[str]:
    """Means beside what was aimed at, and how many searches stop short of a plan that another found."""
    said = [
        f"At {rate} GB/s a step with {mode.replace(',', ' and')} takes {of_step:.3f} of that with neither on average "
        f"(aim {aim:.2f})."
        for (rate, mode), aim in _AIMS.items()
        if rate in means.index and not pd.isna(of_step := means.at[rate, mode])
    ]
    behind = searched_s / best_s[list(searched_s)]
    if short := int((behind > _FELL_SHORT).sum().sum()):
        case, mode = behind.stack().idxmax()
        said.append(
            f"Of {searched_s.count().sum()} searches {short} stop more than {_FELL_SHORT - 1:.0%} above a plan that "
            f"another mode gave. The furthest, by {behind.at[case, mode] - 1:.0%}, is that with {mode} on "
            f"{case.replace(';', ',')} GB/s."
        )
    return said


def draw(over: pd.DataFrame, scale: Scale) -> Figure:
    """Step times over those with neither."""
    figure, (ax,) = framed(
        "What split backwards, free depths and messages in 8 bits give",
        f"Step time of the best plan over that with neither; portfolio, {scale.limit_s(_LIMIT_S):g} s of CPU a search",
        width=13.0,
    )
    relative_bars(ax, over.set_axis([case.replace(", ", "\n").replace("; ", "\n") for case in over.index]))
    ax.tick_params(axis="x", labelsize=7)
    ax.set_ylabel("step time (neither = 1)")
    legend(figure, ax, 5)
    return figure


TITLE = "Split backwards and free depths"
STUDY = Study("split_and_depth", TITLE, __doc__, searches, report, (_NEITHER, OURS.label, OURS.solver))

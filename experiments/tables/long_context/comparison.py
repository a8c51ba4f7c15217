"""Uneven sequence layouts against Ring Attention, Ulysses and USP on the same clusters: what two tables share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.tables import published
from experiments.tables.figures import GRID, MARKERS, PAPER_COLOUR, framed, hue, legend
from experiments.tables.frame import Report, Table
from experiments.tables.long_context.settings import BASELINES, HEXISEQ, Setting, asked
from experiments.tables.markdown import Cell, markdown_table, share, times, tokens
from experiments.tables.names import Planner
from experiments.tables.options import Options
from experiments.tables.task import BOUND, Found, Outcome, Task
from hexiopt.cost.model import CostModel
from hexiopt.problem import Problem
from solvers.sequence.allotment import RateTable


@dataclass(frozen=True)
class Comparison:
    """A setting: ours, the baselines, the best bound that any search has proven, and what balance is worth."""

    setting: Setting
    ours: Outcome
    baselines: dict[Planner, Outcome]
    bound_s: float
    balance: float

    @property
    def best(self) -> tuple[Planner, Outcome]:
        """The fastest baseline."""
        return min(self.baselines.items(), key=lambda item: item[1].objective)

    def over(self, other: Outcome) -> float | None:
        """Throughput of ours over another's."""
        if self.ours.step_time_s is None or other.step_time_s is None:
            return None
        return other.step_time_s / self.ours.step_time_s

    @property
    def gap(self) -> float | None:
        """How far our plan is at most from the best there is."""
        return None if self.ours.step_time_s is None else 1 - self.bound_s / self.ours.step_time_s


def _task(setting: Setting, planner: Planner, options: Options) -> Task:
    return planner.task(setting.problem(options), options.budgets.sequence_s)


def _bound(setting: Setting, options: Options) -> Task:
    return Task(setting.problem(options), BOUND, options.budgets.bound_s)


def _tasks(settings: tuple[Setting, ...], options: Options) -> list[Task]:
    """Ours, every baseline and the bound in every setting."""
    return [
        task
        for setting in asked(settings, options)
        for task in (
            *(_task(setting, planner, options) for planner in (HEXISEQ, *BASELINES)),
            _bound(setting, options),
        )
    ]


def compared(setting: Setting, options: Options, found: Found) -> Comparison:
    """What was found in a setting."""
    own = {planner: _task(setting, planner, options) for planner in (HEXISEQ, *BASELINES)}
    baselines = {planner: found[own[planner]] for planner in BASELINES}
    bound_s = found.bound_s(*own.values(), _bound(setting, options))
    return Comparison(setting, found[own[HEXISEQ]], baselines, bound_s, balance(own[HEXISEQ].problem))


def balance(problem: Problem) -> float:
    """How many times as fast all GPUs compute that share the work by their speed, over equal shares."""
    rates = RateTable(CostModel(problem)).of(range(problem.cluster.num_devices), "none")
    sequence_s = rates.of_sequence_s(problem.workload.seq_len, problem.model.num_heads)
    return float(sequence_s.max() * (1.0 / sequence_s).mean())


def _report(
    settings: tuple[Setting, ...], paper: published.Ratios, title: str, options: Options, found: Found
) -> Report:
    comparisons = [compared(setting, options, found) for setting in asked(settings, options)]
    return Report(
        rows=[
            _row(one, planner, outcome, options)
            for one in comparisons
            for planner, outcome in ((HEXISEQ, one.ours), *one.baselines.items())
        ],
        tables=[markdown_table([_cells(one) for one in comparisons], left=("setting", "best"))],
        sentences=sentences(comparisons, paper),
        notes=(
            "× is the throughput of our plan over that of the baseline, each with its full space: data-parallel "
            "degrees, micro-batch sizes, recompute, ZeRO and orders of tokens of its own. balance: what sharing "
            "compute by speed is worth over equal shares on all GPUs, by calibrated speeds, without communication and "
            "memory. gap: of our plan against the best bound that any search or the bound of all plans has proven.",
        ),
        figure=_draw(comparisons, paper, title, options),
    )


def _row(one: Comparison, planner: Planner, outcome: Outcome, options: Options) -> dict[str, Cell]:
    task = _task(one.setting, planner, options)
    return {
        "cluster": one.setting.cluster,
        "model": one.setting.model,
        "seq_len": one.setting.seq_len,
        "planner": planner.label,
        "status": outcome.status,
        "step_time_s": outcome.step_time_s,
        "tokens_per_s": outcome.tokens_per_s,
        "mfu": outcome.mfu,
        "ours_over_it": one.over(outcome),
        "lower_bound_s": one.bound_s,
        "balance": one.balance,
        "runtime_s": outcome.runtime_s,
        "time_limit_s": task.time_limit_s,
        "seed": task.seed,
        "search_sha256": task.sha256,
        "reason": outcome.reason,
    }


def _cells(one: Comparison) -> dict[str, str]:
    planner, best = one.best
    return {
        "setting": one.setting.label,
        "ours (tokens/s)": tokens(one.ours.tokens_per_s),
        **{f"{p.label}": tokens(outcome.tokens_per_s) for p, outcome in one.baselines.items()},
        "best": planner.label if best.step_time_s is not None else "none",
        "**× best**": f"**{times(one.over(best))}**" if one.over(best) is not None else "",
        "balance": times(one.balance),
        "MFU": share(one.ours.mfu),
        "gap": share(one.gap),
        "found in": "" if one.ours.step_time_s is None else f"{one.ours.runtime_s:.1f} s",
    }


def sentences(comparisons: Sequence[Comparison], paper: published.Ratios) -> list[str]:
    """What the ratios come to beside the paper's, where a baseline does as well, and where only one side has a plan."""
    ratios = {one.setting: ratio for one in comparisons if (ratio := one.over(one.best[1])) is not None}
    if not ratios:
        return ["No setting has both a plan of ours and one of a baseline."]
    highest = max(ratios, key=lambda setting: ratios[setting])
    lowest = min(ratios, key=lambda setting: ratios[setting])
    said = [
        f"Against the best baseline of each setting ours is {fmean(ratios.values()):.2f} × as fast on average, "
        f"{ratios[highest]:.2f} × at most ({highest.label}), {ratios[lowest]:.2f} × at least ({lowest.label}); "
        f"{published.HEXISEQ_SOURCE}, says {paper.mean:g} × on average and {paper.most:g} × at most."
    ]
    if fmean(ratios.values()) < paper.mean:
        worth = fmean(one.balance for one in comparisons)
        said.append(
            "The baselines do better here than the paper says: equal shares alone would cost them "
            f"{worth:.2f} × on average, by how fast the cluster's GPUs are to each other."
        )
    gaps = {one.setting: one.gap for one in comparisons if one.gap is not None}
    most = fmean(ratio / (1 - gaps[setting]) for setting, ratio in ratios.items())
    said.append(
        f"No plan at all takes less than {1 - max(gaps.values()):.1%} of our step time anywhere, or "
        f"{1 - fmean(gaps.values()):.1%} on average: no planner could be more than {most:.2f} × as fast as the best "
        "baseline on average."
    )
    for one in comparisons:
        if one.ours.step_time_s is None:
            said.append(f"Ours has no plan at {one.setting.label}.")
        elif one.best[1].step_time_s is None:
            said.append(f"No baseline has a plan at {one.setting.label}; ours has.")
    return said


def _draw(comparisons: Sequence[Comparison], paper: published.Ratios, title: str, options: Options) -> Figure:
    """Throughput over the best baseline and the certified gap against the length of a sequence, a line a place."""
    figure, (left, right) = framed(
        10.5,
        4.8,
        title,
        f"Throughput by our cost model over the best of {', '.join(p.label for p in BASELINES)}; "
        f"{options.budgets.sequence_s:g} s a search",
        columns=2,
    )
    for k, (place, group) in enumerate(groupby(comparisons, key=lambda one: one.setting.place)):
        own = list(group)
        lengths = [one.setting.seq_len for one in own]
        ratios = [one.over(one.best[1]) or math.nan for one in own]
        gaps = [math.nan if one.gap is None else 100 * one.gap for one in own]
        style = {"color": hue(k), "marker": MARKERS[k % len(MARKERS)], "markersize": 5.5, "linewidth": 1.5}
        left.plot(lengths, ratios, label=place, **style)  # type: ignore[arg-type]
        right.plot(lengths, gaps, **style)  # type: ignore[arg-type]
    left.axhspan(
        paper.mean, paper.most, color=PAPER_COLOUR, zorder=0, label=f"paper: {paper.mean:g} mean, {paper.most:g} most"
    )
    left.set_ylabel("throughput (best baseline = 1)")
    left.set_ylim(bottom=min(0.95, left.get_ylim()[0]))
    right.set_ylabel("gap to the lower bound (%)")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        context_axis(ax, comparisons)
    legend(figure, left, 4)
    return figure


def context_axis(ax: Axes, comparisons: Sequence[Comparison]) -> None:
    """The length of a sequence along x."""
    label_of = {one.setting.seq_len: one.setting.context for one in comparisons}
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(label_of)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: label_of.get(round(value), ""))
    ax.set_xlabel("tokens of a sequence")
    ax.grid(color=GRID)


def comparison(name: str, title: str, settings: tuple[Setting, ...], paper: published.Ratios) -> Table:
    """The table of `settings`."""
    report = partial(_report, settings, paper, title)
    return Table(name, title, partial(_tasks, settings), report, __package__)

"""Uneven sequence layouts against Ring Attention, Ulysses and USP on the same clusters: what two tables share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from statistics import fmean

from matplotlib.figure import Figure

from experiments.tables import published
from experiments.tables.figures import PAPER_COLOUR, framed, legend, line, sizes_axis
from experiments.tables.frame import Report, Table
from experiments.tables.long_context.settings import BASELINES, HEXISEQ, Setting, asked, at_peak, limits
from experiments.tables.long_context.speeds import IF_BY_PEAK
from experiments.tables.markdown import Cell, markdown_table, share, times, tokens
from experiments.tables.names import Planner
from experiments.tables.options import Options
from experiments.tables.pairing import Contest
from experiments.tables.task import Found, Outcome, Task
from hexiopt.cost.model import CostModel
from hexiopt.problem.problem import Problem
from solvers.sequence.token_allocation import RateTable


@dataclass(frozen=True)
class Comparison(Contest[Setting]):
    """With the best bound that any search has proven, in seconds of a step, and what balance is worth."""

    bound_s: float
    balance: float

    @property
    def gap(self) -> float | None:
        """How far our plan is at most from the best there is."""
        return self.ours.gap(self.bound_s)


def _settings(settings: tuple[Setting, ...], options: Options, *, by_peak: bool) -> tuple[Setting, ...]:
    own = asked(settings, options)
    return own + at_peak(own) if by_peak else own


def _tasks(settings: tuple[Setting, ...], by_peak: bool, options: Options) -> list[Task]:
    """Ours, every baseline and the bound in every setting."""
    return [
        task
        for setting in _settings(settings, options, by_peak=by_peak)
        for task in (
            *(setting.task(planner, options) for planner in (HEXISEQ, *BASELINES)),
            setting.bound(options),
        )
    ]


def compared(setting: Setting, options: Options, found: Found) -> Comparison:
    """What was found in a setting."""
    own = {planner: setting.task(planner, options) for planner in (HEXISEQ, *BASELINES)}
    baselines = {planner: found[own[planner]] for planner in BASELINES}
    bound_s = found.bound_s(*own.values(), setting.bound(options))
    return Comparison(setting, found[own[HEXISEQ]], baselines, bound_s, balance(own[HEXISEQ].problem))


def balance(problem: Problem) -> float:
    """How many times as fast all GPUs compute that share the work by their speed, over equal shares."""
    rates = RateTable(CostModel(problem)).of(range(problem.cluster.num_devices), "none")
    sequence_s = rates.of_sequence_s(problem.workload.seq_len, problem.model.num_heads)
    return float(sequence_s.max() * (1.0 / sequence_s).mean())


def _report(
    settings: tuple[Setting, ...], paper: published.Ratios, title: str, by_peak: bool, options: Options, found: Found
) -> Report:
    everything = [compared(setting, options, found) for setting in _settings(settings, options, by_peak=by_peak)]
    comparisons = [one for one in everything if not one.setting.by_peak]
    peaks = [one for one in everything if one.setting.by_peak]
    return Report(
        rows=[
            _row(one, planner, outcome, options)
            for one in everything
            for planner, outcome in ((HEXISEQ, one.ours), *one.baselines.items())
        ],
        tables=[markdown_table([_cells(*some) for some in zip_longest(comparisons, peaks)], left=("setting", "best"))],
        sentences=[*sentences(comparisons, paper), *peak_sentences(peaks)],
        notes=(
            "× is the throughput of our plan over that of the baseline, each with its full space: data-parallel "
            "degrees, micro-batch sizes, recompute, ZeRO and orders of tokens of its own. balance: what sharing "
            "compute by speed is worth over equal shares on all GPUs, by calibrated speeds, without communication and "
            "memory. gap: of our plan against the best bound that any search or the bound of all plans has proven.",
            *(("× best by peak: the same where every type of GPU is as efficient as an A100.",) if by_peak else ()),
        ),
        figure=_draw(comparisons, paper, title, options),
    )


def _row(one: Comparison, planner: Planner, outcome: Outcome, options: Options) -> dict[str, Cell]:
    return {
        "cluster": one.setting.cluster,
        "model": one.setting.model,
        "seq_len": one.setting.seq_len,
        "speeds": one.setting.speeds,
        "planner": planner.label,
        **outcome.cells(),
        "ours_over_it": one.ours.over(outcome),
        "lower_bound_s": one.bound_s,
        "balance": one.balance,
        **one.setting.task(planner, options).cells(outcome),
    }


def _cells(one: Comparison, by_peak: Comparison | None) -> dict[str, str]:
    planner, best = one.best
    return {
        "setting": one.setting.label,
        "ours (tokens/s)": tokens(one.ours.tokens_per_s),
        **{f"{p.label}": tokens(outcome.tokens_per_s) for p, outcome in one.baselines.items()},
        "best": planner.label if best.step_time_s is not None else "none",
        "**× best**": f"**{times(one.ratio)}**" if one.ratio is not None else "",
        **({} if by_peak is None else {"× best by peak": times(by_peak.ratio)}),
        "balance": times(one.balance),
        "MFU": share(one.ours.mfu),
        "gap": share(one.gap),
        "found in": "" if one.ours.step_time_s is None else f"{one.ours.runtime_s:.1f} s",
    }


def sentences(comparisons: Sequence[Comparison], paper: published.Ratios) -> list[str]:
    """What the ratios come to beside the paper's, where a baseline does as well, and where only one side has a plan."""
    ratios = {one.setting: one.ratio for one in comparisons if one.ratio is not None}
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


def peak_sentences(peaks: Sequence[Comparison]) -> list[str]:
    """What the ratios come to where speeds are in proportion to peaks."""
    ratios = {one.setting: one.ratio for one in peaks if one.ratio is not None}
    if not ratios:
        return []
    highest = max(ratios, key=lambda setting: ratios[setting])
    return [
        f"{IF_BY_PEAK}, ours would be "
        f"{fmean(ratios.values()):.2f} × as fast as the best baseline on average and {ratios[highest]:.2f} × at most "
        f"({highest.label})."
    ]


def _draw(comparisons: Sequence[Comparison], paper: published.Ratios, title: str, options: Options) -> Figure:
    """Throughput over the best baseline and the certified gap against the length of a sequence, a line a place."""
    figure, (left, right) = framed(
        10.5,
        4.8,
        title,
        f"Throughput by our cost model over the best of {', '.join(p.label for p in BASELINES)}; {limits(options)}",
        columns=2,
    )
    for k, (place, group) in enumerate(groupby(comparisons, key=lambda one: one.setting.place)):
        own = list(group)
        lengths = [one.setting.seq_len for one in own]
        ratios = [one.ratio or math.nan for one in own]
        gaps = [math.nan if one.gap is None else 100 * one.gap for one in own]
        left.plot(lengths, ratios, label=place, **line(k))
        right.plot(lengths, gaps, **line(k))
    left.axhspan(
        paper.mean, paper.most, color=PAPER_COLOUR, zorder=0, label=f"paper: {paper.mean:g} mean, {paper.most:g} most"
    )
    left.set_ylabel("throughput (best baseline = 1)")
    left.set_ylim(bottom=min(0.95, left.get_ylim()[0]))
    right.set_ylabel("gap to the lower bound (%)")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        sizes_axis(ax, "tokens of a sequence", {one.setting.seq_len: one.setting.context for one in comparisons})
    legend(figure, left, 4)
    return figure


def comparison(
    name: str, title: str, settings: tuple[Setting, ...], paper: published.Ratios, *, by_peak: bool = False
) -> Table:
    """The table of `settings`; `by_peak`, with what speeds in proportion to peaks would make of it."""
    report = partial(_report, settings, paper, title, by_peak)
    return Table(name, title, partial(_tasks, settings, by_peak), report, __package__)

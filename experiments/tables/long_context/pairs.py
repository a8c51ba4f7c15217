"""Mixed clusters against homogeneous ones of like FLOPS on long contexts: HexiSeq's simulations 4 and 5.

python -m experiments.tables.long_context.pairs                # about 5 minutes on two cores
python -m experiments.tables.long_context.pairs --quick        # seconds, on a tiny setting
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.tables import published
from experiments.tables.figures import PAPER_COLOUR, framed, legend
from experiments.tables.frame import Report, Table, main
from experiments.tables.long_context.settings import (
    BASELINES,
    HEXISEQ,
    PAIRS,
    PARTNERS,
    Setting,
    asked,
    at_peak,
    limits,
)
from experiments.tables.long_context.speeds import IF_BY_PEAK
from experiments.tables.markdown import Cell, change, markdown_table, span, times, tokens
from experiments.tables.names import Planner
from experiments.tables.options import Options
from experiments.tables.pairing import Pairing, flops_ratio, pairing_bars
from experiments.tables.task import Found, Task


@dataclass(frozen=True)
class Pair(Pairing[Setting]):
    """With the bound of all plans on the mixed cluster."""

    bound_s: float

    @property
    def possible(self) -> float | None:
        """What no plan on the mixed cluster can exceed, over the best baseline."""
        there_s = self.best[1].step_time_s
        return None if there_s is None else there_s / self.bound_s


def _on_partner(setting: Setting, planner: Planner, options: Options) -> Task:
    return setting.task(planner, options, cluster=PARTNERS[setting.cluster])


def _settings(options: Options) -> tuple[Setting, ...]:
    own = asked(PAIRS, options)
    return own + at_peak(own)


def tasks(options: Options) -> list[Task]:
    """Ours on every mixed cluster; ours and the baselines on its partner."""
    return [
        task
        for setting in _settings(options)
        for task in (
            setting.task(HEXISEQ, options),
            setting.bound(options),
            *(_on_partner(setting, planner, options) for planner in (HEXISEQ, *BASELINES)),
        )
    ]


def report(options: Options, found: Found) -> Report:
    """Ratios of throughput, beside the paper's."""
    everything = [_pair(setting, options, found) for setting in _settings(options)]
    pairs = [pair for pair in everything if not pair.setting.by_peak]
    peaks = [pair for pair in everything if pair.setting.by_peak]
    return Report(
        rows=[row for pair in everything for row in _rows(pair, options)],
        tables=[markdown_table([_cells(*some) for some in zip(pairs, peaks, strict=True)], left=("setting", "best"))],
        sentences=[*sentences(pairs), *peak_sentences(peaks)],
        notes=(
            "× is the throughput of our plan on the mixed cluster over that on the homogeneous cluster; FLOPS: by how "
            "much the mixed cluster has more, by dense peaks; possible: what no plan on the mixed cluster exceeds, by "
            "the bound of all plans: an H100 is worth fewer A100 by calibrated efficiencies than by peaks. "
            "By peak: the same where every type of GPU is as efficient as an A100.",
        ),
        figure=draw(pairs, peaks, options),
    )


def _pair(setting: Setting, options: Options, found: Found) -> Pair:
    mixed, partner = setting.task(HEXISEQ, options), _on_partner(setting, HEXISEQ, options)
    baselines = {planner: found[_on_partner(setting, planner, options)] for planner in BASELINES}
    bound_s = found.bound_s(mixed, setting.bound(options))
    return Pair(setting, found[mixed], baselines, flops_ratio(mixed, partner), found[partner], bound_s)


def _rows(pair: Pair, options: Options) -> list[dict[str, Cell]]:
    runs = [
        (HEXISEQ, pair.setting.task(HEXISEQ, options), pair.ours),
        *(
            (planner, _on_partner(pair.setting, planner, options), outcome)
            for planner, outcome in ((HEXISEQ, pair.ours_there), *pair.baselines.items())
        ),
    ]
    return [
        {
            "cluster": task.problem.cluster.name,
            "model": pair.setting.model,
            "seq_len": pair.setting.seq_len,
            "speeds": pair.setting.speeds,
            "planner": planner.label,
            **outcome.cells(),
            "ours_over_it": pair.ours.over(outcome),
            "flops_ratio": pair.flops_ratio,
            "mixed_lower_bound_s": pair.bound_s,
            **task.cells(outcome),
        }
        for planner, task, outcome in runs
    ]


def _cells(pair: Pair, by_peak: Pair) -> dict[str, str]:
    planner, best = pair.best
    return {
        "setting": pair.setting.label,
        "FLOPS": change(pair.flops_ratio, 1),
        "ours, mixed (tokens/s)": tokens(pair.ours.tokens_per_s),
        "ours, homogeneous": tokens(pair.ours_there.tokens_per_s),
        **{f"{p.label}, homogeneous": tokens(outcome.tokens_per_s) for p, outcome in pair.baselines.items()},
        "best": planner.label if best.step_time_s is not None else "none",
        "**× best**": f"**{times(pair.ratio)}**" if pair.ratio is not None else "",
        "possible": "" if pair.possible is None else f"≤ {pair.possible:.2f} ×",
        "× best by peak": times(by_peak.ratio),
        "× ours": times(pair.ours.over(pair.ours_there)),
    }


def sentences(pairs: Sequence[Pair]) -> list[str]:
    """How far the mixed clusters are from the homogeneous ones, beside the paper's."""
    paper, said, ratios = published.sequence_pairs(), [], []
    for pair in pairs:
        if (ratio := pair.ratio) is None:
            said.append(f"{pair.setting.label} lacks a plan on one of its clusters.")
            continue
        ratios.append(ratio)
        if ratio < 1 - paper:
            said.append(f"At {pair.setting.label} the mixed cluster stays {1 - ratio:.1%} behind {pair.best[0].label}.")
    if ratios:
        said.insert(
            0,
            f"Mixed clusters reach {span(ratios, '.3f')} × of the best baseline on the homogeneous cluster "
            f"({published.HEXISEQ_SOURCE}: within {paper:.1%}).",
        )
    possible = [pair.possible for pair in pairs if pair.possible is not None]
    if possible and max(possible) < 1 - paper:
        said.append(f"No plan on a mixed cluster can: the bound of all plans leaves {max(possible):.2f} × at most.")
    return said


def peak_sentences(peaks: Sequence[Pair]) -> list[str]:
    """What is reached where speeds are in proportion to peaks."""
    ratios = [pair.ratio for pair in peaks if pair.ratio is not None]
    if not ratios:
        return []
    return [f"{IF_BY_PEAK}, mixed clusters would reach {span(ratios, '.3f')} ×."]


def draw(pairs: Sequence[Pair], peaks: Sequence[Pair], options: Options) -> Figure:
    """Throughput relative to the best homogeneous baseline, a group of bars a setting."""
    figure, (ax,) = framed(
        10.5,
        4.8,
        "Long contexts: mixed clusters against homogeneous ones of like FLOPS",
        f"Throughput by our cost model over the best homogeneous baseline's; {limits(options)}",
    )
    paper = published.sequence_pairs()
    ax.axhspan(1 - paper, 1 + paper, color=PAPER_COLOUR, zorder=0, label=f"paper: within {paper:.1%}")
    groups = [pair.setting.label.replace(" · ", "\n") for pair in pairs]
    pairing_bars(ax, groups, pairs, {"the same, speeds by peak": [pair.ours for pair in peaks]})
    legend(figure, ax, 3)
    return figure


TABLE = Table("pairs", "Long contexts: mixed against homogeneous clusters of like FLOPS", tasks, report, __package__)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

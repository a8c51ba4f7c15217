"""Mixed clusters under our planner against homogeneous clusters of like FLOPS under the systems made for those.

python -m experiments.tables.homogeneous                  # about 3 minutes on two cores
python -m experiments.tables.homogeneous --quick          # seconds, on a tiny setting
"""

import sys
from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from experiments.tables import published
from experiments.tables.figures import PAPER_COLOUR, framed, legend
from experiments.tables.frame import Report, Table, main
from experiments.tables.markdown import Cell, change, markdown_table, share, span, times, tokens
from experiments.tables.names import HOMOGENEOUS, MEGATRON, OURS, Planner
from experiments.tables.options import Options
from experiments.tables.pairing import Pairing, flops_ratio, pairing_bars
from experiments.tables.settings import Setting
from experiments.tables.task import Found, Task

Comparison = Pairing[Setting]


def _on_mixed(setting: Setting, options: Options) -> Task:
    return OURS.task(setting.problem(options.inter_gb_per_s), options.budgets.ours_s)


def _on_partner(setting: Setting, planner: Planner, options: Options) -> Task:
    return planner.task(setting.partner_problem(options.inter_gb_per_s), options.budgets.rival_s)


def tasks(options: Options) -> list[Task]:
    """Ours on every mixed cluster; ours and the baselines on its partner."""
    partners = [
        _on_partner(setting, planner, options) for setting in options.settings for planner in (OURS, *HOMOGENEOUS)
    ]
    return [*(_on_mixed(setting, options) for setting in options.settings), *partners]


def report(options: Options, found: Found) -> Report:
    """Ratios of throughput, beside the paper's."""
    comparisons = [_comparison(setting, options, found) for setting in options.settings]
    return Report(
        rows=[row for comparison in comparisons for row in _rows(comparison, options)],
        tables=[
            markdown_table([cells(comparison) for comparison in comparisons], left=("setting",))
            for cells in (_throughput_cells, _ratio_cells)
        ],
        sentences=sentences(comparisons),
        notes=(
            "× is the throughput of our plan on the mixed cluster over that of the system on the homogeneous cluster, "
            "tokens/s over tokens/s. The paper's × is its measured MFU over Megatron's times FLOPS "
            f"({published.SOURCE}, README of its code). MFU counts causal attention half; how the "
            "paper counts is not stated.",
        ),
        figure=draw(comparisons, options),
    )


def _comparison(setting: Setting, options: Options, found: Found) -> Comparison:
    mixed, partner = _on_mixed(setting, options), _on_partner(setting, OURS, options)
    baselines = {planner: found[_on_partner(setting, planner, options)] for planner in HOMOGENEOUS}
    return Comparison(setting, found[mixed], baselines, flops_ratio(mixed, partner), found[partner])


def _rows(comparison: Comparison, options: Options) -> list[dict[str, Cell]]:
    setting = comparison.setting
    runs = [
        (OURS, _on_mixed(setting, options), comparison.ours),
        *(
            (planner, _on_partner(setting, planner, options), outcome)
            for planner, outcome in ((OURS, comparison.ours_there), *comparison.baselines.items())
        ),
    ]
    return [
        {
            "setting": setting.number,
            "model": setting.model,
            "cluster": task.problem.cluster.name,
            "planner": planner.label,
            **outcome.cells(),
            "ours_over_it": comparison.ours.over(outcome),
            "flops_ratio": comparison.flops_ratio,
            **task.cells(outcome),
        }
        for planner, task, outcome in runs
    ]


def _throughput_cells(comparison: Comparison) -> dict[str, str]:
    there = {"ours": comparison.ours_there} | {p.label: outcome for p, outcome in comparison.baselines.items()}
    return {
        "setting": comparison.setting.label,
        "ours, mixed (tokens/s)": tokens(comparison.ours.tokens_per_s),
        **{f"{label}, homogeneous": tokens(outcome.tokens_per_s) for label, outcome in there.items()},
    }


def _ratio_cells(comparison: Comparison) -> dict[str, str]:
    setting = comparison.setting
    paper = published.measured(setting.number, setting.model)
    cells = {
        "setting": setting.label,
        "FLOPS": change(comparison.flops_ratio, 2),
        "(paper)": change(paper.flops_ratio, 2) if paper else "",
    }
    cells |= {
        f"× {planner.label}": times(comparison.ours.over(outcome)) for planner, outcome in comparison.baselines.items()
    }
    return cells | {
        "(paper, Megatron-LM)": times(paper.throughput_ratio) if paper else "",
        "**× best**": f"**{times(comparison.ratio)}**",
        "MFU": share(comparison.ours.mfu),
        "(paper, HexiScale)": share(paper.mfu) if paper else "",
        "Megatron-LM's MFU": share(comparison.baselines[MEGATRON].mfu),
        "(paper, Megatron)": share(paper.megatron_mfu) if paper else "",
    }


def sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """What the ratios come to, and every baseline that does better than the paper says."""
    ratios = [one.ratio for one in comparisons if one.ratio is not None]
    if not ratios:
        return ["No setting has both a plan of ours and one of a baseline."]
    mean, most, paper_mean = fmean(ratios), max(ratios), published.homogeneous_mean()
    said = [
        f"Against the best homogeneous baseline ours reaches {mean:.2f} × on average and {most:.2f} × at most "
        f"({published.SOURCE}: {paper_mean:g} × and {published.homogeneous_most():g} ×)."
    ]
    for one in comparisons:
        if one.ratio is not None and one.ratio < paper_mean:
            said.append(
                f"{one.best[0].label} does better here than the paper says at setting {one.setting.label}: ours on the "
                f"mixed cluster reaches {one.ratio:.2f} × of it, the paper's average is {paper_mean:g} ×."
            )
    return said + _mfu_sentences(comparisons)


def _mfu_sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """Whether Megatron-LM is more efficient by our cost model than the paper measured."""
    pairs = [
        (mfu, paper.megatron_mfu)
        for one in comparisons
        if (paper := published.measured(one.setting.number, one.setting.model)) is not None
        and (mfu := one.baselines[MEGATRON].mfu) is not None
    ]
    if not pairs or not any(own > paper for own, paper in pairs):
        return []
    ours, papers = ([pair[k] for pair in pairs] for k in (0, 1))
    return [
        f"By our cost model Megatron-LM reaches an MFU of {span(ours, '.1%')} on the homogeneous clusters; the paper's "
        f"README measured {span(papers, '.1%')} on A100 PCIe over TCP."
    ]


def draw(comparisons: Sequence[Comparison], options: Options) -> Figure:
    """Throughput per setting, relative to the best homogeneous baseline."""
    network = (
        f"{options.inter_gb_per_s:g} GB/s between machines" if options.inter_gb_per_s else "network of the settings"
    )
    figure, (ax,) = framed(
        10.5,
        4.8,
        "Mixed clusters against homogeneous ones of like FLOPS",
        f"Throughput by our cost model over the best homogeneous baseline's; {network}; "
        f"{options.budgets.ours_s:g} s on a mixed cluster, {options.budgets.rival_s:g} s on a homogeneous one",
    )
    ax.axhspan(
        published.homogeneous_mean(),
        published.homogeneous_most(),
        color=PAPER_COLOUR,
        zorder=0,
        label=f"paper: {published.homogeneous_mean():g} on average to {published.homogeneous_most():g} at most",
    )
    groups = [f"{one.setting.label}\n{change(one.flops_ratio)} FLOPS" for one in comparisons]
    pairing_bars(ax, groups, comparisons, {})
    legend(figure, ax, 3)
    return figure


TABLE = Table("homogeneous", "Mixed clusters against homogeneous ones of like FLOPS", tasks, report)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

"""Our planner against others on the same mixed clusters, every plan priced by our cost model.

python -m experiments.tables.rivals                       # about 7 minutes on two cores
python -m experiments.tables.rivals --quick               # seconds, on a tiny setting
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from matplotlib.figure import Figure

from experiments.tables import published
from experiments.tables.figures import BAND, GRID, MARKERS, PAPER_COLOUR, framed, hue, legend, spread
from experiments.tables.frame import Report, Table, main
from experiments.tables.markdown import Cell, markdown_table, share, times, tokens
from experiments.tables.names import OURS, RIVALS, Planner
from experiments.tables.options import Options
from experiments.tables.settings import Setting
from experiments.tables.task import BOUND, Found, Outcome, Task
from hexiopt.report.style import INK, MUTED


@dataclass(frozen=True)
class Comparison:
    """A setting: ours, the rivals, and the best lower bound of all plans in seconds."""

    setting: Setting
    ours: Outcome
    rivals: Mapping[Planner, Outcome]
    bound_s: float

    def over(self, planner: Planner) -> float | None:
        """Throughput of ours over a rival's."""
        return self.ours.over(self.rivals[planner])


def _planned(setting: Setting, planner: Planner, options: Options) -> Task:
    limit_s = options.budgets.ours_s if planner is OURS else options.budgets.rival_s
    return planner.task(setting.problem(options.inter_gb_per_s), limit_s)


def _bound(setting: Setting, options: Options) -> Task:
    return Task(setting.problem(options.inter_gb_per_s), BOUND, options.budgets.bound_s)


def tasks(options: Options) -> list[Task]:
    """Ours, the bound and every rival on every setting."""
    return [
        task
        for setting in options.settings
        for task in (
            *(_planned(setting, planner, options) for planner in (OURS, *RIVALS)),
            _bound(setting, options),
        )
    ]


def report(options: Options, found: Found) -> Report:
    """Ratios of throughput, beside the paper's."""
    comparisons = []
    for setting in options.settings:
        ours, bound = _planned(setting, OURS, options), _bound(setting, options)
        rivals = {planner: found[_planned(setting, planner, options)] for planner in RIVALS}
        comparisons.append(Comparison(setting, found[ours], rivals, found.bound_s(ours, bound)))
    paper = published.rival_range()
    return Report(
        rows=[row for comparison in comparisons for row in _rows(comparison, options)],
        tables=[
            markdown_table([_setting_cells(one) for one in comparisons], left=("setting",)),
            markdown_table([_rival_cells(planner, comparisons) for planner in RIVALS], left=("ours over",)),
        ],
        sentences=sentences(comparisons),
        notes=(
            "× is our throughput over the rival's on the same cluster. Each rival searches its own published plan "
            "space with its own estimate, and of the plans it ranks best the best by our cost model counts, so that it "
            f"is not beaten for a poor estimate. Paper: {published.SOURCE}, {paper} over Metis, AMP and Espresso. gap: "
            "no plan of any planner takes less than that share under our step time.",
        ),
        figure=draw(comparisons, options),
    )


def _rows(comparison: Comparison, options: Options) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    for planner, outcome in ((OURS, comparison.ours), *comparison.rivals.items()):
        task = _planned(comparison.setting, planner, options)
        rows.append(
            {
                "setting": comparison.setting.number,
                "model": comparison.setting.model,
                "planner": planner.label,
                **outcome.cells(),
                "ours_over_it": comparison.ours.over(outcome),
                "lower_bound_s": comparison.bound_s,
                **task.cells(outcome),
            }
        )
    return rows


def _setting_cells(comparison: Comparison) -> dict[str, str]:
    setting = comparison.setting
    paper = published.measured(setting.number, setting.model)
    return {
        "setting": setting.label,
        "ours: tokens/s": tokens(comparison.ours.tokens_per_s),
        "MFU": share(comparison.ours.mfu),
        "HexiScale's MFU (paper)": share(paper.mfu) if paper else "",
        "gap": share(comparison.ours.gap(comparison.bound_s)),
    }


def _rival_cells(planner: Planner, comparisons: Sequence[Comparison]) -> dict[str, str]:
    cells = {"ours over": planner.label}
    for one in comparisons:
        ratio = one.over(planner)
        cells[one.setting.label] = times(ratio) or one.rivals[planner].status.replace("_", " ")
    ratios = _ratios(planner, comparisons)
    cells["geometric mean"] = times(geometric_mean(ratios)) if ratios else ""
    cells["paper"] = str(published.rival_range()) if planner.solver in published.compared_rivals() else ""
    return cells


def _ratios(planner: Planner, comparisons: Sequence[Comparison]) -> list[float]:
    return [ratio for one in comparisons if (ratio := one.over(planner)) is not None]


def sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """Each rival of the paper beside the paper's range, and every rival that beats ours."""
    said = []
    for planner in RIVALS:
        ratios = _ratios(planner, comparisons)
        if planner.solver in published.compared_rivals() and ratios:
            said.append(published.verdict(planner.label, ratios, published.rival_range()))
        without = [one.setting.label for one in comparisons if one.rivals[planner].step_time_s is None]
        if without:
            said.append(f"{planner.label} has no plan at {', '.join(without)}.")
    for one in comparisons:
        better = [planner for planner in RIVALS if (ratio := one.over(planner)) is not None and ratio < 1.0]
        for planner in better:
            lead = 1 - (one.over(planner) or 1.0)
            said.append(f"{planner.label} beats ours at setting {one.setting.label}: its step takes {lead:.2%} less.")
        if one.ours.step_time_s is None:
            said.append(f"Ours has no plan at setting {one.setting.label}: {one.ours.reason}")
    return said


def draw(comparisons: Sequence[Comparison], options: Options) -> Figure:
    """Our throughput over every rival's: a row a rival, a mark a setting."""
    figure, (ax,) = framed(
        9.5,
        6.4,
        "Our plan against other planners' on the same mixed cluster",
        f"Throughput by our cost model, ours over theirs; {options.budgets.rival_s:g} s a rival, "
        f"{options.budgets.ours_s:g} s ours; band: what the paper says of Metis, AMP and Espresso",
    )
    rows, paper = list(reversed(RIVALS)), published.rival_range()
    offsets = list(reversed(spread(len(comparisons), 0.74)))
    for k, one in enumerate(comparisons):
        points = [(ratio, y + offsets[k]) for y, planner in enumerate(rows) if (ratio := one.over(planner)) is not None]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        marker = MARKERS[k % len(MARKERS)]
        ax.plot(xs, ys, marker, color=hue(k), markersize=7, label=one.setting.label, markeredgecolor="white")
    for y, planner in enumerate(rows):
        if planner.solver in published.compared_rivals():
            label = f"paper: {paper}" if planner is RIVALS[0] else None
            ax.fill_betweenx((y - 0.42, y + 0.42), paper.least, paper.most, color=PAPER_COLOUR, zorder=0, label=label)
        if y % 2:
            ax.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=-1)
        ratios = _ratios(planner, comparisons)
        if ratios:
            ax.plot([geometric_mean(ratios)] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.4, zorder=3)
    ax.plot([], [], color=INK, linewidth=1.4, label="geometric mean")
    ax.axvline(1.0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(rows)), [planner.label for planner in rows])
    ax.set_ylim(-0.5, len(rows) - 0.5)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.95), max(high, paper.most * 1.03))
    for y, planner in enumerate(rows):
        missing = len(comparisons) - len(_ratios(planner, comparisons))
        if missing:
            text = f"no plan at {missing} of {len(comparisons)}"
            ax.text(0.99, y, text, transform=ax.get_yaxis_transform(), color=MUTED, va="center", ha="right", fontsize=9)
    ax.grid(axis="x", color=GRID)
    ax.set_xlabel("our throughput over theirs (×)")
    legend(figure, ax, 4)
    return figure


TABLE = Table("rivals", "Against other planners on the same mixed clusters", tasks, report)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

"""How fast searches converge: HexiScale's partition and our portfolio against random partition, several seeds.

python -m experiments.tables.convergence                  # about 3 minutes on two cores
python -m experiments.tables.convergence --quick          # seconds, on a tiny setting
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.tables import published
from experiments.tables.figures import GRID, framed, hue, legend
from experiments.tables.frame import Report, Table, main
from experiments.tables.markdown import Cell, markdown_table, times, tokens
from experiments.tables.names import OURS, Planner
from experiments.tables.options import Options
from experiments.tables.settings import Setting, one_model_each
from experiments.tables.task import Found, Outcome, Task

RANDOM = Planner("random", "random partition")
METIS = Planner("hexiscale", "HexiScale's partition")
PLANNERS = (RANDOM, METIS, Planner(OURS.solver, "our portfolio"))
_GRID = 200  # points of a curve


@dataclass(frozen=True)
class Race:
    """A setting: the searches of every planner, by seed."""

    setting: Setting
    runs: Mapping[Planner, Sequence[Outcome]]
    tokens: int

    def ratios(self, planner: Planner) -> list[float]:
        """Throughput over random partition's of the same seed, at the end."""
        pairs = zip(self.runs[planner], self.runs[RANDOM], strict=True)
        return [ratio for own, random in pairs if (ratio := own.over(random)) is not None]

    def overtakes_s(self, planner: Planner) -> list[float]:
        """Seconds until it is at least as good as random partition of the same seed at the end, where it ever is."""
        pairs = zip(self.runs[planner], self.runs[RANDOM], strict=True)
        found = [own.time_to_s(random.objective) for own, random in pairs if random.trajectory]
        return [at for at in found if at is not None]


def _task(setting: Setting, planner: Planner, seed: int, options: Options) -> Task:
    return planner.task(setting.problem(options.inter_gb_per_s), options.budgets.convergence_s, seed)


def tasks(options: Options) -> list[Task]:
    """Every planner and seed on the first model of every setting."""
    return [
        _task(setting, planner, seed, options)
        for setting in one_model_each(options.settings)
        for planner in PLANNERS
        for seed in range(options.seeds)
    ]


def report(options: Options, found: Found) -> Report:
    """Throughput over time, beside the paper's ratios."""
    races = []
    for setting in one_model_each(options.settings):
        runs = {p: [found[_task(setting, p, seed, options)] for seed in range(options.seeds)] for p in PLANNERS}
        races.append(Race(setting, runs, setting.workload.tokens))
    rows = [row for race in races for row in _rows(race, options)]
    points = [row for race in races for row in _points(race)]
    return Report(
        rows=rows,
        tables=[markdown_table([_cells(race) for race in races], left=("setting",))],
        sentences=sentences(races),
        notes=(
            "Tokens/s are geometric means over the seeds, × of the ratios to random partition with the same seed "
            "(least to largest in brackets). *catches up* is the median time after which a search is as good as random "
            f"partition after its whole {options.budgets.convergence_s:g} s. Random partition and HexiScale's complete "
            "a partition alike (layers, recompute and batches are computed), so only the partition differs; the "
            "portfolio runs on two cores and searches by more than partitions.",
        ),
        figure=draw(races, options),
        more={"points": points},
    )


def _rows(race: Race, options: Options) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    for planner, runs in race.runs.items():
        for seed, (own, random) in enumerate(zip(runs, race.runs[RANDOM], strict=True)):
            task = _task(race.setting, planner, seed, options)
            ratio = own.over(random)
            rows.append(
                {
                    "setting": race.setting.number,
                    "model": race.setting.model,
                    "solver": planner.solver,
                    "seed": seed,
                    **own.cells(mfu=False),
                    "over_random": ratio,
                    "catches_up_s": None if ratio is None else own.time_to_s(random.objective),
                    "first_plan_s": own.first_plan_s,
                    "runtime_s": own.runtime_s,
                    "time_limit_s": task.time_limit_s,
                    "search_sha256": task.sha256,
                }
            )
    return rows


def _points(race: Race) -> list[dict[str, Cell]]:
    """Every improvement of every search."""
    return [
        {
            "setting": race.setting.number,
            "model": race.setting.model,
            "solver": planner.solver,
            "seed": seed,
            "runtime_s": at_s,
            "step_time_s": step_time_s,
        }
        for planner, runs in race.runs.items()
        for seed, run in enumerate(runs)
        for at_s, step_time_s in run.trajectory
    ]


def _cells(race: Race) -> dict[str, str]:
    cells = {"setting": race.setting.label}
    for planner in PLANNERS:
        reached = [run.tokens_per_s for run in race.runs[planner] if run.tokens_per_s is not None]
        cells[f"{planner.label}: tokens/s"] = tokens(geometric_mean(reached) if reached else None)
        if planner is not RANDOM:
            ratios, at = race.ratios(planner), race.overtakes_s(planner)
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells[f"× ({planner.solver})"] = (times(geometric_mean(ratios)) if ratios else "") + spread
            cells[f"catches up ({planner.solver})"] = f"{median(at):.2f} s" if at else ""
    return cells | {"paper": str(published.random_range())}


def sentences(races: Sequence[Race]) -> list[str]:
    """The ratios beside the paper's range, and whether every seed caught up."""
    said = []
    for planner in PLANNERS[1:]:
        means = [geometric_mean(ratios) for race in races if (ratios := race.ratios(planner))]
        if means:
            said.append(published.verdict("Random partition", means, published.random_range(), planner.label))
        for race in races:
            caught, of = len(race.overtakes_s(planner)), len(race.ratios(planner))
            if caught < of:
                said.append(
                    f"{planner.label} stays behind random partition in {of - caught} of {of} runs of setting "
                    f"{race.setting.label}."
                )
    return said


def draw(races: Sequence[Race], options: Options) -> Figure:
    """A panel a setting: the best throughput so far over search time, mean and band of all seeds."""
    figure, axes = framed(
        4.2 * len(races) + (1.5 if len(races) == 1 else 0.0),
        4.4,
        "How fast the searches converge",
        f"Best throughput so far, by our cost model: geometric mean (line) and range (band) of {options.seeds} seeds, "
        "from where all have a plan",
        columns=len(races),
    )
    for ax, race in zip(axes, races, strict=True):
        _panel(ax, race, options)
    axes[0].set_ylabel("best throughput so far (thousand tokens/s)")
    legend(figure, axes[0], 3)
    return figure


def _panel(ax: Axes, race: Race, options: Options) -> None:
    end_s = options.budgets.convergence_s
    start_s = min((run.first_plan_s or end_s for runs in race.runs.values() for run in runs), default=end_s)
    grid = np.geomspace(max(start_s, end_s / 1000), end_s * 1.02, _GRID)
    for k, (planner, runs) in enumerate(race.runs.items()):
        best = np.array([[run.best_at_s(t) for t in grid] for run in runs])
        ready = np.isfinite(best).all(axis=0)
        reached = race.tokens / best[:, ready] / 1e3
        if ready.any():
            mean = np.exp(np.log(reached).mean(axis=0))
            ax.plot(grid[ready], mean, color=hue(k), linewidth=1.8, label=planner.label)
            ax.fill_between(grid[ready], reached.min(axis=0), reached.max(axis=0), color=hue(k), alpha=0.2, linewidth=0)
        else:
            ax.plot([], [], color=hue(k), label=f"{planner.label} (not every seed has a plan)")
    ax.set_xscale("log")
    ax.set_xlim(grid[0], grid[-1])
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("search time (s)")
    ax.set_title(race.setting.label, fontsize=10, loc="left")
    ax.grid(color=GRID)


TABLE = Table("convergence", "Convergence against random partition", tasks, report)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

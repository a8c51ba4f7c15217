"""What each asymmetry is worth: the portfolio without one freedom after the other, and without all.

python -m experiments.tables.ablation                     # about 5 minutes on two cores
python -m experiments.tables.ablation --quick             # seconds, on a tiny setting
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from experiments.tables.figures import framed, legend, row_bars
from experiments.tables.frame import Report, Table, main
from experiments.tables.markdown import Cell, markdown_table, span, tokens
from experiments.tables.names import OURS
from experiments.tables.nested import Nested
from experiments.tables.options import Options
from experiments.tables.settings import Setting, one_model_each
from experiments.tables.task import Found, Task, fastest
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.report.style import FAINT
from hexiopt.schedules.registry import ONE_F_ONE_B

_SMALL = 0.0005  # costs below 0.05 % are called nothing


@dataclass(frozen=True)
class Variant:
    """A plan space: which switches are off, and the schedule."""

    label: str
    off: tuple[str, ...] = ()
    schedule: str = "auto"

    @property
    def space(self) -> Space:
        """As a plan space."""
        return replace(Space(), **dict[str, Any](dict.fromkeys(self.off, False)))

    @property
    def bound(self) -> set[str]:
        """Switches that are off, or have nothing left to say."""
        return {*self.off, "recompute_per_layer"} if "recompute_per_stage" in self.off else set(self.off)

    def holds(self, other: "Variant") -> bool:
        """Whether every plan of `other` is one of this space too."""
        return set(self.off) <= other.bound and self.schedule in ("auto", other.schedule)


_LABELS = {
    "replicas": "no replicated stages",
    "uneven_layers": "equal layers in a pipeline",
    "uneven_tp": "one TP degree",
    "uneven_batch": "equal batches of pipelines",
    "uneven_structure": "pipelines all alike",
    "recompute_per_stage": "one recompute policy",
    "recompute_per_layer": "one policy a stage",
}
WHOLE = Variant("the whole plan space")
NONE = Variant("none of them (all off)", SWITCHES)
VARIANTS = (
    WHOLE,
    *(Variant(_LABELS[name], (name,)) for name in SWITCHES),
    Variant("1F1B only", schedule=ONE_F_ONE_B.name),
    NONE,
)


class Ablation(Nested[Setting, Variant]):
    """A setting: what was found for every variant."""

    def cost(self, variant: Variant) -> float | None:
        """How much longer a step takes in a variant's space than in the whole one."""
        best_s = self.best_s(variant)
        return None if best_s == float("inf") else best_s / self.best_s(WHOLE) - 1


def _task(setting: Setting, variant: Variant, options: Options) -> Task:
    problem = setting.problem(options.inter_gb_per_s, space=variant.space, schedule=variant.schedule)
    return OURS.task(problem, options.budgets.ablation_s)


def tasks(options: Options) -> list[Task]:
    """Every variant on the first model of every setting."""
    return [_task(setting, variant, options) for setting in one_model_each(options.settings) for variant in VARIANTS]


def report(options: Options, found: Found) -> Report:
    """What each freedom costs to lose."""
    settings = one_model_each(options.settings)
    ablations = [Ablation(s, {v: found[_task(s, v, options)] for v in VARIANTS}) for s in settings]
    return Report(
        rows=[_row(ablation, variant, options) for ablation in ablations for variant in VARIANTS],
        tables=[
            markdown_table([_whole_cells(ablation) for ablation in ablations], left=("setting",)),
            markdown_table([_cells(variant, ablations) for variant in VARIANTS[1:]], left=("without it",)),
        ],
        sentences=sentences(ablations),
        notes=(
            "How much longer a step takes than in the whole plan space. A smaller space's plan is one of the larger's: "
            "a space counts with the best plan of any search inside it; the CSV has what each search found itself.",
        ),
        figure=draw(ablations, options),
    )


def _row(ablation: Ablation, variant: Variant, options: Options) -> dict[str, Cell]:
    run, task, best_s = ablation.runs[variant], _task(ablation.setting, variant, options), ablation.best_s(variant)
    return {
        "setting": ablation.setting.number,
        "model": ablation.setting.model,
        "variant": variant.label,
        "off": " ".join(variant.off),
        "schedule": variant.schedule,
        "status": run.status,
        "found_step_time_s": run.step_time_s,
        "step_time_s": best_s if best_s < float("inf") else None,
        "cost": ablation.cost(variant),
        **task.cells(run),
    }


def _whole_cells(ablation: Ablation) -> dict[str, str]:
    best_s, own = ablation.best_s(WHOLE), ablation.runs[WHOLE]
    sure = best_s < float("inf")
    return {
        "setting": ablation.setting.label,
        "whole plan space: tokens/s": tokens(ablation.setting.workload.tokens / best_s if sure else None),
        "its own search": f"{own.objective / best_s - 1:+.2%}" if sure and own.step_time_s is not None else "",
    }


def _cells(variant: Variant, ablations: Sequence[Ablation]) -> dict[str, str]:
    cells = {"without it": variant.label}
    for ablation in ablations:
        cost = ablation.cost(variant)
        cells[ablation.setting.label] = "no plan" if cost is None else f"{cost:+.1%}"
    return cells


def _costs(variant: Variant, ablations: Sequence[Ablation]) -> list[float]:
    return [cost for ablation in ablations if (cost := ablation.cost(variant)) is not None]


def sentences(ablations: Sequence[Ablation]) -> list[str]:
    """What all of it is worth, which single freedom most, which nothing; and where the search itself fell short."""
    said = []
    together = _costs(NONE, ablations)
    if together:
        said.append(f"Without any asymmetry a step takes {span(together, '.1%')} longer.")
    means = {v: fmean(costs) for v in VARIANTS[1:-1] if (costs := _costs(v, ablations))}
    if means:
        dearest = max(means, key=lambda variant: means[variant])
        if means[dearest] > _SMALL:
            said.append(f"The dearest single loss is “{dearest.label}”: {means[dearest]:.1%} on average.")
        free = [f"“{v.label}”" for v in means if max(_costs(v, ablations)) <= _SMALL]
        if free:
            said.append(f"Nothing is lost here, as far as these searches see, by {', '.join(free)}.")
    for ablation in ablations:
        own, best_s = ablation.runs[WHOLE], ablation.best_s(WHOLE)
        if own.objective > best_s * (1 + _SMALL):
            finder, _ = fastest(ablation.runs)
            said.append(
                f"At setting {ablation.setting.label} the search of the whole space stops "
                f"{own.objective / best_s - 1:.1%} above the best plan known, which “{finder.label}” gave."
            )
        for variant in VARIANTS:
            if ablation.cost(variant) is None:
                said.append(f"Setting {ablation.setting.label} has no plan found in “{variant.label}”.")
    return said


def draw(ablations: Sequence[Ablation], options: Options) -> Figure:
    """A row a variant, a bar a setting."""
    figure, (ax,) = framed(
        9.5,
        5.0,
        "What each asymmetry is worth",
        "How much longer a step takes without it, by our cost model; "
        f"portfolio, {options.budgets.ablation_s:g} s a search",
    )
    costs = {one.setting.label: [one.cost(variant) for variant in VARIANTS[1:]] for one in ablations}
    row_bars(ax, [variant.label for variant in VARIANTS[1:]], costs)
    ax.axhline(0.5, color=FAINT, linewidth=1)
    ax.set_xlabel("longer step (%)")
    legend(figure, ax, 4)
    return figure


TABLE = Table("ablation", "What each asymmetry is worth", tasks, report)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

"""What uneven tokens, heads and groups, and the orders of tokens, are each worth in a sequence layout.

python -m experiments.tables.long_context.layouts              # about a minute on two cores
python -m experiments.tables.long_context.layouts --quick      # seconds, on a tiny setting
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.tables.figures import framed, legend, row_bars
from experiments.tables.frame import Report, Table, main
from experiments.tables.long_context.settings import ABLATION, Setting, asked
from experiments.tables.markdown import Cell, markdown_table, span, tokens
from experiments.tables.nested import Nested
from experiments.tables.options import Options
from experiments.tables.task import Found, Task

_UNEVEN = ("tokens", "heads", "groups")
_ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Variant:
    """What may be uneven, and the order of tokens; None leaves it to the search."""

    label: str
    uneven: tuple[str, ...] = _UNEVEN
    order: str | None = None

    @property
    def options(self) -> tuple[tuple[str, str | bool], ...]:
        """Options of the solver."""
        off = tuple((f"uneven_{what}", False) for what in _UNEVEN if what not in self.uneven)
        return (*off, ("order", self.order)) if self.order else off

    def holds(self, other: "Variant") -> bool:
        """Whether every layout of `other` is one of this variant's too."""
        return set(other.uneven) <= set(self.uneven) and self.order in (None, other.order)


ALL, EVEN = Variant("all of them uneven"), Variant("nothing uneven", ())
VARIANTS = (
    EVEN,
    *(Variant(f"uneven {what} only", (what,)) for what in _UNEVEN),
    ALL,
    *(Variant(f"all uneven, {order}", order=order) for order in _ORDERS),
)


class Ablation(Nested[Setting, Variant]):
    """A setting: what was found for every variant."""

    def gain(self, variant: Variant) -> float | None:
        """Throughput over that of layouts that are even."""
        own_s, even_s = self.best_s(variant), self.best_s(EVEN)
        return even_s / own_s if math.isfinite(own_s) and math.isfinite(even_s) else None


def _task(setting: Setting, variant: Variant, options: Options) -> Task:
    return Task(setting.problem(options), "hexiseq", options.budgets.sequence_s, options=variant.options)


def tasks(options: Options) -> list[Task]:
    """Every variant in every setting."""
    return [_task(setting, variant, options) for setting in asked(ABLATION, options) for variant in VARIANTS]


def report(options: Options, found: Found) -> Report:
    """What each freedom gains."""
    settings = asked(ABLATION, options)
    ablations = [Ablation(s, {v: found[_task(s, v, options)] for v in VARIANTS}) for s in settings]
    return Report(
        rows=[_row(ablation, variant, options) for ablation in ablations for variant in VARIANTS],
        tables=[
            markdown_table([_even_cells(ablation) for ablation in ablations], left=("setting",)),
            markdown_table([_cells(variant, ablations) for variant in VARIANTS[1:]], left=("layouts",)),
        ],
        sentences=sentences(ablations),
        notes=(
            "Throughput over that of even layouts: as many tokens and heads for every device, groups of one size. "
            "What fewer freedoms allow, more allow too: a variant counts with the best plan of any search inside it; "
            "the CSV has what each search found itself.",
        ),
        figure=draw(ablations, options),
    )


def _row(ablation: Ablation, variant: Variant, options: Options) -> dict[str, Cell]:
    run, task = ablation.runs[variant], _task(ablation.setting, variant, options)
    best_s = ablation.best_s(variant)
    return {
        "cluster": ablation.setting.cluster,
        "model": ablation.setting.model,
        "seq_len": ablation.setting.seq_len,
        "variant": variant.label,
        "uneven": " ".join(variant.uneven),
        "order": variant.order or "best",
        "status": run.status,
        "found_step_time_s": run.step_time_s,
        "step_time_s": best_s if math.isfinite(best_s) else None,
        "over_even": ablation.gain(variant),
        **task.cells(run),
    }


def _even_cells(ablation: Ablation) -> dict[str, str]:
    seconds = {"nothing uneven": ablation.best_s(EVEN), "all uneven": ablation.best_s(ALL)}
    each = ablation.setting.global_batch * ablation.setting.seq_len
    return {
        "setting": ablation.setting.label,
        **{f"{word} (tokens/s)": tokens(each / s if math.isfinite(s) else None) for word, s in seconds.items()},
    }


def _cells(variant: Variant, ablations: Sequence[Ablation]) -> dict[str, str]:
    cells = {"layouts": variant.label}
    for ablation in ablations:
        gain = ablation.gain(variant)
        cells[ablation.setting.label] = "no plan" if gain is None else f"{gain:.3f} ×"
    return cells


def sentences(ablations: Sequence[Ablation]) -> list[str]:
    """What each freedom is worth alone, which order wins, and who has no plan."""
    said = []
    for variant in VARIANTS[1:]:
        gains = [gain for ablation in ablations if (gain := ablation.gain(variant)) is not None]
        if gains:
            said.append(f"{variant.label} reaches {span(gains, '.3f')} × of even layouts.")
    for ablation in ablations:
        for variant in VARIANTS:
            if not math.isfinite(ablation.best_s(variant)):
                said.append(f"{ablation.setting.label} has no plan with {variant.label}.")
    return said


def draw(ablations: Sequence[Ablation], options: Options) -> Figure:
    """A row a variant, a bar a setting."""
    figure, (ax,) = framed(
        9.5,
        5.0,
        "What each freedom of a sequence layout is worth",
        f"Throughput over even layouts, by our cost model; hexiseq, {options.budgets.sequence_s:g} s a search",
    )
    more = {
        one.setting.label: [None if (gain := one.gain(variant)) is None else gain - 1 for variant in VARIANTS[1:]]
        for one in ablations
    }
    row_bars(ax, [variant.label for variant in VARIANTS[1:]], more)
    ax.set_xlabel("more throughput than even layouts (%)")
    legend(figure, ax, 2)
    return figure


TABLE = Table("layouts", "What each freedom of a sequence layout is worth", tasks, report, __package__)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))

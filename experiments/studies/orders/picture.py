"""Pictures of our orders: a step beside its optimal schedule, and how near many of them are."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.studies.frame.figures import hue, plain
from experiments.studies.orders.optimum import optimum
from experiments.studies.orders.pipelines import SmallPipeline, clock_spans
from hexiopt.report.panels import canvas
from hexiopt.report.style import INK, PAPER, ink_on, operation_colour
from hexiopt.simulation.engine import Span

_KINDS = {"forward": "forward", "backward": "backward of inputs", "weights": "gradients of weights"}


def _draw_lanes(ax: Axes, spans: Sequence[Span], num_stages: int, title: str) -> None:
    """A lane for each stage, with the numbers of micro-batches."""
    for span in spans:
        if not span.is_message:
            colour, length = operation_colour(0, span.stage, num_stages, span.kind), span.end_s - span.start_s
            ax.barh(span.stage, length, 0.8, span.start_s, color=colour, edgecolor=PAPER, linewidth=0.5)
            middle, ink = span.start_s + length / 2, ink_on(colour)
            ax.text(middle, span.stage, f"{span.micro_batch}", fontsize=6, color=ink, ha="center", va="center")
    end = max(span.end_s for span in spans)
    ax.axvline(end, color=INK, linewidth=0.8)
    ax.set_yticks(range(num_stages), [f"stage {s}" for s in range(num_stages)], fontsize=8)
    ax.set_ylim(num_stages - 0.5, -0.5)
    ax.set_title(f"{title}: {end:g} ticks", loc="left", fontsize=9, color=INK)


def draw_beside_optimum(pipeline: SmallPipeline, split: bool = True) -> Figure:
    """A step of a pipeline in our order, and the optimal one below it on the same axis."""
    ours = clock_spans(pipeline, split)
    figure = canvas.new_figure(9, 1.1 + 0.5 * pipeline.num_stages, layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for ax, spans, title in ((axes[0], ours, "Ours"), (axes[1], optimum(pipeline, split, ours).spans, "Optimal")):
        _draw_lanes(plain(ax), spans, pipeline.num_stages, title)
    entries = [Patch(color=operation_colour(0, 0, 1, kind), label=label) for kind, label in _KINDS.items()]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=8)
    return figure


def draw_ratios(compared: pd.DataFrame) -> Figure:
    """How many pipelines are how near to the optimum, by backwards and micro-batches in flight; `compared` is of
    `compare`."""
    figure = canvas.new_figure(7, 3.6, layout="constrained")
    ax = plain(figure.subplots())
    kinds, rules = ([*dict.fromkeys(compared[column])] for column in ("backwards", "in flight"))
    for (backwards, rule), rows in compared.groupby(["backwards", "in flight"], sort=False):
        above = sorted(100 * (rows["ratio"] - 1))
        shares = [100 * (number + 1) / len(above) for number in range(len(above))]
        dashes, colour = ("-", ":")[kinds.index(backwards)], hue(rules.index(rule))
        ax.step([0.0, *above], [0.0, *shares], dashes, where="post", color=colour, label=f"{backwards}, {rule}")
    ax.set(xlabel="longer than the optimal schedule (%)", ylabel="pipelines (%)", ylim=(0, 102), xlim=(0, None))
    ax.legend(frameon=False, fontsize=8, title="backwards, in flight", title_fontsize=8, loc="lower right")
    return figure

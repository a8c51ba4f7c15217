"""The layers of each pipeline, divided among its stages."""

from matplotlib import rc_context
from matplotlib.axes import Axes

from hexiopt.report.facts import PlanFacts, StageFacts
from hexiopt.report.panels.canvas import SMALL, STYLE, first_fitting, inches, new_axes, plain_axes, text_inches, title
from hexiopt.report.panels.stages import omission_notes, picture_rows
from hexiopt.report.style import INK, PAPER, ink_on


@rc_context(STYLE)
def draw_layers(facts: PlanFacts, ax: Axes | None = None, letter: str = "b") -> Axes:
    """Draw one bar per pipeline, divided into its stages by layers."""
    ax = new_axes(ax, 7, 3)
    rows, num_layers = picture_rows(facts), facts.problem.model.num_layers
    notes = ["left: pipeline; right: micro-batches × size", *omission_notes(rows)]
    title(ax, letter, "Layers", "; ".join(notes), outdent=0.8)
    width, height = inches(ax)
    lines = len(rows.pipelines)
    # The visible axis ends with the layers; the axes also hold the texts next to them.
    stretch = 1 / (1 - (max(text_inches(row.batch, SMALL) for row in rows.pipelines) + 0.1) / width)
    bar = min(0.8, 0.62 / (height / lines))  # thickness of a bar, at most 0.62 inches
    two_lines = bar * height / lines > 0.3
    for k, row in enumerate(rows.pipelines):
        for stage in row.stages:
            colour = row.stage_colour(stage)
            for first, end in stage.stage.layers:
                ax.barh(k, end - first, bar, first, color=colour, edgecolor=PAPER, linewidth=1.2)
                bar_inches = (end - first) / (num_layers * stretch) * width - 0.1
                text = first_fitting(_wordings(stage, end - first, two_lines), bar_inches, SMALL)
                at = {"ha": "center", "va": "center", "linespacing": 1.15}
                ax.text((first + end) / 2, k, text, color=ink_on(colour), **at)  # type: ignore[arg-type]
        ax.text(num_layers * (1 + 0.06 / width), k, row.batch, color=INK, va="center")
    ax.set(xlim=(0, num_layers * stretch), ylim=(lines - 0.5, -0.5))
    ax.set_yticks(range(lines), [row.title for row in rows.pipelines])
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 50, 100, 200, 500, 10**9) if num_layers / step <= 10)
    ax.set_xticks(range(0, num_layers + 1, step))
    plain_axes(ax, "left")
    ax.spines["bottom"].set_bounds(0, num_layers)
    ax.tick_params(axis="y", length=0)
    return ax


def _wordings(stage: StageFacts, layers: int, two_lines: bool) -> list[str]:
    """A stage's GPUs, parallelism and number of layers, the longest wording first."""
    gpus, tp = stage.gpus, stage.parallelism
    if two_lines:
        return [f"{gpus}\n{tp} · {layers} layers", f"{gpus}\n{tp} · {layers}", f"{tp}\n{layers}", f"{layers}"]
    return [f"{gpus} · {tp} · {layers}", f"{tp} · {layers}", f"{layers}"]

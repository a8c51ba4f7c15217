"""The stages in the picture: the ones shown, their positions in a row, and their labels."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.report.facts import PlanFacts, StageFacts, is_full
from hexiopt.report.panels import canvas
from hexiopt.report.panels.canvas import SMALL, STYLE, first_fitting, inches, new_axes, plain_axes, text_inches, title
from hexiopt.report.rows import PipelineRow, PlanRows, plan_rows
from hexiopt.report.style import INK, MEMORY_COLOURS, MEMORY_LABELS, MUTED, PAPER, clip, count, ink_on, percent
from hexiopt.units import GIB

MAX_PIPELINES = 10
MAX_STAGES = 32


def picture_rows(facts: PlanFacts) -> PlanRows:
    """The pipelines in the picture; in big plans, equal ones share a row."""
    group_above = MAX_PIPELINES if len(facts.plan.devices()) <= 64 else 1
    return plan_rows(facts, group_above=group_above, max_pipelines=MAX_PIPELINES, max_stages=MAX_STAGES)


def omission_notes(rows: PlanRows) -> list[str]:
    """A note on the pipelines that are not shown, if any."""
    return [f"{count(rows.num_left_out, 'pipeline')} left out"] if rows.num_left_out else []


def in_line(rows: PlanRows, gap: float) -> tuple[list[tuple[float, PipelineRow, StageFacts]], float]:
    """The start of each stage, one unit long, with gaps between pipelines; and the end of the last one."""
    places: list[tuple[float, PipelineRow, StageFacts]] = []
    end = 0.0
    for row in rows.pipelines:
        places += [(end + k, row, stage) for k, stage in enumerate(row.stages)]
        end += len(row.stages) + gap
    return places, end - gap


def draw_chip(
    ax: Axes,
    row: PipelineRow,
    stage: StageFacts,
    box: tuple[float, float, float, float],
    centre: tuple[float, float],
    max_inches: float,
    size: float,
) -> None:
    """Draw the stage's name in a box of its colour, in font size `size` or a smaller one that fits `room` inches."""
    left, low, width, height = box
    name, colour = stage.name, row.stage_colour(stage)
    ax.add_patch(Rectangle((left, low), width, height, facecolor=colour, clip_on=False, linewidth=0))
    fit = min(size, size * max_inches / text_inches(name, size))
    ax.text(*centre, name, fontsize=fit, color=ink_on(colour), ha="center", va="center")


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


@rc_context(canvas.STYLE)
def draw_memory(facts: PlanFacts, ax: Axes | None = None, letter: str = "d") -> Axes:
    """Draw one bar per stage: the memory of its fullest device by part, against the limit."""
    ax = canvas.new_axes(ax, 14, 3)
    width, height = canvas.inches(ax)
    places, end = in_line(picture_rows(facts), 0.5)
    top = max(max(stage.cost.limit_bytes, stage.cost.memory.total) for _, _, stage in places) / GIB
    per_bar = width / end
    bar = min(0.72, 0.9 / per_bar)
    line = top * 1.16 / height  # GiB of an inch
    ax.set(xlim=(-0.5, end - 0.5), ylim=(0, top * 1.16))
    for x, row, stage in places:
        memory, limit = stage.cost.memory, stage.cost.limit_bytes / GIB
        low = 0.0
        ax.bar(x, limit, bar, color="#F1F3F5", linewidth=0, zorder=1)
        for part in MEMORY_PARTS:
            size = getattr(memory, part) / GIB
            ax.bar(x, size, bar, low, color=MEMORY_COLOURS[part], linewidth=0, zorder=2)
            low += size
        share = memory.total / stage.cost.limit_bytes
        ax.hlines(limit, x - 0.55 * bar, x + 0.55 * bar, color=INK, linewidth=1.6, zorder=3)
        wordings = [f"{percent(share)} of {limit:.1f}", percent(share), f"{share:.0f}×"]
        text, y = canvas.first_fitting(wordings, 0.94 * per_bar, canvas.SMALL), max(limit, low) + top * 0.025
        colour, weight = ("#B3261E", "bold") if is_full(stage.cost) else (MUTED, "normal")
        ax.text(x, y, text, color=colour, fontweight=weight, ha="center", zorder=4)
        chip = min(bar, 0.4 / per_bar)
        box = (x - chip / 2, -0.24 * line, chip, 0.17 * line)
        draw_chip(ax, row, stage, box, (x, -0.16 * line), 0.9 * chip * per_bar, canvas.SMALL)
        wordings = [stage.kind, stage.gpus, stage.gpus.replace("_", "_\n", 1), clip(stage.gpus, 8)]
        ax.text(x, -0.3 * line, canvas.first_fitting(wordings, 0.96 * per_bar, canvas.SMALL), ha="center", va="top")
    ax.set_xticks([])
    ax.set_yticks([tick for tick in MaxNLocator(5).tick_values(0, top) if tick <= top * 1.16])
    ax.set_ylabel("GiB", fontsize=canvas.NORMAL, color=MUTED)
    canvas.plain_axes(ax)
    headroom = facts.problem.space.memory_headroom
    free = f", {100 * headroom:g}% of usable memory left free" if headroom else ""
    canvas.title(ax, letter, "Memory", f"fullest device of each stage; line: its limit{free}", outdent=canvas.LABELS)
    used = [part for part in MEMORY_PARTS if any(getattr(s.cost.memory, part) for _, _, s in places)]
    canvas.legend(ax, [Patch(facecolor=MEMORY_COLOURS[part], label=MEMORY_LABELS[part]) for part in used])
    return ax

"""The memory of each stage, by part, against its limit."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.report.facts import PlanFacts, is_full
from hexiopt.report.panels import canvas
from hexiopt.report.panels.stages import draw_chip, in_line, picture_rows
from hexiopt.report.style import INK, MEMORY_COLOURS, MEMORY_LABELS, MUTED, clip, percent
from hexiopt.units import GIB


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

"""The memory of each stage, by part, against its limit."""

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.panels.canvas import (
    LABELS,
    NORMAL,
    SMALL,
    first_fitting,
    inches,
    legend,
    new_axes,
    plain_axes,
    title,
)
from hexiopt.report.panels.stages import draw_chip, in_line, shown_rows
from hexiopt.report.style import FULL_MEMORY, INK, MEMORY_COLOURS, MEMORY_LABELS, MUTED, clipped, percent
from hexiopt.units import GIB


def draw_memory(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None, letter: str = "d") -> Axes:
    """Draw one bar per stage: the memory of its fullest device by part, against the limit."""
    ax = new_axes(ax, 14, 3)
    rows = shown_rows(problem, plan, cost)
    width, height = inches(ax)
    places, end = in_line(rows, 0.5)
    top = max(max(stage.cost.limit_bytes, stage.cost.memory.total) for _, _, stage in places) / GIB
    per_bar = width / end
    bar = min(0.72, 0.9 / per_bar)
    line = top * 1.16 / height  # GiB of an inch
    ax.set(xlim=(-0.5, end - 0.5), ylim=(0, top * 1.16))
    for x, row, stage in places:
        held, limit = stage.cost.memory, stage.cost.limit_bytes / GIB
        low = 0.0
        ax.bar(x, limit, bar, color="#F1F3F5", linewidth=0, zorder=1)
        for part in MEMORY_PARTS:
            size = getattr(held, part) / GIB
            ax.bar(x, size, bar, low, color=MEMORY_COLOURS[part], linewidth=0, zorder=2)
            low += size
        share = held.total / stage.cost.limit_bytes
        ax.hlines(limit, x - 0.55 * bar, x + 0.55 * bar, color=INK, linewidth=1.6, zorder=3)
        full = share > FULL_MEMORY
        ax.text(
            x,
            max(limit, low) + top * 0.025,
            first_fitting([f"{percent(share)} of {limit:.1f}", percent(share), f"{share:.0f}×"], 0.94 * per_bar, SMALL),
            fontsize=SMALL,
            color="#B3261E" if full else MUTED,
            fontweight="bold" if full else "normal",
            ha="center",
            zorder=4,
        )
        chip = min(bar, 0.4 / per_bar)
        box = (x - chip / 2, -0.24 * line, chip, 0.17 * line)
        draw_chip(ax, row, stage, box, (x, -0.16 * line), 0.9 * chip * per_bar, SMALL)
        wordings = [stage.kind, stage.gpus, stage.gpus.replace("_", "_\n", 1)]
        wordings.append(clipped(stage.gpus, 8))
        ax.text(
            x,
            -0.3 * line,
            first_fitting(wordings, 0.96 * per_bar, SMALL),
            fontsize=SMALL,
            color=MUTED,
            ha="center",
            va="top",
            parse_math=False,
        )
    ax.set_xticks([])
    ax.set_yticks([tick for tick in MaxNLocator(5).tick_values(0, top) if tick <= top * 1.16])
    ax.set_ylabel("GiB", fontsize=NORMAL, color=MUTED)
    plain_axes(ax)
    headroom = problem.space.memory_headroom
    free = f", {100 * headroom:g}% of usable memory left free" if headroom else ""
    title(ax, letter, "Memory", f"fullest device of each stage; line: its limit{free}", outdent=LABELS)
    used = [part for part in MEMORY_PARTS if any(getattr(s.cost.memory, part) for _, _, s in places)]
    legend(ax, [Patch(facecolor=MEMORY_COLOURS[part], label=MEMORY_LABELS[part]) for part in used])
    return ax

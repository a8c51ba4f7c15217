"""The map of the cluster: machines as boxes, devices in the colours of their stages."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from hexiopt.report.facts import PlanFacts
from hexiopt.report.machine_map import (
    MAX_MACHINES,
    MachineKind,
    machine_map,
    machine_notes,
    name_has_gpu,
    network_notes,
)
from hexiopt.report.panels import canvas
from hexiopt.report.panels.stages import picture_rows
from hexiopt.report.style import FAINT, INK, PAPER, count, ink_on


@rc_context(canvas.STYLE)
def draw_cluster(facts: PlanFacts, ax: Axes | None = None, letter: str = "a") -> Axes:
    """Draw machines as boxes, devices in the colours of their stages; machines that look the same once, with ×N."""
    ax = canvas.new_axes(ax, 8, 4)
    cluster, rows = facts.problem.cluster, picture_rows(facts)
    shown, left_out = machine_map(facts, rows, MAX_MACHINES)
    notes = ["label: pipeline·stage" + (" of the one shown" if rows.is_grouped else "")]
    if left_out:
        notes.append(f"{count(left_out, 'machine')} left out")
    if facts.unused_devices:
        notes.append(f"hatched: {count(len(facts.unused_devices), 'device')} unused")
    if rows.num_left_out:
        notes.append("grey: in pipelines not shown")
    canvas.title(ax, letter, "Cluster", "; ".join(notes))

    width, height = canvas.inches(ax)
    foot = canvas.clip_to(network_notes(cluster), width, canvas.SMALL)
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    if foot:
        ax.text(0, 0.0, foot, va="bottom")
    space = height - (0.2 if foot else 0.0)

    columns = max(_columns(len(kind.squares)) for kind in shown)
    lines = max(-(-len(kind.squares) // _columns(len(kind.squares))) for kind in shown)
    best = (0.0, 1, 1)
    # Inches: the gap between boxes, the height of a box's texts, the least width of a box.
    margin, text, least = 0.12, 0.46 if all(name_has_gpu(kind.machine) for kind in shown) else 0.58, 1.3
    for across in range(1, min(len(shown), int((width + margin) / (least + margin))) + 1):
        down = -(-len(shown) // across)
        box_width, box_height = (width - margin * (across - 1)) / across, (space - margin * (down - 1)) / down
        side = min((box_width - 0.16) / columns, (box_height - text) / lines, 0.62)
        best = max(best, (side, across, down), key=lambda grid: (round(grid[0], 6), -grid[2]))
    side, across, down = max(best[0], 0.06), best[1], best[2]
    box_width = min((width - margin * (across - 1)) / across, max(columns * side + 0.16, 1.75))
    box_height = lines * side + text
    for k, kind in enumerate(shown):
        x = (k % across) * (box_width + margin)
        y = height - (k // across + 1) * box_height - (k // across) * margin
        _draw_machine(ax, kind, (x, y, box_width, box_height), side)
    return ax


def _columns(num_devices: int) -> int:
    """Squares per row: all of up to four, half of six or eight, otherwise eight."""
    if num_devices <= 4:
        return num_devices
    return -(-num_devices // 2) if num_devices <= 16 else 8


def _draw_machine(ax: Axes, kind: MachineKind, box: tuple[float, float, float, float], side: float) -> None:
    x, y, width, height = box
    machine, squares = kind.machine, kind.squares
    rounded = {"boxstyle": "round,pad=0.03,rounding_size=0.08", "edgecolor": FAINT, "linewidth": 0.9}
    frame = (x + 0.03, y + 0.03), width - 0.06, height - 0.06
    ax.add_patch(FancyBboxPatch(*frame, facecolor="#F6F7F9", **rounded))  # type: ignore[arg-type]
    inner_width = width - 0.18
    times = f" ×{kind.number}" if kind.number > 1 else ""
    name_width = inner_width - canvas.text_inches(times, canvas.SMALL)
    size = max(
        6.0, min(canvas.NORMAL, canvas.NORMAL * name_width / canvas.text_inches(kind.name, canvas.NORMAL, bold=True))
    )
    name = canvas.clip_to(kind.name, name_width, size, bold=True)
    ax.text(x + 0.09, y + height - 0.07, name, fontsize=size, fontweight="bold", color=INK, va="top")
    ax.text(x + width - 0.09, y + height - 0.07, times, ha="right", va="top")
    note = canvas.first_fitting(machine_notes(machine), inner_width, canvas.SMALL)
    ax.text(x + 0.09, y + 0.075, note, va="bottom", linespacing=1.15)
    columns = _columns(len(squares))
    label_size = min(9.0, side * 72 * 0.36)
    top = y + height - 0.23
    corner = {}
    for k, square in enumerate(squares):
        left, low = x + 0.08 + (k % columns) * side, top - (k // columns + 1) * side
        corner[k] = left, low
        colour, edge = square.colour or ("#ECEEF1" if square.unused else "#C9CFD6"), PAPER
        hatch = None
        if square.unused:
            edge, hatch = "#A9B1BB", "////"
        at = (left + 0.02 * side, low + 0.04 * side), 0.94 * side, 0.92 * side
        ax.add_patch(Rectangle(*at, facecolor=colour, edgecolor=edge, linewidth=0.6, hatch=hatch))
        if square.label and label_size >= 3.0:
            fit = min(label_size, 0.86 * label_size * side / canvas.text_inches(square.label, label_size))
            centre, ink = (left + 0.49 * side, low + 0.5 * side), ink_on(square.colour or PAPER)
            ax.text(*centre, square.label, fontsize=fit, color=ink, ha="center", va="center")
    for link in machine.intra_links:
        ends = [corner[k] for k in (link.a, link.b) if k in corner]
        if len(ends) == 2 and link.b == link.a + 1 and ends[0][1] == ends[1][1]:
            (left, low), (right, _) = ends
            line = [left + 0.72 * side, right + 0.26 * side], [low + 0.82 * side] * 2
            ax.plot(*line, color=INK, linewidth=2.2, solid_capstyle="round")

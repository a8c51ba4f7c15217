"""The map of the cluster: machines as boxes, devices in the colours of their stages."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.machine_map import (
    MAX_MACHINES,
    Square,
    machine_kinds,
    machine_notes,
    most_telling,
    named_by_gpu,
    network_notes,
)
from hexiopt.report.panels.canvas import NORMAL, SMALL, clipped_to, first_fitting, inches, new_axes, text_inches, title
from hexiopt.report.panels.stages import shown_rows
from hexiopt.report.rows import unused_devices
from hexiopt.report.style import FAINT, INK, MUTED, PAPER, count, ink_on


def draw_cluster(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None, letter: str = "a") -> Axes:
    """Machines as boxes, devices in the colours of their stages; machines that look alike are drawn once, with ×N."""
    ax = new_axes(ax, 8, 4)
    cluster, rows = problem.cluster, shown_rows(problem, plan, cost)
    kinds = machine_kinds(problem, plan, rows)
    kept = most_telling(kinds, MAX_MACHINES)
    quoted = [(cluster.machines[members[0]], len(members), squares) for members, squares in kept]

    left_out = len(cluster.machines) - sum(number for _, number, _ in quoted)
    notes = ["label: pipeline·stage" + (" of the one shown" if rows.grouped else "")]
    if left_out:
        notes.append(f"{count(left_out, 'machine')} left out")
    unused = len(unused_devices(problem, plan))
    if unused:
        notes.append(f"hatched: {count(unused, 'device')} unused")
    if rows.num_left_out:
        notes.append("grey: in pipelines not shown")
    title(ax, letter, "Cluster", "; ".join(notes))

    width, height = inches(ax)
    foot = clipped_to(network_notes(cluster), width, SMALL)
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    if foot:
        ax.text(0, 0.0, foot, fontsize=SMALL, color=MUTED, va="bottom", parse_math=False)
    space = height - (0.2 if foot else 0.0)

    columns = max(_columns(len(squares)) for _, _, squares in quoted)
    lines = max(-(-len(squares) // _columns(len(squares))) for _, _, squares in quoted)
    best = (0.0, 1, 1)
    # Inches: the gap between boxes, the height of a box's texts, the least width of a box.
    margin, text, least = 0.12, 0.46 if all(named_by_gpu(machine) for machine, _, _ in quoted) else 0.58, 1.3
    for across in range(1, min(len(quoted), int((width + margin) / (least + margin))) + 1):
        down = -(-len(quoted) // across)
        box_width, box_height = (width - margin * (across - 1)) / across, (space - margin * (down - 1)) / down
        side = min((box_width - 0.16) / columns, (box_height - text) / lines, 0.62)
        best = max(best, (side, across, down), key=lambda found: (round(found[0], 6), -found[2]))
    side, across, down = max(best[0], 0.06), best[1], best[2]
    box_width = min((width - margin * (across - 1)) / across, max(columns * side + 0.16, 1.75))
    box_height = lines * side + text
    for k, (machine, number, squares) in enumerate(quoted):
        x = (k % across) * (box_width + margin)
        y = height - (k // across + 1) * box_height - (k // across) * margin
        _draw_machine(ax, machine, number, squares, (x, y, box_width, box_height), side)
    return ax


def _columns(num_devices: int) -> int:
    """Squares per row: all of up to four, half of six or eight, otherwise eight."""
    if num_devices <= 4:
        return num_devices
    return -(-num_devices // 2) if num_devices <= 16 else 8


def _draw_machine(
    ax: Axes,
    machine: Machine,
    number: int,
    squares: Sequence[Square],
    box: tuple[float, float, float, float],
    side: float,
) -> None:
    x, y, width, height = box
    ax.add_patch(
        FancyBboxPatch(
            (x + 0.03, y + 0.03),
            width - 0.06,
            height - 0.06,
            boxstyle="round,pad=0.03,rounding_size=0.08",
            facecolor="#F6F7F9",
            edgecolor=FAINT,
            linewidth=0.9,
        )
    )
    room = width - 0.18
    times = f" ×{number}" if number > 1 else ""
    name = machine.spec_name if times else machine.name
    left_room = room - text_inches(times, SMALL)
    size = max(6.0, min(NORMAL, NORMAL * left_room / text_inches(name, NORMAL, bold=True)))
    name = clipped_to(name, left_room, size, bold=True)
    for text, at, align, colour, weight, points in (
        (name, x + 0.09, "left", INK, "bold", size),
        (times, x + width - 0.09, "right", MUTED, "normal", SMALL),
    ):
        ax.text(
            at,
            y + height - 0.07,
            text,
            fontsize=points,
            fontweight=weight,
            color=colour,
            ha=align,
            va="top",
            parse_math=False,
        )
    ax.text(
        x + 0.09,
        y + 0.075,
        first_fitting(machine_notes(machine), room, SMALL),
        fontsize=SMALL,
        color=MUTED,
        va="bottom",
        linespacing=1.15,
        parse_math=False,
    )
    columns = _columns(len(squares))
    label_size = min(9.0, side * 72 * 0.36)
    top = y + height - 0.23
    corner = {}
    for k, square in enumerate(squares):
        left, low = x + 0.08 + (k % columns) * side, top - (k // columns + 1) * side
        corner[k] = left, low
        ax.add_patch(
            Rectangle(
                (left + 0.02 * side, low + 0.04 * side),
                0.94 * side,
                0.92 * side,
                facecolor=square.colour or ("#ECEEF1" if square.unused else "#C9CFD6"),
                edgecolor="#A9B1BB" if square.unused else PAPER,
                linewidth=0.6,
                hatch="////" if square.unused else None,
            )
        )
        if square.label and label_size >= 3.0:
            ax.text(
                left + 0.49 * side,
                low + 0.5 * side,
                square.label,
                fontsize=min(label_size, 0.86 * label_size * side / text_inches(square.label, label_size)),
                color=ink_on(square.colour or PAPER),
                ha="center",
                va="center",
            )
    for link in machine.intra_links:
        ends = [corner[k] for k in (link.a, link.b) if k in corner]
        if len(ends) == 2 and link.b == link.a + 1 and ends[0][1] == ends[1][1]:
            (left, low), (right, _) = ends
            ax.plot(
                [left + 0.72 * side, right + 0.26 * side],
                [low + 0.82 * side] * 2,
                color=INK,
                linewidth=2.2,
                solid_capstyle="round",
            )

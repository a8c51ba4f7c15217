"""A plan as a picture: who works where, which layers, when, and in how much memory.

Every panel is a function that draws into `ax`, or into a new figure where `ax` is None.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hexiopt.cluster import Cluster, Machine
from hexiopt.cost.cost import Cost
from hexiopt.cost.memory import MEMORY_PARTS
from hexiopt.plan import Plan
from hexiopt.problem import Problem
from hexiopt.report.rows import PipelineRow, PlanRows, StageRow, num_operations, plan_rows, unused_devices
from hexiopt.report.style import (
    FAINT,
    FULL_MEMORY,
    INK,
    MEMORY_COLOURS,
    MEMORY_LABELS,
    MUTED,
    OPTIMIZER_COLOUR,
    PAPER,
    SYNC_COLOUR,
    clipped,
    count,
    ink_on,
    listed,
    mix,
    percent,
    rate,
    seconds,
    stage_colour,
)
from hexiopt.report.timeline import has_gradient_sync
from hexiopt.simulate import simulate_pipeline
from hexiopt.units import GIB

DPI = 150
WIDTH_INCHES = 14.0
MAX_PIPELINES = 10
MAX_STAGES = 32
MAX_MACHINES = 15
_NO_LIMIT = float("inf")
_MAX_SQUARES = 32  # devices drawn of one machine
_MAX_OPERATIONS = 100_000  # of a pipeline, to be drawn one by one
_WHOLE_MICRO_BATCHES = 48  # up to which the step is drawn without a cut
_SHOWN_MICRO_BATCHES = 14  # on either side of the cut
_SMALL, _NORMAL, _TITLE = 7.0, 8.0, 10.5
_MARGIN, _LABELS = 0.35, 1.5  # inches: around the figure, left of lanes


def draw_plan(problem: Problem, plan: Plan, cost: Cost, path: str | Path) -> None:
    """Write plan.png: `plan_figure` at 150 dots an inch."""
    figure = plan_figure(problem, plan, cost)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def plan_figure(problem: Problem, plan: Plan, cost: Cost) -> Figure:
    """Cluster, layers, timeline and memory in the same colours, 14 inches wide and about 10 high."""
    rows = shown_rows(problem, plan, cost)
    machines = min(MAX_MACHINES, len(problem.cluster.machines))
    lanes = sum(len(row.stages) for row in rows.pipelines)
    top = max(1.5 + 0.5 * (machines > 4) + 1.0 * (machines > 8), 0.4 + 0.28 * len(rows.pipelines))
    middle = min(1.4 + 0.2 * lanes, 5.8)
    bottom = 1.8
    # From the lower edge: the memory panel, the timeline, cluster beside layers; a title over each.
    y_memory = 0.62
    y_timeline = y_memory + bottom + 0.85
    y_top = y_timeline + middle + 0.55
    height = y_top + top + 0.95
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)

    def panel(x: float, y: float, wide: float, high: float) -> Axes:
        return figure.add_axes((x / WIDTH_INCHES, y / height, wide / WIDTH_INCHES, high / height))

    right = WIDTH_INCHES - _MARGIN
    draw_cluster(problem, plan, cost, panel(_MARGIN, y_top, 7.3, top))
    draw_layers(problem, plan, cost, panel(8.75, y_top + 0.28, right - 8.75, top - 0.28))
    left = _MARGIN + _LABELS
    draw_timeline(problem, plan, cost, panel(left, y_timeline, right - left, middle))
    draw_memory(problem, plan, cost, panel(left, y_memory, right - left, bottom))
    used = len(plan.devices())
    facts = (
        f"{seconds(cost.step_time_s)} a step · {cost.tokens_per_s:,.0f} tokens/s · MFU {cost.mfu:.1%} · "
        f"{count(len(plan.pipelines), 'pipeline')} · {used:,} of {problem.cluster.num_devices:,} GPUs"
    )
    room = right - _MARGIN - _text_inches(facts, 11) - 0.3
    name = f"{problem.model.name} on {problem.cluster.name}"
    line = (height - 0.32) / height
    figure.text(
        _MARGIN / WIDTH_INCHES,
        line,
        _clipped(name, room, 15, bold=True),
        fontsize=15,
        fontweight="bold",
        color=INK,
        va="center",
        parse_math=False,
    )
    figure.text(right / WIDTH_INCHES, line, facts, fontsize=11, color=MUTED, va="center", ha="right")
    return figure


def shown_rows(problem: Problem, plan: Plan, cost: Cost) -> PlanRows:
    """The pipelines in the picture, alike ones together in big plans."""
    group_above = MAX_PIPELINES if len(plan.devices()) <= 64 else 1
    return plan_rows(problem, plan, cost, group_above=group_above, max_pipelines=MAX_PIPELINES, max_stages=MAX_STAGES)


def _new_axes(ax: Axes | None, width: float, height: float) -> Axes:
    if ax is not None:
        return ax
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure.add_axes((0.1, 0.14, 0.875, 0.74))


def _inches(ax: Axes) -> tuple[float, float]:
    box, figure = ax.get_position(), ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    return box.width * width, box.height * height


def _title(ax: Axes, letter: str, text: str, note: str = "", outdent: float = 0.0) -> None:
    """The panel's title at its upper left, `outdent` inches left of the axes; the note beside it."""
    width, _ = _inches(ax)
    title = f"({letter})  {text}"
    taken = _text_inches(title, _TITLE, bold=True) + 0.15 - outdent
    for x, words, size, weight in (
        (-outdent, title, _TITLE, "bold"),
        (taken, _clipped(note, width - taken, _SMALL), _SMALL, "normal"),
    ):
        ax.annotate(
            words,
            (x / width, 1),
            (0, 9),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=size,
            fontweight=weight,
            color=INK if weight == "bold" else MUTED,
            va="baseline",
            annotation_clip=False,
            parse_math=False,
        )


@lru_cache(maxsize=4096)
def _text_inches(text: str, size: float, bold: bool = False) -> float:
    """How wide a line is."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width, _, _ = _renderer().get_text_width_height_descent(text, font, False)  # type: ignore[no-untyped-call]
    return float(width) / DPI


@lru_cache(maxsize=1)
def _renderer() -> RendererAgg:
    """Measures text as it will be drawn, hinting included."""
    return RendererAgg(16, 16, DPI)  # type: ignore[no-untyped-call]


def _clipped(text: str, width: float, size: float, bold: bool = False) -> str:
    """`text`, or as much of it as fits `width` inches with an ellipsis."""
    limit = len(text)
    while limit > 1 and _text_inches(clipped(text, limit), size, bold) > width:
        limit -= 1
    return clipped(text, limit)


def _fitting(choices: Iterable[str], width: float, size: float) -> str:
    """The first choice that fits `width` inches; nothing where none does."""
    for text in choices:
        if max(_text_inches(line, size) for line in text.split("\n")) <= width:
            return text
    return ""


def _stage_name(row: PipelineRow, stage: StageRow) -> str:
    return f"{row.number}·{stage.stage}"


# ------------------------------------------------------------------------------------------------ cluster


@dataclass(frozen=True, slots=True)
class _Square:
    """A device in the map: what is written on it and its colour (None: not shown one by one, or unused)."""

    label: str
    colour: str | None
    unused: bool


def draw_cluster(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None) -> Axes:
    """Machines as boxes, devices in the colours of their stages; machines that look alike once, with ×N."""
    ax = _new_axes(ax, 8, 4)
    cluster, rows = problem.cluster, shown_rows(problem, plan, cost)
    kinds = _machine_kinds(problem, plan, rows)
    kept = sorted(kinds, key=lambda kind: (-sum(s.colour is not None for s in kind[1]), -len(kind[0])))
    kept = sorted(kept[:MAX_MACHINES], key=lambda kind: kind[0][0])
    shown = [(cluster.machines[members[0]], len(members), squares) for members, squares in kept]

    left_out = len(cluster.machines) - sum(number for _, number, _ in shown)
    notes = ["label: pipeline·stage" + (" of the one shown" if rows.grouped else "")]
    if left_out:
        notes.append(f"{count(left_out, 'machine')} left out")
    unused = len(unused_devices(problem, plan))
    if unused:
        notes.append(f"hatched: {count(unused, 'device')} unused")
    if rows.num_left_out:
        notes.append("grey: in pipelines left out")
    _title(ax, "a", "Cluster", "; ".join(notes))

    width, height = _inches(ax)
    foot = _clipped(_network_notes(cluster), width, _SMALL)
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    if foot:
        ax.text(0, 0.0, foot, fontsize=_SMALL, color=MUTED, va="bottom", parse_math=False)
    space = height - (0.2 if foot else 0.0)

    columns = max(_columns(len(squares)) for _, _, squares in shown)
    lines = max(-(-len(squares) // _columns(len(squares))) for _, _, squares in shown)
    best = (0.0, 1, 1)
    # Inches: between boxes; for a box's texts; the least width of a box.
    margin, text, least = 0.12, 0.46 if all(_named_by_gpu(machine) for machine, _, _ in shown) else 0.58, 1.3
    for across in range(1, min(len(shown), int((width + margin) / (least + margin))) + 1):
        down = -(-len(shown) // across)
        box_width, box_height = (width - margin * (across - 1)) / across, (space - margin * (down - 1)) / down
        side = min((box_width - 0.16) / columns, (box_height - text) / lines, 0.62)
        best = max(best, (side, across, down), key=lambda found: (round(found[0], 6), -found[2]))
    side, across, down = max(best[0], 0.06), best[1], best[2]
    box_width = min((width - margin * (across - 1)) / across, max(columns * side + 0.16, 1.75))
    box_height = lines * side + text
    for k, (machine, number, squares) in enumerate(shown):
        x = (k % across) * (box_width + margin)
        y = height - (k // across + 1) * box_height - (k // across) * margin
        _draw_machine(ax, machine, number, squares, (x, y, box_width, box_height), side)
    return ax


def _columns(num_devices: int) -> int:
    """Squares in a line: all up to four, half of six or eight, then eight."""
    if num_devices <= 4:
        return num_devices
    return -(-num_devices // 2) if num_devices <= 16 else 8


def _machine_kinds(problem: Problem, plan: Plan, rows: PlanRows) -> list[tuple[list[int], tuple[_Square, ...]]]:
    """Machines that look alike (in clusters too large to draw each), and the squares of their devices."""
    cluster = problem.cluster
    on: dict[int, tuple[PipelineRow, StageRow]] = {}
    for row in rows.pipelines:
        for index in row.members:
            for stage, stage_row in zip(plan.pipelines[index].stages, row.stages, strict=True):
                on.update(dict.fromkeys(stage.all_devices(), (row, stage_row)))
    used = set(plan.devices())
    few = len(cluster.machines) <= MAX_MACHINES
    kinds: dict[object, tuple[list[int], tuple[_Square, ...]]] = {}
    for m, machine in enumerate(cluster.machines):
        first = int(cluster.first_device[m])
        squares = []
        for device in range(first, first + min(machine.num_gpus, _MAX_SQUARES)):
            if device in on:
                row, stage_row = on[device]
                colour = stage_colour(row.hue, stage_row.stage, len(row.stages))
                squares.append(_Square(_stage_name(row, stage_row), colour, False))
            else:
                squares.append(_Square("", None, device not in used))
        looks = tuple(squares)
        key: object = m if few else (machine.spec_name, looks)
        kinds.setdefault(key, ([], looks))[0].append(m)
    return list(kinds.values())


def _draw_machine(
    ax: Axes,
    machine: Machine,
    number: int,
    squares: Sequence[_Square],
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
    left_room = room - _text_inches(times, _SMALL)
    size = max(6.0, min(_NORMAL, _NORMAL * left_room / _text_inches(name, _NORMAL, bold=True)))
    name = _clipped(name, left_room, size, bold=True)
    for text, at, align, colour, weight, points in (
        (name, x + 0.09, "left", INK, "bold", size),
        (times, x + width - 0.09, "right", MUTED, "normal", _SMALL),
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
        _fitting(_machine_notes(machine), room, _SMALL),
        fontsize=_SMALL,
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
                fontsize=min(label_size, 0.86 * label_size * side / _text_inches(square.label, label_size)),
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


def _named_by_gpu(machine: Machine) -> bool:
    """Whether the machine's name tells its type already."""
    return machine.spec_name == machine.gpu.name and machine.num_gpus <= _MAX_SQUARES


def _machine_notes(machine: Machine) -> list[str]:
    """GPU type and link speeds, the longest wording first."""
    gpu = machine.gpu.name + (f" · {machine.num_gpus} GPUs" if machine.num_gpus > _MAX_SQUARES else "")
    inside = [rate(machine.intra_bandwidth_bytes_per_s)] if machine.num_gpus > 1 else []
    inside += sorted({rate(link.bandwidth_bytes_per_s) for link in machine.intra_links}, key=float)
    interfaces = f"{machine.num_interfaces} × " if machine.num_interfaces > 1 else ""
    networked = machine.nic_bandwidth_bytes_per_s < _NO_LIMIT
    outside = interfaces + rate(machine.nic_bandwidth_bytes_per_s) if networked else ""
    speeds = [f"{name} {value}" for name, value in (("in", " / ".join(inside)), ("out", outside)) if value]
    text = " · ".join(speeds)
    if _named_by_gpu(machine):
        return [f"{text} GB/s", text]
    wordings = [f"{gpu}\n{text} GB/s", f"{gpu}\n{text}"] if speeds else []
    return [*wordings, gpu, *(clipped(gpu, limit) for limit in range(len(gpu) - 1, 2, -1))]


def _network_notes(cluster: Cluster) -> str:
    """Uplinks and stated links in a line; empty where there are none."""
    parts = [
        f"{group.name} uplink {rate(group.uplink_bytes_per_s)}"
        for group in cluster.groups
        if group.uplink_bytes_per_s < _NO_LIMIT
    ]
    parts += [
        f"{link.source}{'–' if link.both else '→'}{link.target} {rate(link.bandwidth_bytes_per_s)}"
        for link in cluster.links
    ]
    return f"GB/s: {listed(parts, 5)}" if parts else ""


# ------------------------------------------------------------------------------------------------ layers


def draw_layers(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None) -> Axes:
    """A bar a pipeline, divided into its stages by layers."""
    ax = _new_axes(ax, 7, 3)
    rows = shown_rows(problem, plan, cost)
    num_layers = problem.model.num_layers
    notes = ["left: pipeline; right: micro-batches × size"]
    if rows.num_left_out:
        notes.append(f"{count(rows.num_left_out, 'pipeline')} left out")
    _title(ax, "b", "Layers", "; ".join(notes), outdent=0.8)
    width, height = _inches(ax)
    lines = len(rows.pipelines)
    # The axis ends with the layers, the axes with the texts beside them.
    stretch = 1 / (1 - (max(_text_inches(row.batch, _SMALL) for row in rows.pipelines) + 0.1) / width)
    bar = min(0.8, 0.62 / (height / lines))  # of a line; not thicker than 0.62 inches
    two_lines = bar * height / lines > 0.3
    for k, row in enumerate(rows.pipelines):
        for stage in row.stages:
            colour = stage_colour(row.hue, stage.stage, len(row.stages))
            for first, end in plan.pipelines[row.number].stages[stage.stage].layers:
                ax.barh(k, end - first, bar, first, color=colour, edgecolor=PAPER, linewidth=1.2)
                room = (end - first) / (num_layers * stretch) * width - 0.1
                tp = f"TP {stage.tp}"
                layers = f"{end - first}"
                wordings = (
                    [
                        f"{stage.gpus}\n{tp} · {layers} layers",
                        f"{stage.gpus}\n{tp} · {layers}",
                        f"{tp}\n{layers}",
                    ]
                    if two_lines
                    else [f"{stage.gpus} · {tp} · {layers}", f"{tp} · {layers}"]
                )
                ax.text(
                    (first + end) / 2,
                    k,
                    _fitting([*wordings, layers], room, _SMALL),
                    fontsize=_SMALL,
                    color=ink_on(colour),
                    ha="center",
                    va="center",
                    linespacing=1.15,
                    parse_math=False,
                )
        ax.text(num_layers * (1 + 0.06 / width), k, row.batch, fontsize=_SMALL, color=INK, va="center")
    ax.set(xlim=(0, num_layers * stretch), ylim=(lines - 0.5, -0.5))
    ax.set_yticks(range(lines), [row.title for row in rows.pipelines])
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 50, 100, 200, 500, 10**9) if num_layers / step <= 10)
    ax.set_xticks(range(0, num_layers + 1, step))
    _plain_axes(ax)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_bounds(0, num_layers)
    ax.tick_params(axis="y", length=0)
    return ax


def _plain_axes(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(labelsize=_NORMAL, colors=MUTED, color=FAINT, width=0.8)


# ------------------------------------------------------------------------------------------------ timeline


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Time on paper: all of [0, end], or [0, cut] and [resume, end] with a gap between."""

    cut: float
    resume: float
    end: float

    @property
    def gap(self) -> float:
        """Width of what stands for the time left out."""
        return 0.018 * (self.cut + self.end - self.resume) if self.resume > self.cut else 0.0

    @property
    def width(self) -> float:
        """The length of the axis, in seconds on paper."""
        return self.cut + self.gap + self.end - self.resume

    def spans(self, start: float, end: float) -> list[tuple[float, float]]:
        """(left, width) on paper of what is visible of an interval."""
        found = []
        second = self.cut + self.gap - self.resume
        for low, high, shift in ((0.0, self.cut, 0.0), (self.resume, self.end, second)):
            left, right = max(start, low), min(end, high)
            if right > left:
                found.append((left + shift, right - left))
        return found

    def at(self, time: float) -> float | None:
        """Where a moment lies on paper; None in what is left out."""
        if time <= self.cut:
            return time
        return time - self.resume + self.cut + self.gap if time >= self.resume else None


def _time_axis(rows: PlanRows, cost: Cost) -> _TimeAxis:
    whole = _TimeAxis(cost.step_time_s, cost.step_time_s, cost.step_time_s)
    if max(row.num_micro_batches for row in rows.pipelines) <= _WHOLE_MICRO_BATCHES:
        return whole
    window_s = 0.0
    for row in rows.pipelines:
        fill_s = sum(stage.compute_s / 3 + (stage.send_s or 0.0) for stage in row.stages)
        window_s = max(window_s, fill_s + _SHOWN_MICRO_BATCHES * max(stage.compute_s for stage in row.stages))
    tail_s = cost.step_time_s - cost.pipeline_s + window_s
    if window_s + tail_s > 0.8 * cost.step_time_s:
        return whole
    return _TimeAxis(window_s, cost.step_time_s - tail_s, cost.step_time_s)


def draw_timeline(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None) -> Axes:
    """A lane a stage: forward, backward, messages, gradient sync and optimizer; a long step with a cut."""
    ax = _new_axes(ax, 14, 4)
    rows = shown_rows(problem, plan, cost)
    axis = _time_axis(rows, cost)
    width, height = _inches(ax)
    lanes: list[tuple[float, PipelineRow, StageRow]] = []
    y = 0.0
    for row in rows.pipelines:
        lanes += [(y + k, row, stage) for k, stage in enumerate(row.stages)]
        y += len(row.stages) + 0.45
    bottom = y - 0.45
    ax.set(xlim=(0, axis.width), ylim=(bottom, 0))
    lane_inches = height / bottom
    per_second = width / axis.width

    for row in rows.pipelines:
        at = {stage.stage: y for y, lane_row, stage in lanes if lane_row is row}
        _draw_pipeline(ax, axis, plan, cost, row, at, per_second, lane_inches)
    if axis.gap:
        ax.axvspan(axis.cut, axis.cut + axis.gap, color=PAPER, zorder=4, linewidth=0)
        for edge in (axis.cut, axis.cut + axis.gap):
            ax.axvline(edge, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=5)
    size = min(_NORMAL, lane_inches * 72 * 0.62)
    ax.set_yticks([])
    inch = axis.width / width
    for y, row, stage in lanes:
        colour = stage_colour(row.hue, stage.stage, len(row.stages))
        ax.add_patch(
            Rectangle((-0.32 * inch, y + 0.06), 0.26 * inch, 0.84, facecolor=colour, clip_on=False, linewidth=0)
        )
        name = _stage_name(row, stage)
        fit = min(size, size * 0.24 / _text_inches(name, size))
        ax.text(-0.19 * inch, y + 0.5, name, fontsize=fit, color=ink_on(colour), ha="center", va="center")
        ax.text(
            -0.37 * inch,
            y + 0.5,
            _clipped(f"{stage.tp} × {stage.gpus}", _LABELS - 0.37, min(_SMALL, size)),
            fontsize=min(_SMALL, size),
            color=MUTED,
            ha="right",
            va="center",
            parse_math=False,
        )
    _time_ticks(ax, axis, width)
    _plain_axes(ax)
    ax.spines["left"].set_visible(False)
    hidden = seconds(axis.resume - axis.cut)
    notes = [f"{hidden} left out at the cut" if axis.gap else ""]
    notes += [f"{count(rows.num_left_out, 'pipeline')} left out"] if rows.num_left_out else []
    _title(ax, "c", "Predicted step", "; ".join(note for note in notes if note), outdent=_LABELS)
    entries = [
        Patch(facecolor="#C9CFD6", label="forward"),
        Patch(facecolor="#7B8794", label="backward"),
        Patch(facecolor=INK, label="message (thin)"),
    ]
    if has_gradient_sync(plan):
        sync = f"gradient sync and waiting for it ({seconds(cost.gradient_sync_s)} after the last pipeline)"
        entries.append(Patch(facecolor=PAPER, edgecolor=SYNC_COLOUR, hatch="/////", linewidth=0, label=sync))
    optimizer = f"optimizer ({seconds(cost.optimizer_s)})"
    entries.append(
        Patch(facecolor=SYNC_COLOUR, edgecolor=OPTIMIZER_COLOUR, hatch="xxxxx", linewidth=0, label=optimizer)
    )
    _legend(ax, entries)
    return ax


def _legend(ax: Axes, entries: Sequence[Patch]) -> None:
    _, height = _inches(ax)
    ax.legend(
        handles=list(entries),
        loc="lower right",
        bbox_to_anchor=(1.0, 1 + 0.06 / height),
        ncols=len(entries),
        fontsize=_SMALL,
        labelcolor=MUTED,
        frameon=False,
        handlelength=1.3,
        handleheight=0.9,
        columnspacing=1.3,
        borderaxespad=0,
    )


def _draw_pipeline(
    ax: Axes,
    axis: _TimeAxis,
    plan: Plan,
    cost: Cost,
    row: PipelineRow,
    at: dict[int, float],
    per_second: float,
    lane_inches: float,
) -> None:
    """Draw one pipeline's events; `at` says where the lane of each stage begins."""
    pipeline, priced = plan.pipelines[row.number], cost.pipelines[row.number]
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    labels: list[tuple[float, int, str, int]] = []
    size = min(6.0, lane_inches * 72 * 0.45)
    room = _text_inches("0" * len(str(pipeline.num_micro_batches - 1)), size) + 0.03
    if num_operations(pipeline) <= _MAX_OPERATIONS:
        for event in simulate_pipeline(row.number, pipeline, priced, plan.schedule):
            spans = axis.spans(event.start_s, event.end_s)
            boxes.setdefault((event.stage, event.kind), []).extend(spans)
            if not event.kind.startswith("send"):
                for left, span in spans:
                    if span * per_second > room:
                        labels.append((left + span / 2, event.stage, event.kind, event.micro_batch))
    else:
        for k, end_s in enumerate(priced.stage_end_s):
            boxes[k, "backward"] = axis.spans(0.0, end_s)
    for (k, kind), spans in boxes.items():
        forward, backward = _step_colours(row, k)
        if kind.startswith("send"):
            place = (at[k] + (0.86 if kind == "send_forward" else 0.0), 0.1)
            ax.broken_barh(spans, place, facecolors=INK, linewidth=0, zorder=3)
        else:
            ax.broken_barh(
                spans,
                (at[k] + 0.12, 0.72),
                facecolors=forward if kind == "forward" else backward,
                edgecolors=PAPER,
                linewidth=0.35 if spans and min(w for _, w in spans[1:-1] or spans) * per_second > 0.04 else 0.0,
                zorder=2,
            )
    if size >= 4:
        for x, k, kind, batch in labels:
            forward, backward = _step_colours(row, k)
            colour = ink_on(forward if kind == "forward" else backward)
            ax.text(x, at[k] + 0.48, f"{batch}", fontsize=size, color=colour, ha="center", va="center", zorder=3)
    synced_s = cost.pipeline_s + cost.gradient_sync_s
    for k, end_s in enumerate(priced.stage_end_s):
        place = (at[k] + 0.12, 0.72)
        if has_gradient_sync(plan):
            ax.broken_barh(
                axis.spans(end_s, synced_s),
                place,
                facecolors=PAPER,
                edgecolors=SYNC_COLOUR,
                hatch="/////",
                linewidth=0,
                zorder=1,
            )
        ax.broken_barh(
            axis.spans(synced_s, cost.step_time_s),
            place,
            facecolors=SYNC_COLOUR,
            edgecolors=OPTIMIZER_COLOUR,
            hatch="xxxxx",
            linewidth=0,
            zorder=2,
        )


def _step_colours(row: PipelineRow, stage: int) -> tuple[str, str]:
    """Of forward and backward: the stage's colour lightened, and nearer to the pipeline's hue."""
    colour = stage_colour(row.hue, stage, len(row.stages))
    return mix(colour, PAPER, 0.5), mix(colour, stage_colour(row.hue, 0, 1), 0.45)


def _time_ticks(ax: Axes, axis: _TimeAxis, width: float) -> None:
    unit, scale = ("s", 1.0) if axis.end >= 1 else ("ms", 1e3)
    number = max(4, int(width / (1.0 if not axis.gap else 0.8)))
    times = MaxNLocator(number).tick_values(0.0, axis.width * scale)
    step = (times[1] - times[0]) / scale
    moments = [k * step for k in range(int(axis.end / step + 1e-9) + 1)] if axis.end / step < 1e5 else [0.0]
    places = [(moment, axis.at(moment)) for moment in moments]
    shown = [(moment, x) for moment, x in places if x is not None and moment <= axis.end]
    last = axis.width
    shown = [item for item in shown if (last - item[1]) * width / axis.width > 0.9]
    ax.set_xticks(
        [x for _, x in shown] + [last],
        [f"{moment * scale:g}" for moment, _ in shown] + [f"{axis.end * scale:.4g} {unit}"],
    )
    ax.get_xticklabels()[-1].set_horizontalalignment("right")


# ------------------------------------------------------------------------------------------------ memory


def draw_memory(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None) -> Axes:
    """A bar a stage: what its fullest device holds, by part, against the limit."""
    ax = _new_axes(ax, 14, 3)
    rows = shown_rows(problem, plan, cost)
    width, height = _inches(ax)
    places: list[tuple[float, PipelineRow, StageRow]] = []
    x = 0.0
    for row in rows.pipelines:
        places += [(x + k, row, stage) for k, stage in enumerate(row.stages)]
        x += len(row.stages) + 0.5
    end = x - 0.5
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
            _fitting([f"{percent(share)} of {limit:.1f}", percent(share), f"{share:.0f}×"], 0.94 * per_bar, _SMALL),
            fontsize=_SMALL,
            color="#B3261E" if full else MUTED,
            fontweight="bold" if full else "normal",
            ha="center",
            zorder=4,
        )
        colour = stage_colour(row.hue, stage.stage, len(row.stages))
        name = _stage_name(row, stage)
        chip = min(bar, 0.4 / per_bar)
        ax.add_patch(
            Rectangle(
                (x - chip / 2, -0.24 * line),
                chip,
                0.17 * line,
                facecolor=colour,
                clip_on=False,
                linewidth=0,
            )
        )
        ax.text(
            x,
            -0.16 * line,
            name,
            fontsize=min(_SMALL, 0.9 * _SMALL * chip * per_bar / _text_inches(name, _SMALL)),
            color=ink_on(colour),
            ha="center",
            va="center",
        )
        wordings = [f"{stage.tp} × {stage.gpus}", stage.gpus, stage.gpus.replace("_", "_\n", 1)]
        wordings.append(clipped(stage.gpus, 8))
        ax.text(
            x,
            -0.3 * line,
            _fitting(wordings, 0.96 * per_bar, _SMALL),
            fontsize=_SMALL,
            color=MUTED,
            ha="center",
            va="top",
            parse_math=False,
        )
    ax.set_xticks([])
    ax.set_yticks([tick for tick in MaxNLocator(5).tick_values(0, top) if tick <= top * 1.16])
    ax.set_ylabel("GiB", fontsize=_NORMAL, color=MUTED)
    _plain_axes(ax)
    _title(ax, "d", "Memory", "fullest device of each stage; line: its limit", outdent=_LABELS)
    used = [part for part in MEMORY_PARTS if any(getattr(s.cost.memory, part) for _, _, s in places)]
    _legend(ax, [Patch(facecolor=MEMORY_COLOURS[part], label=MEMORY_LABELS[part]) for part in used])
    return ax

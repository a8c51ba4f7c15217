"""The stages in the picture: the ones shown, their positions in a row, and their labels."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from hexiopt.report.facts import PlanFacts, StageFacts
from hexiopt.report.panels.canvas import text_inches
from hexiopt.report.rows import PipelineRow, PlanRows, plan_rows
from hexiopt.report.style import count, ink_on

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

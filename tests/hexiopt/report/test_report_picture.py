"""The picture of a plan: nothing cut off or written over, whatever its size and names."""

import struct
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from hexiopt.report.facts import PlanFacts
from hexiopt.report.figure import draw_plan, plan_figure
from hexiopt.report.machine_map import MAX_MACHINES
from hexiopt.report.panels.canvas import DPI
from hexiopt.report.panels.cluster import draw_cluster
from hexiopt.report.panels.stages import draw_layers, draw_memory, picture_rows
from hexiopt.report.panels.timeline import draw_timeline
from hexiopt.report.timeline import TimeAxis
from tests.hexiopt.report.pictures import Case


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_picture(small: Case, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_plan(PlanFacts(*small), path)
    width, height = png_size(paths[0].read_bytes())
    assert width == 14 * DPI
    assert 7 * DPI <= height <= 14 * DPI
    assert paths[0].stat().st_size > 30_000
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_nothing_is_cut_off_or_written_over(case: Case) -> None:
    drawn = plan_figure(PlanFacts(*case))
    drawn.draw_without_rendering()
    assert 7 <= drawn.get_figheight() <= 14
    width, height = drawn.bbox.size
    boxes = []
    for text in drawn.findobj(Text):
        assert isinstance(text, Text)
        box = text.get_window_extent()
        if text.get_visible() and text.get_text().strip() and box.width:
            assert min(box.x0, box.y0) >= 0, text
            assert box.x1 <= width, text
            assert box.y1 <= height, text
            boxes.append((text.get_text(), box.padded(-1)))
    assert len(boxes) > 50
    assert not [(a, b) for (a, left), (b, right) in combinations(boxes, 2) if left.overlaps(right)]


@pytest.mark.parametrize("draw", [draw_cluster, draw_layers, draw_timeline, draw_memory])
def test_panels_draw_alone(mixed: Case, draw: Any) -> None:
    ax = draw(PlanFacts(*mixed))
    assert draw(PlanFacts(*mixed), ax=ax) is ax


def test_texts_of_the_picture(mixed: Case) -> None:
    facts = PlanFacts(*mixed)
    texts = [text.get_text() for text in draw_cluster(facts).texts]
    for p, pipeline in enumerate(facts.plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            assert texts.count(f"{p}·{s}") == len(stage.devices)
    assert any("hatched: 1 device unused" in text for text in texts)
    assert facts.unused_devices == (7,)


def test_large_cluster_shows_few_machines_and_says_so(large: Case) -> None:
    texts = [text.get_text() for text in draw_cluster(PlanFacts(*large)).texts]
    assert sum("×" in text for text in texts) <= MAX_MACHINES
    assert any("hatched: 5,120 devices unused" in text for text in texts)


def test_formula_like_names_are_drawn_as_they_are(small: Case, tmp_path: Path) -> None:
    problem, plan, cost = small
    machines = tuple(replace(m, gpu=replace(m.gpu, name="$\\frac$")) for m in problem.cluster.machines)
    odd = replace(problem, cluster=replace(problem.cluster, name="$\\frac{$ " * 10, machines=machines))
    draw_plan(PlanFacts(odd, plan, cost), tmp_path / "plan.png")


def test_many_micro_batches_are_cut(mixed: Case) -> None:
    problem, plan, cost = mixed
    facts = PlanFacts(problem, plan, cost)
    axis = TimeAxis.of(facts, picture_rows(facts))
    assert axis.gap > 0
    assert axis.at(0.0) == 0.0
    assert axis.at((axis.cut + axis.resume) / 2) is None
    assert axis.at(cost.step_time_s) == pytest.approx(axis.width)
    assert axis.visible(0.0, cost.step_time_s)[0] == (0.0, axis.cut)

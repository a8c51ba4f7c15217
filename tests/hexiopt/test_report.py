"""Reports of plans: complete for small ones, short for large ones, safe for any name."""

import io
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from rich.console import Console, RenderableType

from hexiopt.cluster import Cluster
from hexiopt.cluster_file import cluster_from_section, read_cluster
from hexiopt.cost.cost import Cost
from hexiopt.cost.model import CostModel
from hexiopt.huggingface import read_model
from hexiopt.plan import Pipeline, Plan, Replica, SequenceGroup, SequenceLayout, Sharding, Stage
from hexiopt.problem import Problem
from hexiopt.reading import Section
from hexiopt.report.figure import draw_plan, plan_figure
from hexiopt.report.html import report_html
from hexiopt.report.panels.canvas import DPI
from hexiopt.report.panels.cluster import MAX_MACHINES, draw_cluster
from hexiopt.report.panels.layers import draw_layers
from hexiopt.report.panels.memory import draw_memory
from hexiopt.report.panels.stages import shown_rows
from hexiopt.report.panels.time_axis import time_axis
from hexiopt.report.panels.timeline import draw_timeline
from hexiopt.report.progress import SearchProgress
from hexiopt.report.rows import alike_pipelines, plan_rows, unused_devices
from hexiopt.report.style import device_ranges, mix, place, seconds, stage_colour
from hexiopt.report.table import plan_table, summary_table
from hexiopt.report.timeline import timeline_events
from hexiopt.result import Point
from hexiopt.workload import Workload

CONF = Path(__file__).parents[2] / "conf"
SOLVER = {
    "name": "metis",
    "seed": 3,
    "status": "feasible",
    "runtime_s": 2.5,
    "lower_bound_s": 1.0,
    "gap": 0.1,
}
Case = tuple[Problem, Plan, Cost]


def priced(cluster: Cluster, plan: Plan, model: str = "llama2_7b", global_batch: int = 256) -> Case:
    problem = Problem(cluster, read_model(CONF / f"model/{model}.yaml"), Workload(global_batch=global_batch))
    return problem, plan, CostModel(problem).price(plan)


@pytest.fixture(scope="module")
def small() -> Case:
    """One pipeline over all six GPUs; NVLink bridge between old:0 and old:1."""
    stages = (
        Stage.of((0, 1), 0, 13, "full"),
        Stage.of((2, 3), 13, 23, "full"),
        Stage.of((4, 5), 23, 32, "full"),
    )
    return priced(read_cluster(CONF / "cluster/small_mixed.yaml"), Plan((Pipeline(stages, 32),)), global_batch=32)


@pytest.fixture(scope="module")
def mixed() -> Case:
    """Four unlike pipelines over 31 of 32 GPUs; m3080ti:7 stays unused."""
    of = Stage.of
    first = (
        of((0, 1, 2, 3), 0, 3, "full"),
        of((4, 5, 6), 3, 5, "full"),
        of((8, 9, 10, 11), 5, 15, "full"),
        of((16, 17), 15, 22, "full"),
        of((12, 13, 14, 15), 22, 32, "full"),
    )
    pipelines = (
        Pipeline(first, 60),
        Pipeline((of((18, 19, 20, 21), 0, 20, "full"), of((22, 23), 20, 32, "full")), 52),
        Pipeline((of((24, 25), 0, 32),), 36),
        Pipeline((of((26, 27, 28), 0, 14, "selective"), of((29, 30, 31), 14, 32)), 54, 2),
    )
    plan = Plan(pipelines, sharding=Sharding(1))
    return priced(read_cluster(CONF / "cluster/hexiscale_setting_2.yaml"), plan)


@pytest.fixture(scope="module")
def large() -> Case:
    """10,240 GPUs: 320 pipelines of two machines in three shapes; half of the machines unused."""
    section = {"name": "large", "synthetic": {"num_machines": 1280, "gpus_per_machine": 8}}
    cluster = cluster_from_section(Section(section, "test"))
    firsts: dict[str, list[int]] = {}
    for machine, first in zip(cluster.machines, cluster.first_device.tolist(), strict=True):
        firsts.setdefault(machine.gpu.name, []).append(first)
    pairs = zip(firsts["a100_80gb_sxm"], firsts["h100_80gb_sxm"], strict=True)
    pipelines = []
    for k, starts in enumerate(pairs):
        a, b = (tuple(range(start, start + 8)) for start in starts)
        cut = 20 + k % 3
        pipelines.append(Pipeline((Stage.of(a, 0, cut, "full"), Stage.of(b, cut, 80, "full")), 32))
    return priced(cluster, Plan(tuple(pipelines), sharding=Sharding(1)), "llama2_70b", global_batch=10_240)


@pytest.fixture(scope="module")
def woven() -> Case:
    """A replicated stage before a plain one, two layer ranges each, policies by layer; a pipeline of one stage."""
    fast, slow = Replica((0, 1, 2, 3), 2), Replica((4, 5), 2)
    stages = (
        Stage((fast, slow), ((0, 8), (16, 24)), ("full",) * 10 + ("selective",) * 6),
        Stage((Replica((8, 9, 10, 11)),), ((8, 16), (24, 32)), ("full",)),
    )
    pipelines = (Pipeline(stages, 48, 4), Pipeline((Stage.of((24, 25, 26, 27), 0, 32, "full"),), 64))
    plan = Plan(pipelines, "interleaved", Sharding(1))
    return priced(read_cluster(CONF / "cluster/hexiscale_setting_2.yaml"), plan)


@pytest.fixture(scope="module")
def ragged() -> Case:
    """A sequence stage over two GPU types, before a TP stage."""
    groups = (
        SequenceGroup((0, 1, 2, 3), (700, 600, 500, 596), (8, 8, 8, 8)),
        SequenceGroup((8, 9, 10), (700, 500, 500), (16, 8, 8)),
    )
    first = Stage((), ((0, 20),), ("full",), SequenceLayout(groups, "zigzag"))
    pipeline = Pipeline((first, Stage.of((4, 5), 20, 32)), 8)
    cluster = read_cluster(CONF / "cluster" / "hexiseq_testbed.yaml")
    return priced(cluster, Plan((pipeline,), sharding=Sharding(1)), global_batch=8)


CASES = ["small", "mixed", "large", "woven", "ragged"]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def printed(renderable: RenderableType, width: int = 100, color: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="truecolor" if color else None).print(renderable)
    return out.getvalue()


# ------------------------------------------------------------------------------------------------- words


def test_devices_are_written_as_ranges(small: Case, large: Case) -> None:
    assert device_ranges(small[0].cluster, (5, 0, 2, 3)) == ["new:0", "old:0-1,3"]
    assert place(small[0].cluster, (2, 3)) == "old:0-1 (rtx_3090)"
    cluster = large[0].cluster
    spec = cluster.machines[0].spec_name
    assert device_ranges(cluster, range(24)) == [f"{spec}-[0-2]:0-7"]
    assert device_ranges(cluster, range(17)) == [f"{spec}-[0-1]:0-7", f"{spec}-2:0"]
    assert place(cluster, (0, 1)) == f"{spec}-0:0-1"


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.45, "123.5 s"), (5.317, "5.32 s"), (0.0426, "42.6 ms"), (7e-6, "7 µs"), (0.0, "0 s")],
)
def test_durations(value: float, text: str) -> None:
    assert seconds(value) == text


def test_stage_shades_differ_and_belong_to_the_pipelines_hue() -> None:
    shades = [stage_colour(1, stage, 5) for stage in range(5)]
    assert len(set(shades)) == 5
    assert shades[0] == stage_colour(1, 0, 1) != stage_colour(2, 0, 1)
    assert mix("#000000", "#FFFFFF", 0.5) == "#808080"


# ------------------------------------------------------------------------------------------------- rows


def test_alike_pipelines_are_found(mixed: Case, large: Case) -> None:
    assert alike_pipelines(*mixed[:2]) == ((0,), (1,), (2,), (3,))
    groups = alike_pipelines(*large[:2])
    assert [len(group) for group in groups] == [107, 107, 106]
    assert sorted(index for group in groups for index in group) == list(range(320))


def test_the_slowest_stands_for_those_alike(large: Case) -> None:
    problem, plan, cost = large
    rows = plan_rows(problem, plan, cost, group_above=10, max_pipelines=10, max_stages=32)
    for row in rows.pipelines:
        assert row.end_s == max(cost.pipelines[index].end_s for index in row.members)
    assert rows.num_left_out == 0
    assert rows.grouped


def test_what_does_not_fit_is_counted_and_the_longest_kept(mixed: Case) -> None:
    problem, plan, cost = mixed
    rows = plan_rows(problem, plan, cost, group_above=1, max_pipelines=2, max_stages=32)
    assert len(rows.pipelines) == 2
    assert rows.num_left_out == 2
    longest = max(range(4), key=lambda index: cost.pipelines[index].end_s)
    assert longest in [row.number for row in rows.pipelines]
    assert "2 pipelines" in rows.note


# ------------------------------------------------------------------------------------------------- tables


def test_table_has_every_stage_with_its_devices(mixed: Case) -> None:
    problem, plan, cost = mixed
    text = printed(plan_table(problem, plan, cost))
    for p, pipeline in enumerate(plan.pipelines):
        assert f"pipeline {p} · {pipeline.num_micro_batches} × {pipeline.micro_batch_size} " in text
        for s, stage in enumerate(pipeline.stages):
            (line,) = (line for line in text.splitlines() if line.startswith(f"{p}·{s} "))
            assert place(problem.cluster, stage.devices) in line
            (first, end), priced_stage = stage.layers[0], cost.pipelines[p].stages[s]
            assert f"[{first}, {end}) {end - first:2d}" in line
            assert f"{priced_stage.memory.total / 2**30:.1f}/{priced_stage.limit_bytes / 2**30:.1f}" in line
    assert text.count("· longest") == 1
    assert "slowest" in text


def test_no_line_is_wider_than_the_console(case: Case) -> None:
    for width in (100, 120):
        for renderable in (plan_table(*case), summary_table(*case, SOLVER)):
            assert max(len(line) for line in printed(renderable, width).splitlines()) <= width


def test_large_plan_prints_in_sixty_lines(large: Case) -> None:
    text = printed(plan_table(*large)) + printed(summary_table(*large, SOLVER))
    assert len(text.splitlines()) <= 60
    assert "×107" in text
    assert "5,120 of 10,240 used" in text


def test_full_and_overfull_memory_are_said(small: Case) -> None:
    problem, plan, _ = small
    stages = tuple(replace(stage, recompute=("none",)) for stage in plan.pipelines[0].stages)
    overfull = Plan((Pipeline(stages, 32),))
    cost = CostModel(problem).price(overfull)
    assert not cost.fits
    assert "+8.2 GiB" in printed(plan_table(problem, overfull, cost)).splitlines()[2]
    assert "does not fit: stage 0·0 (new:0-1)" in printed(summary_table(problem, overfull, cost))


def test_summary(mixed: Case) -> None:
    problem, plan, cost = mixed
    text = printed(summary_table(problem, plan, cost, SOLVER))
    for word in (
        seconds(cost.step_time_s),
        f"{cost.mfu:.1%}",
        f"{cost.tokens_per_s:,.0f}",
        "31 of 32",
        "ZeRO-1",
    ):
        assert word in text
    assert "unused: m3080ti:7" in text
    assert "metis, seed 3" in text
    assert f"(gap {1 - 1.0 / cost.step_time_s:.1%})" in text


@pytest.mark.parametrize("bound", [None, 0.0, -1.0, float("nan"), "soon", 1e9])
def test_unknown_or_stale_bounds_are_not_shown(mixed: Case, bound: Any) -> None:
    assert "bound" not in printed(summary_table(*mixed, SOLVER | {"lower_bound_s": bound}))


def test_names_are_not_markup(mixed: Case) -> None:
    problem, plan, cost = mixed
    named = replace(problem, cluster=replace(problem.cluster, name="[red]x[/red] [/]"))
    assert "[red]x[/red] [/]" in printed(summary_table(named, plan, cost), color=True)


# ------------------------------------------------------------------------------------------------- timeline


def test_trace_is_valid_and_ends_with_the_step(case: Case) -> None:
    _, plan, cost = case
    trace = json.loads(json.dumps(timeline_events(*case), allow_nan=False))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(cost.step_time_s * 1e6, rel=1e-9)
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    assert len(trace["traceEvents"]) <= 200_000
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    for event in slices:
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert ("process_name", event["pid"], 0) in names
    whole = {"forward", "backward", "optimizer"} | ({"gradient_sync"} if len(plan.pipelines) > 1 else set())
    assert whole <= {event["cat"] for event in slices}


def test_trace_has_every_micro_batch_once(mixed: Case) -> None:
    problem, plan, cost = mixed
    events = timeline_events(problem, plan, cost)["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"].split(":")[0]): e["tid"] for e in events if e["name"] == "thread_name"}
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages)):
            for kind in ("forward", "backward"):
                batches = [
                    e["args"]["micro_batch"]
                    for e in events
                    if e["ph"] == "X" and (e["pid"], e["tid"], e["cat"]) == (p, lanes[p, f"stage {s}"], kind)
                ]
                assert sorted(batches) == list(range(pipeline.num_micro_batches))


@pytest.mark.parametrize("name", ["mixed", "woven"])
def test_slices_of_a_thread_do_not_overlap(name: str, request: pytest.FixtureRequest) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in timeline_events(*request.getfixturevalue(name))["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))


def test_too_many_events_are_cut_and_said(large: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexiopt.report.timeline.MAX_EVENTS", 500)
    trace = timeline_events(*large)
    assert len(trace["traceEvents"]) <= 500
    said = trace["otherData"]
    assert (said["num_pipelines"], said["num_pipelines_shown"]) == (320, 2)
    assert said["num_pipelines_left_out"] == 320 - said["num_pipelines_alike"] == 106
    assert "stands for 107 alike" in json.dumps(trace)


def test_a_pipeline_that_alone_is_too_long_is_one_event_a_stage(small: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexiopt.report.timeline.MAX_EVENTS", 100)
    events = timeline_events(*small)["traceEvents"]
    assert len(events) <= 100
    assert sum(event["name"] == "32 micro-batches" for event in events) == 3


# ------------------------------------------------------------------------------------------------- picture


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_picture(small: Case, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_plan(*small, path)
    width, height = png_size(paths[0].read_bytes())
    assert width == 14 * DPI
    assert 7 * DPI <= height <= 14 * DPI
    assert paths[0].stat().st_size > 30_000
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_nothing_is_cut_off_or_written_over(case: Case) -> None:
    drawn = plan_figure(*case)
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
    ax = draw(*mixed)
    assert draw(*mixed, ax=ax) is ax


def test_texts_of_the_picture(mixed: Case) -> None:
    texts = [text.get_text() for text in draw_cluster(*mixed).texts]
    problem, plan, _ = mixed
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            assert texts.count(f"{p}·{s}") == len(stage.devices)
    assert any("hatched: 1 device unused" in text for text in texts)
    assert unused_devices(problem, plan) == (7,)


def test_large_cluster_shows_few_machines_and_says_so(large: Case) -> None:
    texts = [text.get_text() for text in draw_cluster(*large).texts]
    assert sum("×" in text for text in texts) <= MAX_MACHINES
    assert any("hatched: 5,120 devices unused" in text for text in texts)


def test_formula_like_names_are_drawn_as_they_are(small: Case, tmp_path: Path) -> None:
    problem, plan, cost = small
    machines = tuple(
        replace(m, gpu=replace(m.gpu, name="$\\frac$"), name=f"$\\q{k}$", spec_name=f"$\\q{k}$")
        for k, m in enumerate(problem.cluster.machines)
    )
    odd = replace(problem, cluster=replace(problem.cluster, name="$\\frac{$ " * 20, machines=machines))
    draw_plan(odd, plan, cost, tmp_path / "plan.png")


def test_many_micro_batches_are_cut(mixed: Case) -> None:
    problem, plan, cost = mixed
    axis = time_axis(shown_rows(problem, plan, cost), cost)
    assert axis.gap > 0
    assert axis.at(0.0) == 0.0
    assert axis.at((axis.cut + axis.resume) / 2) is None
    assert axis.at(cost.step_time_s) == pytest.approx(axis.width)
    assert axis.spans(0.0, cost.step_time_s)[0] == (0.0, axis.cut)


# ------------------------------------------------------------------------------------------------- page


def test_page_is_self_contained(mixed: Case) -> None:
    trajectory = (Point(0.1, 1, 50.0), Point(0.5, 10, 40.0), Point(2.0, 99, mixed[2].step_time_s))
    page = report_html(*mixed, b"\x89PNG", solver=SOLVER, trajectory=trajectory, command="hexiopt plan seed=3")
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert re.findall(r'src="([^"]{0,22})', page) == ["data:image/png;base64,"]
    for word in ("m3080ti:7", "hexiopt plan seed=3", "<svg", mixed[0].sha256, "prefers-color-scheme: dark"):
        assert word in page
    for p, pipeline in enumerate(mixed[1].pipelines):
        for s in range(len(pipeline.stages)):
            assert page.count(f">{p}·{s}</span>") == 2


def test_page_escapes_hostile_names(small: Case) -> None:
    hostile = "<script>alert('&\")</script>"
    problem, plan, cost = small
    machines = tuple(
        replace(m, gpu=replace(m.gpu, name=hostile), name=f"{hostile}{k}", spec_name=f"{hostile}{k}")
        for k, m in enumerate(problem.cluster.machines)
    )
    cluster = replace(problem.cluster, name=hostile, machines=machines)
    named = replace(problem, cluster=cluster, model=replace(problem.model, name=hostile))
    solver = SOLVER | {"name": hostile, "status": hostile, "seed": hostile}
    page = report_html(named, plan, cost, b"", solver=solver, command=hostile)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_page_without_solver_and_of_a_large_plan(large: Case, tmp_path: Path) -> None:
    (tmp_path / "plan.png").write_bytes(b"\x89PNG")
    page = report_html(*large, tmp_path / "plan.png")
    assert "×107" in page
    assert "The search" not in page
    assert len(page) < 1_000_000


@pytest.mark.parametrize("times", [(3.0,), (3.0, 3.0), tuple(1000.0 - k for k in range(900))])
def test_trajectories_of_any_length(small: Case, times: tuple[float, ...]) -> None:
    trajectory = tuple(Point(0.01 * k, k, time) for k, time in enumerate(times))
    page = report_html(*small, b"", trajectory=trajectory)
    assert "<svg" in page
    assert "nan" not in page[page.index("<svg") : page.index("</svg>")]


# ------------------------------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class Told:
    solver: str = "[bold]metis"
    runtime_s: float = 3.0
    time_limit_s: float = 10.0
    steps: int = 1234
    best_s: float = 2.0
    bound_s: float = 1.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr("hexiopt.report.progress.time.monotonic", lambda: now[0])
    return iter([now])


def test_plain_progress_is_a_line_now_and_then(clock: Iterator[list[float]]) -> None:
    now, out = next(clock), io.StringIO()
    with SearchProgress(tokens=8192, console=Console(file=out, width=40)) as listen:
        for _ in range(100):
            now[0] += 0.12
            assert listen(Told())
    lines = out.getvalue().splitlines()
    assert lines == ["[bold]metis: 3 of 10 s · 1,234 steps · best 2.00 s · 4,096 tokens/s · gap 25.0%"] * 2


def test_live_progress_vanishes() -> None:
    out = io.StringIO()
    with SearchProgress(tokens=8192, console=Console(file=out, width=120, force_terminal=True)) as listen:
        assert listen(Told(best_s=float("inf")))
        assert listen(Told())
    assert "4,096 tokens/s" in out.getvalue()
    assert "no plan yet" not in out.getvalue().splitlines()[-1]


def test_a_sequence_stage_is_named_by_its_groups(ragged: Case) -> None:
    assert "seq 4+3" in printed(plan_table(*ragged), 140)
    labels = {text.get_text() for text in plan_figure(*ragged).findobj(Text)}
    assert any("seq 4+3 on" in label for label in labels)
    assert "seq 4+3 · 20 layers" in " ".join(labels)
    problem, _, cost = ragged
    assert len(cost.pipelines[0].stages[0].copies) == 7
    assert "seq 4+3" in report_html(*ragged, b"")
    assert problem.cluster.num_devices == 16

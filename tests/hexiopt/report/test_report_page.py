"""The page of a plan, and the progress that is shown before: self-contained, safe for any name."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from hexiopt.files.problem_file import problem_sha256
from hexiopt.report.facts import PlanFacts
from hexiopt.report.page.html import report_html
from hexiopt.report.progress import SearchProgress
from hexiopt.solving import Progress
from hexiopt.solving.result import Point
from tests.hexiopt.report.pictures import SOLVER, Case

# ------------------------------------------------------------------------------------------------- page


def test_page_is_self_contained(mixed: Case) -> None:
    trajectory = (Point(0.1, 1, 50.0), Point(0.5, 10, 40.0), Point(2.0, 99, mixed[2].step_time_s))
    page = report_html(PlanFacts(*mixed, SOLVER), trajectory=trajectory, command="hexiopt plan seed=3")
    assert not re.search(r"https?:|<link|@import|url\(|<img|src=", page)
    assert page.count("<script>") == page.count("</script>") == 1
    for word in ("m3080ti:7", "hexiopt plan seed=3", "<svg", problem_sha256(mixed[0]), "prefers-color-scheme: dark"):
        assert word in page
    for p, pipeline in enumerate(mixed[1].pipelines):
        for s in range(len(pipeline.stages)):
            num_devices = len(pipeline.stages[s].devices)
            assert page.count(f">{p}·{s}</span>") == 3 + num_devices  # lane, stage and memory; its squares on the map


def test_page_escapes_hostile_names(small: Case) -> None:
    hostile = "<script>alert('&\")</script>"
    problem, plan, cost = small
    machines = tuple(replace(m, gpu=replace(m.gpu, name=hostile)) for m in problem.cluster.machines)
    cluster = replace(problem.cluster, name=hostile, machines=machines)
    named = replace(problem, cluster=cluster, model=replace(problem.model, name=hostile))
    solver = SOLVER | {"name": hostile, "status": hostile, "seed": hostile}
    page = report_html(PlanFacts(named, plan, cost, solver), command=hostile)
    assert page.count("<script") == 1
    assert "&lt;script&gt;" in page


def test_page_without_solver_and_of_a_large_plan(large: Case) -> None:
    page = report_html(PlanFacts(*large))
    assert "×107" in page
    assert "The search" not in page
    assert len(page) < 1_000_000


def test_the_page_of_1024_gpus_stays_small_however_unlike_they_are(unlike: Case) -> None:
    """Operations are drawn one by one for as many pipelines as there is room for, but every pipeline is there."""
    page = report_html(PlanFacts(*unlike, SOLVER))
    assert len(page.encode()) < 2 * 2**20
    assert page.count('<details class="pipeline"') == 64
    drawn_as_a_block = page.count("Too many operations to draw one by one")
    assert 0 < drawn_as_a_block < 64
    assert page.count("<rect") < 9_000


@pytest.mark.parametrize("times", [(3.0,), (3.0, 3.0), tuple(1000.0 - k for k in range(900))])
def test_trajectories_of_any_length(small: Case, times: tuple[float, ...]) -> None:
    trajectory = tuple(Point(0.01 * k, k, time) for k, time in enumerate(times))
    page = report_html(PlanFacts(*small), trajectory=trajectory)
    assert "<svg" in page
    assert "nan" not in page[page.rindex("<svg") : page.rindex("</svg>")]


# ------------------------------------------------------------------------------------------------- progress


TOLD = Progress("[bold]metis", 3.0, 10.0, 1234, best_s=2.0, bound_s=1.5)


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
            assert listen(TOLD)
    lines = out.getvalue().splitlines()
    assert lines == ["[bold]metis: 3 of 10 s · 1,234 steps · best 2.00 s · 4,096 tokens/s · gap 25.0%"] * 2


def test_live_progress_vanishes() -> None:
    out = io.StringIO()
    with SearchProgress(tokens=8192, console=Console(file=out, width=120, force_terminal=True)) as listen:
        assert listen(replace(TOLD, best_s=float("inf")))
        assert listen(TOLD)
    assert "4,096 tokens/s" in out.getvalue()
    assert "no plan yet" not in out.getvalue().splitlines()[-1]

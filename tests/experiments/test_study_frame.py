"""What studies share: words, tables, conditions and bars."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from experiments.app.configurations import named_cluster
from experiments.studies.cases.fleets import FLEETS
from experiments.studies.frame.figures import framed, progress, relative_bars, row_bars, row_marks
from experiments.studies.frame.rows import time_to_s
from experiments.studies.frame.settings import SETTINGS
from experiments.studies.frame.words import change, hardware, markdown, share, span
from hexiopt.problem.workload import Workload


def bars(ax: Axes) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def test_words() -> None:
    assert [change(ratio, 2) for ratio in (1.0136, 0.9841, math.nan)] == ["+1.36%", "−1.59%", ""]
    assert [share(value) for value in (0.1236, -1e-9, math.nan)] == ["12.4%", "0.0%", ""]
    assert span([0.5, math.nan, 0.25], ".2f") == "0.25 to 0.50"
    assert span([0.5, 0.501], ".2f") == "0.50"
    assert time_to_s([(1.0, 5.0), (2.0, 3.0)], 3.5) == 2.0
    assert math.isnan(time_to_s([], 3.5))
    table = pd.DataFrame({"n": ["1,000", "no plan"], "×": ["**1.20 ×**", ""], "who": ["a|b", "1"]}, index=["x", "y"])
    lines = markdown(table.rename_axis("setting")).splitlines()
    assert lines == [
        "| setting | n | × | who |",
        "| --- | --: | --: | --- |",
        "| x | 1,000 | **1.20 ×** | a\\|b |",
        "| y | no plan |  | 1 |",
    ]


def test_conditions_have_one_line_for_a_cluster_and_its_variants() -> None:
    problem = SETTINGS[0].problem()
    cluster = problem.cluster
    [line] = hardware([problem, SETTINGS[0].problem(inter_gb_per_s=0.5), problem])
    assert line.startswith(f"`{cluster.name}`: 1 × (8 × rtx_3080_ti: 56.9 TFLOPS, 12 GiB, 20 GB/s inside)")
    assert "; 5 GB/s between machines; " in line
    assert line.endswith("TFLOPS; and 1 variant of it")
    many = hardware([replace(problem, cluster=replace(cluster, name=str(number))) for number in range(20)])
    assert (len(many), many[-1]) == (13, "and 8 more clusters like these")
    old = replace(problem, cluster=named_cluster("amp_heterogeneous"), workload=Workload(precision="fp16"))
    assert "v100_16gb_sxm: 125 TFLOPS" in hardware([problem, old])[1]
    assert "v100_32gb_sxm: no bf16, 32 GiB" in hardware([FLEETS[1].problem()])[0], "left out, as Fleet.exclude says"


def test_bars_are_labelled_and_say_where_there_is_no_plan() -> None:
    ratios = pd.DataFrame({"own": [2.0, 1.0, math.nan], "other": [math.nan, 0.5, 1.0]}, index=["a", "b", "c"])
    _, (ax,) = framed("title", "below")
    relative_bars(ax, ratios)
    assert [bar.get_height() for bar in bars(ax)] == [2.0, 1.0, 0.0, 0.0, 0.5, 1.0]
    assert [text.get_text() for text in ax.texts] == ["2.00", "1.00", "no\nplan", "no\nplan", "0.50", "1.00"]
    assert {text.get_rotation() for text in ax.texts} == {0.0}
    _, (ax,) = framed("title", "below")
    relative_bars(ax, pd.concat([ratios] * 7))
    assert {text.get_rotation() for text in ax.texts} == {90.0}


def test_rows_of_bars_stand_from_the_top() -> None:
    _, (ax,) = framed("title", "below")
    row_bars(ax, pd.DataFrame({"a": [0.1, math.nan], "b": [-0.2, 0.3]}, index=["first", "second"]))
    assert [bar.get_width() for bar in bars(ax)] == pytest.approx([10.0, 0.0, -20.0, 30.0])
    assert [text.get_text() for text in ax.texts] == ["10.0", "no plan", "-20.0", "30.0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["second", "first"]
    first, second = (bar.get_y() for bar in bars(ax)[:2])
    assert first > second


def test_marks_stand_in_rows_and_missing_plans_are_counted() -> None:
    _, (ax,) = framed("title", "below")
    ratios = pd.DataFrame({"a": [1.0, 2.0], "b": [4.0, math.nan]}, index=["first", "second"])
    row_marks(ax, ratios, [(0.1, {"color": "red", "marker": "o"}), (-0.1, {"color": "blue", "marker": "s"})])
    assert [text.get_text() for text in ax.texts] == ["no plan at 1 of 2"]
    assert [list(line.get_xdata()) for line in ax.lines[:2]] == [
        [2.0, 1.0],
        pytest.approx([math.nan, 4.0], nan_ok=True),
    ]
    assert [line.get_xdata()[0] for line in ax.lines[2:4]] == pytest.approx([2.0, 2.0])  # geometric means
    assert [label.get_text() for label in ax.get_yticklabels()] == ["second", "first"]


def test_progress_begins_where_all_runs_have_a_plan() -> None:
    _, (ax,) = framed("title", "below")
    runs = pd.DataFrame({"time_limit_s": 10.0, "trajectory": [[(1.0, 4.0), (5.0, 2.0)], [(2.0, 3.0)]]})
    assert progress(ax, runs, 0, "ours") == [2.0, 3.0]
    [median] = ax.lines
    assert median.get_xdata()[0] >= 2.0
    assert (median.get_ydata()[0], median.get_ydata()[-1]) == (3.5, 2.5)
    assert progress(ax, runs.assign(trajectory=[[(1.0, 4.0)], []]), 1, "some have none") == []

"""The study of the ladder of rivals: what it claims of each rung, and that no rival with a planner is missing."""

import math
from pathlib import Path

import pandas as pd
import pytest

from experiments.studies.cases import ladder
from experiments.studies.frame.settings import TINY
from solvers import registry
from tests.experiments.made_up import Labels, claims_of, run_made_up


def test_the_ladder_says_what_each_rung_is_worth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rungs of 16, 8, 4 and 2 s above ours of 1 s; no first choice of AMP fits; Sailor is ahead of ours."""
    rungs_s = dict(zip((*ladder.RUNGS, ladder.INSIDE), (16.0, 8.0, 4.0, 2.0), strict=True))

    def step_s(labels: Labels) -> float | None:
        if labels["rung"] == ladder.FIRST and labels["rival"] == "AMP":
            return None
        if labels["rung"] == ladder.SPACE and labels["rival"] == "Sailor":
            return 0.9
        return rungs_s.get(labels["rung"], 1.0)

    page = run_made_up("ladder", monkeypatch, tmp_path, step_s)
    names, claims, tiny = page.names, claims_of(page), TINY[0].label
    table = names["means"]
    assert claims[0].startswith("Metis (ATC 24): of 16.00 × from its first choice to ours, 2.00 × prices for ten")
    assert claims[0].count("2.00 ×") == 4
    assert "AMP's first choice is no plan that fits on 1 of 1 problems." in claims
    assert f"Sailor's best plan is ahead of ours on {tiny}: its step takes 10.0% less." in claims
    assert list(table.loc["Metis (ATC 24)"])[1:] == ["16.00 ×", "8.00 ×", "4.00 ×", "2.00 ×"]
    assert table.at["AMP", ladder.FIRST] == "(1 without)"
    assert [label for label in table.index if table.at[label, "its released code"]] == [*names["RELEASED"]["plans"]]
    no_slower = names["no_slower"]
    assert no_slower(ladder.FIRST, ladder.TEN)
    assert not no_slower(ladder.TEN, ladder.FIRST)
    assert not no_slower(ladder.SPACE, ladder.INSIDE), "of Sailor, 0.9 s against 2"
    assert "Sailor" not in names["_WHOLE"]
    assert no_slower(ladder.SPACE, ladder.INSIDE, names["_WHOLE"])


def test_a_first_choice_out_of_memory_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step_cell = run_made_up("ladder", monkeypatch, tmp_path, lambda _: 1.0).names["step_cell"]
    row = pd.Series({"step_time_s": math.nan, "unfit_step_s": 31.3, "lacks_gib": 5.52, "status": "not_found"})
    assert step_cell(row) == "31.30 s, 5.5 GiB out of memory"
    assert step_cell(row.replace(31.3, math.nan)) == "not found"


def test_every_rival_with_a_planner_has_its_freedoms() -> None:
    assert set(registry.names(registry.baseline)) - {"megatron", "fsdp"} == set(ladder.FREEDOMS)
    assert [planner.label for planner in ladder.PLANNERS] == list(ladder.LENT)

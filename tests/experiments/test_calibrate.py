"""The fit finds constants again that made the figures, and leaves alone what the rows do not show."""

from dataclasses import replace

import pytest
import yaml

from experiments.calibrate import FREE, calibration_yaml, fit
from experiments.validation.cases import Given, case_of
from experiments.validation.metrics import in_metric
from experiments.validation.predict import Case, predicted
from experiments.validation.rows import read_rows
from experiments.validation.shipped import RUNS
from hexiopt.calibration.constants import constants
from hexiopt.problem.profile import NOTHING_MEASURED

LINES = (50, 53, 57, 61, 71, 74, 81, 86)  # FSDP on A100, short and long sequences, small and large models


def test_a_fit_finds_the_constants_that_made_the_figures() -> None:
    truth = {free.name: free.start for free in FREE} | {"ampere_gemm_max": 0.7, "memory_traffic": 2.4}
    found = [case_of(row, Given(NOTHING_MEASURED, None)) for row in read_rows(RUNS) if row.line in LINES]
    assert len(found) == len(LINES)
    made = [_measured(case, in_metric(case, predicted(case, truth).step_time_s)) for case in found]
    fitted = fit(made, prior=0.005)
    assert fitted["ampere_gemm_max"] == pytest.approx(0.7, rel=0.02)
    assert fitted["memory_traffic"] == pytest.approx(2.4, rel=0.05)
    for free in FREE:
        assert free.least <= fitted[free.name] <= free.most
        if free.name.startswith(("turing", "deepspeed", "internevo", "ethernet")):
            assert fitted[free.name] == pytest.approx(free.start, rel=1e-3), free.name


def _measured(case: Case, value: float) -> Case:
    return replace(case, row=replace(case.row, value=value))


def test_the_shipped_constants_are_those_that_the_fit_knows() -> None:
    assert list(constants()) == [free.name for free in FREE]
    for free in FREE:
        known = constants()[free.name]
        assert (known.unit, known.meaning) == (free.unit, free.meaning)
        assert free.least <= known.value <= free.most
    values = {free.name: free.start for free in FREE}
    written = yaml.safe_load(calibration_yaml(values, []))["constants"]
    assert {name: entry["value"] for name, entry in written.items()} == values

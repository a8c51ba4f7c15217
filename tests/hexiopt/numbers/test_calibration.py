"""Fitted constants: how they are named where they are used, and that every one is used."""

from pathlib import Path

import pytest

from hexiopt.errors import InputError
from hexiopt.numbers import frameworks as frameworks_file
from hexiopt.numbers import gpus as gpus_file
from hexiopt.numbers.constants import constant, constant_values, constants
from hexiopt.numbers.frameworks import calibrated_frameworks, default_framework, frameworks
from hexiopt.numbers.gpus import calibrated_catalogue, catalogue
from hexiopt.reading import Section

MOST_CONSTANTS = 35
# Shares of nominal rates of links, which cluster files do not state: used where published runs are predicted.
OF_LINKS = {f"{link}_efficiency" for link in ("nvlink", "pcie", "infiniband", "ethernet")}


def test_constants_are_few_and_say_what_they_are() -> None:
    assert 0 < len(constants()) <= MOST_CONSTANTS
    for entry in constants().values():
        assert all((entry.unit, entry.meaning, entry.fitted_on))
        assert entry.value > 0


def test_every_constant_is_used() -> None:
    tables = [Path(module.__file__ or "").with_suffix(".yaml").read_text() for module in (gpus_file, frameworks_file)]
    for name in constants():
        assert name in OF_LINKS or name == "t4_burst" or any(f": {name}" in table for table in tables), name


def test_a_number_or_the_name_of_a_constant() -> None:
    section = Section({"a": 0.5, "b": "memory_traffic", "c": "memory_trafic"}, "x.yaml")
    assert constant(section, "a") == 0.5
    assert constant(section, "b") == constant_values()["memory_traffic"]
    assert constant(section, "b", {"memory_traffic": 3.0}) == 3.0
    with pytest.raises(InputError, match=r"x\.yaml: c: 'memory_trafic' is no fitted constant; did you mean memory_tr"):
        constant(section, "c")


def test_trial_values_reach_gpus_and_frameworks_and_leave_the_catalogue_alone() -> None:
    trial = constant_values() | {"ampere_gemm_max": 0.5, "memory_traffic": 4.0}
    before = catalogue()["a100_80gb_sxm"]
    assert calibrated_catalogue(trial)["a100_80gb_sxm"].efficiency.gemm_max == 0.5
    assert calibrated_frameworks(trial)["hexiopt"].memory_traffic == 4.0
    assert catalogue()["a100_80gb_sxm"] == before != calibrated_catalogue(trial)["a100_80gb_sxm"]
    assert calibrated_catalogue(constant_values()) == catalogue()
    assert default_framework() == frameworks()["hexiopt"]

"""Files of trials, which `make gpu` writes: plans, and what a machine made of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hexiopt.files.plan_file import MAX_PLAN_BYTES, PlanFile, plan_file_from_section
from hexiopt.reading import Section, read_mapping

FORMAT, VERSION = "hexiopt.trials", 1
_MAX_SECONDS, _MAX_BYTES = 1e6, 2.0**60


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was trained with: the median seconds of a step, and the most bytes of tensors that any device held;
    or the `trouble` that it ended with."""

    name: str
    plan_file: PlanFile
    step_s: float
    peak_bytes: float
    trouble: str | None


def read_trials(path: Path) -> list[TriedPlan]:
    """The trials of a file. Raises InputError."""
    section = Section(read_mapping(path, max_bytes=MAX_PLAN_BYTES), str(path))
    if section.text("format") != FORMAT:
        section.fail("format", f"is not {FORMAT}; give a gpu.json written by make gpu")
    if type(version := section.raw("version")) is not int or version != VERSION:
        section.fail("version", f"is not read here; this program reads version {VERSION}")
    return list(_trials(section))


def _trials(section: Section) -> Iterator[TriedPlan]:
    for trial in section.sections("trials"):
        name, plan_file = trial.text("name"), plan_file_from_section(trial.section("plan"))
        measured = trial.section("measured")
        trouble = measured.text("trouble", default=None)
        if trouble is not None:
            yield TriedPlan(name, plan_file, 0.0, 0.0, trouble)
            continue
        seconds, peaks = _positive(measured, "seconds", _MAX_SECONDS), _positive(measured, "peak_bytes", _MAX_BYTES)
        yield TriedPlan(name, plan_file, median(seconds), max(peaks), None)


def _positive(section: Section, key: str, most: float) -> list[float]:
    def is_positive(value: Any) -> bool:
        return type(value) in (int, float) and 0 < value <= most

    numbers = section.valid_items(key, is_positive, f"is no list of numbers above 0, up to {most:g}")
    if not numbers:
        section.fail(key, "is empty; train again")
    return numbers

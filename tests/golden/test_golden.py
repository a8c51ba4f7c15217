"""Prices, plans and error lines are what the golden files say.

Where they ought to differ, `make golden` rewrites the files; the commit says why.
"""

from collections.abc import Iterable
from itertools import product

import pytest

from hexiopt.solving.registry import ALIASES
from tests.golden import files, outcome
from tests.slow import slow_but

SHOWN = 12
PLANS = files.read(files.PLANS)
LONG = ("cp_sat", "flashflex", "sequence_exact", *ALIASES)  # half of the time that all solvers take


def assert_none(lines: Iterable[str]) -> None:
    """No difference; else the first of them, and how many there are."""
    differences = list(lines)
    more = f"\n... {len(differences)} in all; if they are meant, run make golden and say why" if differences else ""
    assert not differences, "\n" + "\n".join(line[:400] for line in differences[:SHOWN]) + more


def test_prices() -> None:
    """Models price several plans each: what they remember of one must not leak into another."""
    golden = files.read(files.PRICES)
    lines = []
    for k, (entry, after) in enumerate(zip(golden["plans"], files.prices(golden), strict=True)):
        plan = entry["plan"]
        where = f"plan {k} ({entry['source']}, {plan['schedule']}, ZeRO-{plan['sharding']['stage']}"
        where += f", {entry['framework']})"
        lines += files.differences(entry["outcome"], after, where)
    assert_none(lines)


@pytest.mark.parametrize(
    ("solver", "turn"),
    slow_but([(name, 0) for name in PLANS["solvers"] if name not in LONG], product(PLANS["solvers"], range(3))),
)
def test_plans(solver: str, turn: int) -> None:
    """Each solver on a third of the problems, each problem with a third of the solvers; the others when slow."""
    known = PLANS["solvers"][solver]
    names = list(known)[(turn + list(PLANS["solvers"]).index(solver)) % 3 :: 3]
    assert_none(files.differences({name: known[name] for name in names}, files.plans(PLANS, solver, names), solver))


def test_error_lines() -> None:
    lines = []
    for entry in files.read(files.BAD_INPUT):
        after = outcome.message(entry["kind"], entry["text"])
        lines += files.differences(entry["message"], after, entry["name"])
    assert_none(lines)


def test_a_difference_is_seen_and_named() -> None:
    """Numbers beyond the tolerance, texts and lengths; seconds against the step."""
    before = {"step_time_s": 2.0, "optimizer_s": 1e-9, "bytes": [1.0, 2.0], "text": "a"}
    assert not list(files.differences(before, before | {"optimizer_s": 1e-9 + 1e-12, "step_time_s": 2 + 1e-12}))
    after = {"step_time_s": 2.0 + 1e-11, "optimizer_s": 1e-9 + 1e-11, "bytes": [1.0, 2.0 + 1e-11], "text": "b"}
    names = [line.partition(":")[0] for line in files.differences(before, after)]
    assert names == ["step_time_s", "optimizer_s", "bytes[1]", "text"]
    assert list(files.differences(before, before | {"bytes": [1.0]})) == ["bytes: [1.0, 2.0] → [1.0]"]
    assert list(files.differences({}, {"refusal": "no"})) == ["refusal: None → 'no'"]

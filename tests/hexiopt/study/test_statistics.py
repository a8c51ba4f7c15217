"""Means with intervals and paired tests, against tables and by hand; a sweep's summary pairs jobs that agree."""

import pytest

import hexiopt as hx
from hexiopt.study.statistics import Mean, signed_rank_p


def test_an_interval_is_that_of_a_table() -> None:
    """Student's t of 4 degrees of freedom at 95 % is 2.776 in every table; the deviation of 1 to 5 is 1.581."""
    mean = Mean.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean.mean == 3.0
    assert (mean.low, mean.high) == pytest.approx((3 - 2.776 * 1.581 / 5**0.5, 3 + 2.776 * 1.581 / 5**0.5), abs=1e-3)
    assert Mean.of([2.0]) == Mean(2.0, None, None)
    assert Mean.geometric([1.0, 4.0]).mean == pytest.approx(2.0)


def test_signed_ranks_are_counted() -> None:
    """Of the 2^6 signs that six pairs may have, two are as one-sided as all alike."""
    assert signed_rank_p([1.1, 1.2, 1.3, 1.4, 1.5, 1.6]) == pytest.approx(2 / 64)
    assert signed_rank_p([1.1, 1 / 1.2, 1.3, 1 / 1.4]) > 0.5  # type: ignore[operator]
    assert signed_rank_p([1.0, 1.0]) is None
    assert signed_rank_p([]) is None


def jobs(*rows: tuple[str, int, str, float | None]) -> hx.Sweep:
    """Jobs of a solver, a seed, a cluster and a step time."""
    columns = ("folder", "cluster", "seed", "solver", "exit_code", "message", "result.step_time_s")
    return hx.Sweep(columns, tuple(("f", name, seed, solver, 0, "", s) for solver, seed, name, s in rows))


def test_a_summary_pairs_jobs_that_agree_in_all_other_keys() -> None:
    clusters = {"a": 1.0, "b": 100.0, "c": 10.0}
    rows = [("ours", seed, name, s * (1 + seed)) for name, s in clusters.items() for seed in (0, 1)]
    rows += [("theirs", seed, name, s * more) for name, s, seed, more in THEIRS]
    ours, theirs = jobs(*rows, ("theirs", 1, "c", None)).summary()
    assert [ours[key] for key in ("solver", "jobs", "plans", "pairs", "faster", "p")] == ["ours", 6, 6, 6, 0, None]
    assert ours["over_best"] == pytest.approx((10 / 9) ** (1 / 6))
    assert ours["low"] < ours["over_best"] < ours["high"]
    assert [theirs[key] for key in ("jobs", "plans", "pairs", "faster")] == [6, 5, 5, 1]
    assert theirs["over_best"] == pytest.approx((1.2 * 1.3 * 1.4 * 1.5) ** (1 / 5))
    assert theirs["p"] == pytest.approx(2 * 2 / 2**5)  # of 32 signs those whose ranks sum to at most 1, either way
    assert [row["seed"] for row in jobs(*rows).summary(by="seed")] == [0, 1]


THEIRS = [("a", 1.0, 0, 1.2), ("a", 2.0, 1, 1.3), ("b", 100.0, 0, 1.4), ("b", 200.0, 1, 1.5), ("c", 10.0, 0, 0.9)]


def test_a_summary_of_nothing_and_by_a_wrong_column() -> None:
    [row] = jobs(("ours", 0, "a", None)).summary()
    assert (row["plans"], row["over_best"]) == (0, None)
    with pytest.raises(hx.InputError, match="is not a column; did you mean solver"):
        jobs(("ours", 0, "a", 1.0)).summary(by="solvr")

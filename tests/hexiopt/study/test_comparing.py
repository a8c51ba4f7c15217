"""Solvers side by side: rows, labels, seeds, the bound and its picture."""

import re
from dataclasses import replace
from typing import Any

import pytest

import hexiopt as hx
from hexiopt import InputError
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Capabilities
from hexiopt.solving.result import Result
from solvers.registry import make_solver

LONG_S = 600.0


@pytest.fixture(scope="module")
def problem() -> hx.Problem:
    return hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=16, seq_len=256))


@pytest.fixture(scope="module")
def comparison(problem: hx.Problem) -> hx.Comparison:
    solvers = ["random", "local_search"]
    return hx.compare(problem, solvers, seeds=3, time_limit_s=LONG_S, max_steps=30, bound_time_limit_s=60)


def test_a_row_a_solver_and_seed_the_best_first(problem: hx.Problem, comparison: hx.Comparison) -> None:
    assert sorted(zip(comparison["solver"], comparison["seed"], strict=True)) == [
        (name, seed) for name in ("local_search", "random") for seed in range(3)
    ]
    assert list(comparison["step_time_s"]) == sorted(comparison["step_time_s"])
    assert comparison["over_best"][0] == 0.0
    alone = hx.solve(problem, "random", LONG_S, seed=2, max_steps=30)
    again = next(result for result in comparison.results if (result.solver, result.seed) == ("random", 2))
    assert (alone.plan, alone.objective) == (again.plan, again.objective)
    assert comparison.best.objective == comparison["step_time_s"][0]


def test_all_stand_above_one_bound(problem: hx.Problem, comparison: hx.Comparison) -> None:
    (bound_s,) = set(comparison["lower_bound_s"])
    assert hx.lower_bound(problem, 0) < bound_s <= comparison.best.objective


def test_summaries_and_trajectories(comparison: hx.Comparison) -> None:
    rows = {row["solver"]: row for row in comparison.summary()}
    assert (rows["random"]["runs"], rows["random"]["plans"]) == (3, 3)
    assert rows["random"]["best_s"] <= rows["random"]["median_s"] <= rows["random"]["worst_s"]
    known = [result.objective for result in comparison.results if result.solver == "random"]
    assert rows["random"]["mean_s"] == pytest.approx(sum(known) / 3)
    assert rows["random"]["low_s"] <= rows["random"]["mean_s"] <= rows["random"]["high_s"]
    first = next(iter(comparison.summary()))
    assert first["p"] is None  # against itself
    points = list(comparison.trajectories())
    assert {(point["solver"], point["seed"]) for point in points} == set(
        zip(comparison["solver"], comparison["seed"], strict=True)
    )


def test_operators_are_summed_over_seeds(comparison: hx.Comparison) -> None:
    rows = list(comparison.operators())
    assert len(rows) == len({(row["solver"], row["operator"]) for row in rows}) > 0
    for solver in {row["solver"] for row in rows}:
        solver_rows = [row for row in rows if row["solver"] == solver]
        counts = [counts for result in comparison.results if result.solver == solver for counts in result.operators]
        for key in ("proposed", "improved"):
            assert sum(row[key] for row in solver_rows) == sum(getattr(operator, key) for operator in counts)
        assert [row["improved"] for row in solver_rows] == sorted(
            (row["improved"] for row in solver_rows), reverse=True
        )


def test_it_draws_anytime_curves_with_a_band_and_the_bound(comparison: hx.Comparison) -> None:
    axes = hx.plot.trajectories(comparison)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["random", "local_search", "lower bound"]
    assert len(axes.collections) == 2  # a band a solver
    assert [text.get_text() for text in hx.plot.step_times(comparison).get_yticklabels()] == ["local_search", "random"]
    assert comparison.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_curves_over_steps_are_the_same_on_any_machine(problem: hx.Problem, comparison: hx.Comparison) -> None:
    again = hx.compare(problem, ["random", "local_search"], 3, LONG_S, 30, bound_time_limit_s=0)
    lines = [hx.plot.trajectories(trial, over="steps").lines[:2] for trial in (comparison, again)]
    for line, other in zip(*lines, strict=True):
        assert (line.get_xydata() == other.get_xydata()).all()  # type: ignore[attr-defined]
        assert max(line.get_xdata()) == 30  # type: ignore[arg-type]
    with pytest.raises(InputError, match="over: 'step' is not known; did you mean steps"):
        hx.plot.trajectories(comparison, over="step")  # type: ignore[arg-type]


class Cheater:
    """States a price that its plan has not."""

    name = "cheater"
    capabilities = Capabilities()

    def solve(self, problem: Problem, budget: Budget, *, seed: int = 0, pricer: object = None, **_: object) -> Result:
        result = make_solver("random").solve(problem, budget, seed=seed)
        assert result.cost is not None
        return replace(result, cost=replace(result.cost, step_time_s=result.cost.step_time_s / 2))


def test_an_invalid_plan_is_marked_and_not_ranked(problem: hx.Problem) -> None:
    solvers: dict[str, Any] = {"honest": "random", "other": hx.solver("random"), "cheat": Cheater()}
    comparison = hx.compare(problem, solvers, time_limit_s=LONG_S, max_steps=5, bound_time_limit_s=0)
    assert comparison["solver"][-1] == "cheat"
    assert comparison["status"][-1] == "invalid"
    assert set(comparison["solver"]) == set(solvers)
    assert comparison.best.solver == "honest"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"solvers": []}, "solvers: is empty; "),
        ({"solvers": ["random", "random"]}, "solvers: 'random' appears twice; "),
        ({"solvers": ["rando"]}, "solver: 'rando' is not known; did you mean random"),
        ({"seeds": 0}, "seeds: 0 is out of range; "),
        ({"seeds": [-1]}, "seeds: -1 is out of range; "),
    ],
)
def test_wrong_requests_are_one_line(problem: hx.Problem, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(hx.InputError, match=f"^{re.escape(message)}"):
        hx.compare(problem, **{"solvers": ["random"], **stated})

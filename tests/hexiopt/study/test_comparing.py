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
def compared(problem: hx.Problem) -> hx.Comparison:
    solvers = ["random", "local_search"]
    return hx.compare(problem, solvers, seeds=3, time_limit_s=LONG_S, max_steps=30, bound_time_limit_s=60)


def test_a_row_a_solver_and_seed_the_best_first(problem: hx.Problem, compared: hx.Comparison) -> None:
    assert sorted(zip(compared["solver"], compared["seed"], strict=True)) == [
        (name, seed) for name in ("local_search", "random") for seed in range(3)
    ]
    assert list(compared["step_time_s"]) == sorted(compared["step_time_s"])
    assert compared["over_best"][0] == 0.0
    alone = hx.solve(problem, "random", LONG_S, seed=2, max_steps=30)
    again = next(one for one in compared.results if (one.solver, one.seed) == ("random", 2))
    assert (alone.plan, alone.objective) == (again.plan, again.objective)
    assert compared.best.objective == compared["step_time_s"][0]


def test_all_stand_above_one_bound(problem: hx.Problem, compared: hx.Comparison) -> None:
    (bound_s,) = set(compared["lower_bound_s"])
    assert hx.lower_bound(problem, 0) < bound_s <= compared.best.objective


def test_summaries_and_trajectories(compared: hx.Comparison) -> None:
    rows = {row["solver"]: row for row in compared.summary()}
    assert (rows["random"]["runs"], rows["random"]["plans"]) == (3, 3)
    assert rows["random"]["best_s"] <= rows["random"]["median_s"] <= rows["random"]["worst_s"]
    known = [one.objective for one in compared.results if one.solver == "random"]
    assert rows["random"]["mean_s"] == pytest.approx(sum(known) / 3)
    assert rows["random"]["low_s"] <= rows["random"]["mean_s"] <= rows["random"]["high_s"]
    first = next(iter(compared.summary()))
    assert first["p"] is None  # against itself
    points = list(compared.trajectories())
    assert {(point["solver"], point["seed"]) for point in points} == set(
        zip(compared["solver"], compared["seed"], strict=True)
    )


def test_operators_are_summed_over_seeds(compared: hx.Comparison) -> None:
    rows = list(compared.operators())
    assert len(rows) == len({(row["solver"], row["operator"]) for row in rows}) > 0
    for solver in {row["solver"] for row in rows}:
        own = [row for row in rows if row["solver"] == solver]
        counts = [counts for one in compared.results if one.solver == solver for counts in one.operators]
        for key in ("proposed", "improved"):
            assert sum(row[key] for row in own) == sum(getattr(one, key) for one in counts)
        assert [row["improved"] for row in own] == sorted((row["improved"] for row in own), reverse=True)


def test_it_draws_anytime_curves_with_a_band_and_the_bound(compared: hx.Comparison) -> None:
    axes = hx.plot.trajectories(compared)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["random", "local_search", "lower bound"]
    assert len(axes.collections) == 2  # a band a solver
    assert [text.get_text() for text in hx.plot.step_times(compared).get_yticklabels()] == ["local_search", "random"]
    assert compared.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_curves_over_steps_are_the_same_on_any_machine(problem: hx.Problem, compared: hx.Comparison) -> None:
    again = hx.compare(problem, ["random", "local_search"], 3, LONG_S, 30, bound_time_limit_s=0)
    lines = [hx.plot.trajectories(one, over="steps").lines[:2] for one in (compared, again)]
    for one, other in zip(*lines, strict=True):
        assert (one.get_xydata() == other.get_xydata()).all()  # type: ignore[attr-defined]
        assert max(one.get_xdata()) == 30  # type: ignore[arg-type]
    with pytest.raises(InputError, match="over: 'step' is not known; did you mean steps"):
        hx.plot.trajectories(compared, over="step")  # type: ignore[arg-type]


class Cheater:
    """States a price that its plan has not."""

    name = "cheater"
    capabilities = Capabilities()

    def solve(self, problem: Problem, budget: Budget, *, seed: int = 0, pricer: object = None, **_: object) -> Result:
        found = make_solver("random").solve(problem, budget, seed=seed)
        assert found.cost is not None
        return replace(found, cost=replace(found.cost, step_time_s=found.cost.step_time_s / 2))


def test_an_invalid_plan_is_marked_and_not_ranked(problem: hx.Problem) -> None:
    solvers: dict[str, Any] = {"honest": "random", "other": hx.solver("random"), "cheat": Cheater()}
    compared = hx.compare(problem, solvers, time_limit_s=LONG_S, max_steps=5, bound_time_limit_s=0)
    assert compared["solver"][-1] == "cheat"
    assert compared["status"][-1] == "invalid"
    assert set(compared["solver"]) == set(solvers)
    assert compared.best.solver == "honest"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"solvers": []}, "solvers: is empty; "),
        ({"solvers": ["random", "random"]}, "solvers: 'random' appears twice; "),
        ({"solvers": ["rando"]}, "solver: 'rando' is not known; did you mean random"),
        ({"seeds": 0}, "seeds: 0 is out of range; "),
        ({"seeds": [-1]}, "seeds: -1 is out of range; "),
    ],
)
def test_wrong_requests_are_one_line(problem: hx.Problem, stated: dict[str, Any], said: str) -> None:
    with pytest.raises(hx.InputError, match=f"^{re.escape(said)}"):
        hx.compare(problem, **{"solvers": ["random"], **stated})

"""What holds for every baseline: its answer lies in its published space, and neither a random plan of that space nor
another baseline's answer that lies in it beats it."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import pytest

from experiments.studies.cases.ladder import FREEDOMS
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from hexiopt.solving.result import Result
from solvers.baselines._frame import Baseline, rank_candidates
from solvers.baselines.galvatron.galvatron import plan_of
from solvers.baselines.galvatron.stages import StagePlanner
from solvers.core.search import Search
from solvers.registry import baseline, make_solver, names, solver_class
from tests.slow import slow_but
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import SPACES, choices_of, ranks_of
from tests.solvers.baselines.random_plans import Complete, random_plans

BASELINES = names(baseline)
# FlashFlex partitions heuristically: what its search misses of its space is its own limit.
SEARCH_ALL = tuple(name for name in BASELINES if name != "flashflex")

TRIES = 2000  # random draws on each problem
TOLERANCE = 0.02

FEW = ("galvatron", "megatron", "sailor")  # to search all of the others' spaces takes seconds each


def on_mixed(names: Sequence[str]) -> pytest.MarkDecorator:
    """`names` on every kind of mixed cluster: `make test` asks a few on one, `make test-slow` all."""
    return pytest.mark.parametrize(
        ("name", "kind"), slow_but([(name, "slow_network") for name in FEW], product(names, problems.MIXED))
    )


def complete_by_galvatron() -> Complete:
    """Draws with the layers and recompute that Galvatron plans for their degrees and batches."""
    planner_of: Callable[[Problem], StagePlanner] = cache(lambda problem: StagePlanner(PlanPricer(problem)))

    def complete(problem: Problem, plan: Plan, rng: random.Random) -> Plan | None:
        planner, ranks = planner_of(problem), ranks_of(plan)
        choice = rng.choice(choices_of(planner, plan))
        splits = planner.splits(ranks, choice)
        return plan_of(problem, ranks, choice, rng.choice(splits)) if splits else None

    return complete


COMPLETE = {"galvatron": complete_by_galvatron()}


def make_baseline(name: str, **options: object) -> Baseline:
    if name == "flashflex":
        pytest.importorskip("pymetis")
    solver = solver_class(name)(**options)
    assert isinstance(solver, Baseline)
    return solver


@cache
def answer(name: str, kind: str) -> Result:
    return make_baseline(name).solve(problems.MIXED[kind](), Budget(3600.0))


@on_mixed(BASELINES)
def test_the_answer_lies_in_its_space(name: str, kind: str) -> None:
    problem, result = problems.MIXED[kind](), answer(name, kind)
    assert result.plan is not None, result.reason
    assert violations(problem, result.plan, result.cost) == []
    assert SPACES[name].first_violation(problem, result.plan) is None


@pytest.mark.parametrize(("name", "kind"), slow_but([("amp", "tight_memory")], product(FREEDOMS, problems.MIXED)))
def test_ours_in_its_freedoms_may_have_the_answer(name: str, kind: str) -> None:
    """As the ladder of rivals restricts the portfolio."""
    problem, plan = problems.MIXED[kind](), answer(name, kind).plan
    assert plan is not None
    broken = {violation.rule for violation in check(FREEDOMS[name].of(problem), plan)}
    assert broken <= ({"space.uneven_layers"} if FREEDOMS[name].lacks else set())


@on_mixed(BASELINES)
def test_no_random_plan_of_its_space_beats_it(name: str, kind: str) -> None:
    """There are enough draws in the space, and some of them fit."""
    problem = problems.MIXED[kind]()
    drawn = set(random_plans(SPACES[name], problem, random.Random(1), TRIES, COMPLETE.get(name)))
    assert len(drawn) >= 10
    model = PlanPricer(problem)
    best_s = min(model.price(plan).objective for plan in drawn)
    assert best_s < float("inf")
    assert answer(name, kind).objective <= (1 + TOLERANCE) * best_s


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCH_ALL)
@pytest.mark.parametrize("kind", problems.MIXED)
def test_no_other_answer_in_its_space_beats_it(name: str, kind: str) -> None:
    pytest.importorskip("pymetis")
    problem, ours = problems.MIXED[kind](), answer(name, kind)
    for other in BASELINES:
        theirs = answer(other, kind)
        if theirs.plan is not None and SPACES[name].first_violation(problem, theirs.plan) is None:
            assert ours.objective <= (1 + TOLERANCE) * theirs.objective, other


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but([(name, "tight_memory") for name in ("amp", "galvatron")], product(BASELINES, problems.MIXED)),
)
def test_of_more_candidates_the_best_is_no_slower(name: str, kind: str) -> None:
    """One is the first by the published estimate; more of the ranking are a prefix of it, and all have the least."""
    problem, budget = problems.MIXED[kind](), Budget(3600.0)
    first = make_baseline(name, top_k=1)
    ranking = rank_candidates(first, Search(name, problem, budget, 0))
    estimates = [candidate.estimate_s for candidate in ranking]
    assert estimates == sorted(estimates)
    assert all(candidate.published for candidate in ranking)
    head = next(plan for candidate in ranking if (plan := candidate.make()) and not check(problem, plan))
    result, fits = first.solve(problem, budget), PlanPricer(problem).price(head).fits
    assert (result.plan and result.plan.pipelines, result.steps) == (head.pipelines if fits else None, 1)
    best_s = [
        result.objective,
        make_baseline(name, top_k=10).solve(problem, budget).objective,
        answer(name, kind).objective,
    ]
    assert best_s == sorted(best_s, reverse=True)


def test_options_are_those_of_the_baseline() -> None:
    assert make_solver("flashflex", defects="as_released") != make_solver("flashflex")
    with pytest.raises(InputError, match=r"solver\.defects: megatron does not take it; its options: top_k$"):
        make_solver("megatron", defects="as_released")
    with pytest.raises(InputError, match=r"solver\.defects: 'as_relased' is not known; did you mean as_released"):
        make_solver("flashflex", defects="as_relased")

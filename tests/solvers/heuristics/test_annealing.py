"""The annealing loop on whole numbers, and what searches say of their operators."""

import math
import random
from dataclasses import dataclass

import pytest

from hexiopt.solving import Budget
from solvers.core.operators import Lottery, Operator, OperatorStatistics, OperatorTally
from solvers.core.search import Search
from solvers.heuristics.annealing import Metropolis, anneal
from solvers.registry import make_solver
from tests.slow import slow_but
from tests.solvers import problems


@dataclass(frozen=True)
class Number:
    """A whole number, whose energy has valleys at multiples of 10, the deepest at 50."""

    value: int

    @property
    def energy(self) -> float:
        return 0.01 * abs(self.value - 50) + math.sin(math.pi * (self.value % 10) / 10)


OPERATORS: tuple[Operator[None, int, int], ...] = (
    Operator("up", 2, lambda _, value, rng: value + rng.choice((1, 10))),
    Operator("down", 1, lambda _, value, rng: value - 1, applies=lambda _, value: value > 0),
    Operator("never", 1, lambda _, value, rng: value + 1, needs=lambda problem: False),
    Operator("same", 1, lambda _, value, rng: value),
)


def run_of(max_steps: int) -> Search:
    return Search("test", problems.loose(), Budget(3600.0, max_steps), 0)


@pytest.mark.parametrize("starts", [[0], [0, 93, 17]])
def test_annealing_leaves_valleys_and_takes_turns(starts: list[int]) -> None:
    run, rng = run_of(3000), random.Random(1)
    lottery = Lottery(OPERATORS, None, run.problem, run.operators)
    bests = anneal(
        [Number(start) for start in starts],
        lambda now, rng: lottery.draw(now.value, rng),
        lambda value, now, limit, tally: Number(value % 100),
        Metropolis(1.0, 0.01),
        run.until(1.0),
        rng,
    )
    assert [best.value for best in bests] == [50] * len(starts)
    assert run.steps == 3000
    counts = {count.operator: count for count in run.operators.counts()}
    assert set(counts) == {"up", "down", "same"}
    assert sum(count.proposed for count in counts.values()) == 3000
    assert counts["up"].valid == counts["up"].proposed > counts["down"].proposed > 0
    assert counts["same"].valid == 0
    assert 0 < counts["up"].accepted < counts["up"].valid


def test_nothing_worse_is_accepted_at_the_end() -> None:
    rng, cold = random.Random(0), Metropolis(1.0, 1e-9)
    assert all(cold(5.0, 1.0, rng) == pytest.approx(5.0, abs=1e-6) for _ in range(100))
    assert max(cold(5.0, 0.0, rng) for _ in range(100)) > 6.0


def test_statistics_of_two_searches_add_up() -> None:
    first, second = OperatorStatistics(), OperatorStatistics()
    first.of("a").proposed, second.of("a").proposed, second.of("b").seconds = 2, 3, 0.5
    first.add(second.counts())
    assert [(count.operator, count.proposed, count.seconds) for count in first.counts()] == [
        ("a", 5, 0.0),
        ("b", 0, 0.5),
    ]
    assert set(OperatorTally.__slots__) == set(type(first.counts()[0]).__slots__) - {"operator"}


@pytest.mark.parametrize("name", slow_but(("local_search",), ("local_search", "portfolio")))
def test_a_result_says_what_operators_did(name: str) -> None:
    result = make_solver(name).solve(problems.easy(), Budget(3600.0, 400), seed=0)
    counts = {count.operator: count for count in result.operators}
    assert {"reorder_stages", "shift_layer"} <= set(counts)
    for tally in counts.values():
        assert 0 <= tally.valid <= tally.proposed
        assert tally.known + tally.unfit + tally.priced <= tally.valid
        assert tally.improved <= tally.accepted <= tally.valid
    if name == "local_search":  # some moves are drawn twice in a step
        assert sum(count.proposed for count in counts.values()) < 300 + 200

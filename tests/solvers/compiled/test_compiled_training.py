"""The compiled estimate is the price with adapters, and with every optimizer."""

import pytest

from hexiopt.numbers.optimizers import OPTIMIZERS
from tests.solvers.compiled.test_compiled_price import check
from tests.solvers.drawn import drawn_problem
from tests.training import with_adapters, with_optimizer


@pytest.mark.parametrize("number", range(6))
def test_candidates_with_adapters_cost_what_the_pricer_says(number: int) -> None:
    assert check(with_adapters(drawn_problem(number), number), number, 12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_candidates_with_an_optimizer_cost_what_the_pricer_says(optimizer: str) -> None:
    assert check(with_optimizer(drawn_problem(1), optimizer), 1, 12)

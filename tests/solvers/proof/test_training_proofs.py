"""Proofs with adapters and other optimizers equal looking at all plans; `exact` proves such a problem."""

import pytest

from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.exact.exact import Exact
from tests.slow import slow_but
from tests.solvers.proof.problems import random_problem
from tests.solvers.proof.test_proof import agrees
from tests.training import with_adapters, with_optimizer


@pytest.mark.parametrize("seed", slow_but((3,), (0, 3, 5, 8, 11)))
def test_proofs_with_adapters_equal_looking_at_all_plans(seed: int) -> None:
    assert agrees(with_adapters(random_problem(seed), seed))


@pytest.mark.parametrize(("optimizer", "seed"), slow_but([("muon", 3)], [("muon", 3), ("sgd", 5), ("adamw_8bit", 11)]))
def test_proofs_with_optimizers_equal_looking_at_all_plans(optimizer: str, seed: int) -> None:
    assert agrees(with_optimizer(random_problem(seed), optimizer))


def test_exact_proves_adapters() -> None:
    result = Exact().solve(with_adapters(random_problem(3), 3), Budget(600.0, max_steps=400), seed=1)
    assert result.status is Status.OPTIMAL
    assert result.bound_s <= result.objective

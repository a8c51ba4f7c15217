"""Our own solvers keep the contract by which `hexiopt.testing` judges those of strangers."""

import pytest

from hexiopt.testing import check_solver
from solvers.registry import baseline, for_any_problem, names, of_sequences
from tests.slow import slow_but

NAMES = [name for kind in (for_any_problem, baseline, of_sequences) for name in names(kind)]


@pytest.mark.parametrize("name", slow_but(("random", "megatron"), NAMES))
def test_ours_are_judged_as_a_strangers_are(name: str) -> None:
    assert len(check_solver(name, steps=24)) == 6  # of an odd number, portfolio's two members take one more

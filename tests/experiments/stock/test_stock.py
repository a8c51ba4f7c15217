"""What is compared with stock parts of torch is the same: equal losses, and a ratio of the times of both."""

import pytest

from experiments.stock import host, pipelines, tensor_parallel
from experiments.stock.turns import OURS, STOCK, take_turns


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(host, id="host"),
        pytest.param(pipelines, id="pipelines", marks=pytest.mark.slow),
        pytest.param(tensor_parallel, id="tensor_parallel", marks=pytest.mark.slow),
    ],
)
def test_both_ways_begin_with_the_same_loss(module: object) -> None:
    comparison = take_turns(module.SIZE, module.ways_of, 2, 2)  # type: ignore[attr-defined]
    assert comparison.first_loss[OURS] == pytest.approx(comparison.first_loss[STOCK], rel=1e-5)
    assert comparison.ratio > 0

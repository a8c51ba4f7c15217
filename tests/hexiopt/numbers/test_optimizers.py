"""What an optimizer keeps and moves: also one that keeps nothing."""

from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.optimizers import OptimizerKind
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem import workload
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from tests.models import TOY


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_optimizer_without_moments_is_priced(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain SGD reads and writes the master weight alone: 8 of 24 bytes, with 4 of weight and gradient. The model is so
    large that no step takes as long as a launch."""
    problem = Problem(
        Cluster.of({"a100_80gb_sxm": 2}, 25), replace(TOY, num_layers=4, ffn_size=2**20), workload.Workload(8, 128)
    )
    plan = Plan(tuple(Pipeline((Stage.of((d,), 0, 4),), 4) for d in (0, 1)), sharding=Sharding(zero))
    adam = PlanPricer(problem).price(plan).pipelines[0].stages[0].copies[0]
    monkeypatch.setattr(workload, "OPTIMIZERS", {"adam": OptimizerKind(0, 8, "no moments")})
    plain = replace(problem, workload=workload.Workload(8, 128))
    sgd = PlanPricer(plain).price(plan).pipelines[0].stages[0].copies[0]
    assert sgd.memory.optimizer == 0.0
    assert sgd.memory.master == adam.memory.master > 0.0
    assert adam.memory.total - sgd.memory.total == pytest.approx(adam.memory.optimizer)
    assert sgd.optimizer_s == pytest.approx(adam.optimizer_s * 12 / 28)

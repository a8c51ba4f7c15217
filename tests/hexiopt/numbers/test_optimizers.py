"""What an optimizer keeps and moves: also one that keeps nothing."""

from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.models import TOY


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_optimizer_without_states_is_priced(zero: int) -> None:
    """Plain SGD reads gradient and weight and writes the weight: 6 of 28 bytes. The model is so large that no step
    takes as long as a launch."""
    model = replace(TOY, num_layers=4, ffn_size=2**20)
    problem = Problem(Cluster.of({"a100_80gb_sxm": 2}, 25), model, Workload(8, 128))
    plan = Plan(tuple(Pipeline((Stage.of((d,), 0, 4),), 4) for d in (0, 1)), sharding=Sharding(zero))
    adam = PlanPricer(problem).price(plan).pipelines[0].stages[0].copies[0]
    plain = replace(problem, workload=Workload(8, 128, optimizer="sgd"))
    sgd = PlanPricer(plain).price(plan).pipelines[0].stages[0].copies[0]
    assert sgd.memory.optimizer == sgd.memory.master == 0.0
    assert adam.memory.total - sgd.memory.total == pytest.approx(adam.memory.optimizer + adam.memory.master)
    assert sgd.optimizer_s == pytest.approx(adam.optimizer_s * 6 / 28)

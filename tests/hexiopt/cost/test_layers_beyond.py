"""Plans with layers that the model lacks, or that some pipeline lacks, are refused in one line."""

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.cost.test_cost import PROBLEM


@pytest.mark.parametrize("sharding", [Sharding(0), Sharding(1), Sharding(1, "machine")])
def test_layers_beyond_the_model(sharding: Sharding) -> None:
    end = PROBLEM.model.num_layers + 1
    plan = Plan((Pipeline((Stage.of((0,), 0, end),), 4),), ONE_F_ONE_B, sharding)
    with pytest.raises(InputError, match=f"stage 0 has layers 0 to {end - 1}, the model has {end - 1}; choose"):
        PlanPricer(PROBLEM).price(plan)


def test_a_pipeline_without_the_last_layers() -> None:
    end = PROBLEM.model.num_layers
    pipelines = Pipeline((Stage.of((0,), 0, end),), 4), Pipeline((Stage.of((1,), 0, end - 1),), 4)
    with pytest.raises(InputError, match=rf"pipelines\[1\]: {end - 1} layers, where the first pipeline has {end};"):
        Plan(pipelines)

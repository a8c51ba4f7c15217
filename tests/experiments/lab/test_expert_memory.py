"""What layers with experts hold beside what is priced: of each type of models, and where ranks share experts."""

from itertools import product

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, StageParallelism, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.schedules.registry import GPIPE
from tests.experiments.lab.test_memory_use import check_saved
from tests.runtime.expert_plans import SHAPES, expert_model
from tests.runtime.memory_cases import compare, even_plan, measure, problem_of
from tests.slow import slow_but

SEQ_LEN, CLOSE = 64, 0.01
WIDTHS = {"hidden_size": 64, "inner": 48}
CELLS: dict[str, StageParallelism] = {
    "one replica": TensorParallel((0, 1), degree=2),
    "two replicas": TensorParallel((0, 1), degree=1),
    "uneven": ExpertParallel(
        (ExpertReplica((0,), 3, (2,)), ExpertReplica((1,), 1, (3,)), ExpertReplica((2,), 0, (1,))),
    ),
}
"""Stages whose ranks share six experts; in the last one, one rank hosts an expert and has no tokens."""


@pytest.mark.parametrize(
    ("model_type", "policy", "precision"),
    slow_but(
        [("qwen2_moe", "none", "bf16"), ("gpt_oss", "selective", "fp32")],
        list(product(SHAPES, RECOMPUTE_POLICIES, ("bf16", "fp32"))),
    ),
)
def test_layers_with_experts_hold_what_is_predicted(model_type: str, policy: str, precision: str) -> None:
    """On one rank, which gets every copy of its tokens. Of hybrids the last layer has the recurrence: the price takes
    what its backward makes to come when all layers are held, or a whole layer recomputed. Scores of attention with
    sinks and their exponentials, 64 MiB each at most, are not predicted: here all are held at once."""
    model, workload = expert_model(model_type, 3, **WIDTHS), Workload(2, SEQ_LEN, precision, routing="forced")
    (comparison,) = compare(even_plan(model, GPIPE, policy, stages=1, batches=2), model, workload)
    check_saved(comparison, close=0.03 if policy == "full" else CLOSE)
    attention = model.kinds[0].attention
    assert attention is not None
    scores_bytes = attention.sinks * 2 * attention.heads * SEQ_LEN**2 * 4
    assert -0.03 <= (comparison.predicted.tensors + scores_bytes) / comparison.peak_bytes - 1 <= 0.1


@pytest.mark.parametrize(
    ("model_type", "cell"),
    slow_but([("qwen2_moe", "uneven")], product(("qwen2_moe", "gpt_oss"), CELLS)),
)
def test_ranks_that_share_experts_hold_in_all_what_is_predicted(model_type: str, cell: str) -> None:
    """Routers send some ranks more than their part; together they hold as much as if they sent to all alike. Where
    ranks share key heads, attention with sinks makes no copies of them, which are predicted."""
    model, workload = expert_model(model_type, 2, **WIDTHS), Workload(4, SEQ_LEN, routing="forced")
    plan = Plan((Pipeline((Stage(CELLS[cell], ((0, 2),), ("none",)),), 1, 4),), GPIPE)
    (stage,) = PlanPricer(problem_of(plan, model, workload)).price(plan).pipelines[0].stages
    copies = [copy for executor in stage.executors for copy in executor.copies]
    ranks = zip(map(len, CELLS[cell].parameter_copies), copies, strict=True)
    predicted = sum(count * copy.memory.activations for count, copy in ranks)
    held = [use.parts.activations for _, use in measure(plan, model, workload)]
    assert predicted == pytest.approx(
        sum(held), rel=0.02 if (model_type, cell) == ("gpt_oss", "one replica") else CLOSE
    )

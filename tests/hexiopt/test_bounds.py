"""The lower bound: below every valid plan, and close to the best one where only layers take time."""

from dataclasses import replace

from hypothesis import given, settings

from hexiopt.bounds import lower_bound_s
from hexiopt.cluster_file import cluster_from_section
from hexiopt.cost.model import CostModel
from hexiopt.model import ModelSpec
from hexiopt.plan import Pipeline, Plan, Stage
from hexiopt.problem import Problem
from hexiopt.reading import Section
from hexiopt.workload import Workload
from tests.strategies import problems_with_plans

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=8,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=2816,
    vocab_size=10,
    max_positions=2048,
)


def two_kinds(**changes: object) -> Problem:
    cluster = cluster_from_section(
        Section(
            {
                "name": "two",
                "inter_machine": {"bandwidth_gb_per_s": 1000, "latency_us": 0},
                "machines": [
                    {"name": "a", "gpu": "a100_80gb_sxm", "num_gpus": 1},
                    {"name": "b", "gpu": "rtx_3090", "num_gpus": 1},
                ],
            },
            "test",
        )
    )
    return Problem(cluster, MODEL, Workload(seq_len=2048, **changes))  # type: ignore[arg-type]


@settings(max_examples=400, deadline=None)
@given(pair=problems_with_plans())
def test_no_plan_beats_the_bound(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = CostModel(problem)
    assert 0.0 < lower_bound_s(model) <= model.price(plan).pipeline_s


def test_a_huge_batch_approaches_the_bound() -> None:
    """Two GPUs as two pipelines, the batch split by their speed: only ends and the last steps remain."""
    gaps = []
    for global_batch in (100, 200_000):
        problem = two_kinds(global_batch=global_batch)
        model = CostModel(problem)
        sizes = problem.space.micro_batch_sizes(global_batch)
        best = []
        for device in (0, 1):
            site = model.site((device,))
            best.append(min((sum(model.layer_s(site, b, "none")) / b, b) for b in sizes))
        speeds = [1 / seconds for seconds, _ in best]
        first = round(global_batch * speeds[0] / sum(speeds) / 16) * 16
        pipelines = []
        for device, share, (_, size) in zip((0, 1), (first, global_batch - first), best, strict=True):
            while share % size:
                size //= 2
            pipelines.append(Pipeline((Stage.of((device,), 0, 8),), share // size, size))
        cost = model.price(Plan(tuple(pipelines)))
        gaps.append((cost.step_time_s - lower_bound_s(model)) / cost.step_time_s)
    assert 0 <= gaps[1] < gaps[0]
    assert gaps[1] < 0.02


def test_the_bound_falls_with_devices_and_rises_with_work() -> None:
    problem = two_kinds(global_batch=64)
    bound = lower_bound_s(CostModel(problem))
    fewer = replace(problem, space=replace(problem.space, exclude=("b",)))
    assert lower_bound_s(CostModel(fewer)) > bound
    assert lower_bound_s(CostModel(two_kinds(global_batch=128))) > 1.99 * bound
    forced = lower_bound_s(CostModel(two_kinds(global_batch=64, recompute="full")))
    assert forced > 1.2 * bound

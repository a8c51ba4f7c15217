"""The price of a plan: its parts, its kept intermediate results, and sums by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.cluster_file import cluster_from_section
from hexiopt.cost.collectives import ring_collective_s
from hexiopt.cost.compute import embedding_compute, head_compute, layer_compute, optimizer_compute_s
from hexiopt.cost.memory import in_flight
from hexiopt.cost.model import CostModel
from hexiopt.model import ModelSpec
from hexiopt.plan import Pipeline, Plan, Replica, Stage
from hexiopt.problem import Problem
from hexiopt.reading import Section
from hexiopt.workload import Workload
from tests.strategies import format_plans, plans, problems, problems_with_plans

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=6,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=2816,
    vocab_size=32_000,
    max_positions=2048,
)
CLUSTER = cluster_from_section(
    Section(
        {
            "name": "lab",
            "inter_machine": {"bandwidth_gb_per_s": 1.25},
            "machines": [
                {"name": "a", "gpu": "a100_80gb_sxm", "num_gpus": 2, "intra_bandwidth_gb_per_s": 100},
                {"name": "b", "gpu": "rtx_3090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 12},
            ],
        },
        "test",
    )
)
PROBLEM = Problem(CLUSTER, MODEL, Workload(global_batch=8, seq_len=2048))


@settings(max_examples=200, deadline=None)
@given(pair=problems_with_plans())
def test_parts_make_up_the_step(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    cost = CostModel(problem).price(plan)
    assert cost.gradient_sync_s >= 0.0
    assert cost.optimizer_s > 0.0
    assert cost.pipeline_s == max(p.end_s for p in cost.pipelines)
    assert cost.pipeline_s + cost.gradient_sync_s + cost.optimizer_s == pytest.approx(cost.step_time_s, rel=1e-12)
    if len(plan.pipelines) == 1 and not problem.model.tied_embeddings:
        assert cost.gradient_sync_s == 0.0
    work, model, cluster = problem.workload, problem.model, problem.cluster
    assert cost.tokens_per_s * cost.step_time_s == pytest.approx(work.tokens)
    flops = work.tokens * model.model_flops_per_token(work.seq_len)
    peaks = [cluster.gpu_of(d).peak_flops(work.precision) for d in range(cluster.num_devices)]
    assert cost.mfu == pytest.approx(flops / (cost.step_time_s * sum(peak or 0.0 for peak in peaks)))
    assert 0.0 < cost.mfu < 1.0
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        assert len(priced.stages) == len(pipeline.stages)
        assert len(priced.send_forward_s) == len(priced.send_backward_s) == len(pipeline.stages) - 1
        for stage, stage_cost in zip(pipeline.stages, priced.stages, strict=True):
            assert stage_cost.limit_bytes == cluster.gpu_of(stage.devices[0]).usable_memory_bytes
    excess = [s.memory.total - s.limit_bytes for p in cost.pipelines for s in p.stages]
    p, s = cost.binding_stage()
    assert cost.excess_bytes == max(excess) == cost.pipelines[p].stages[s].excess_bytes
    assert cost.fits == (max(excess) <= 0)
    assert cost.objective == (cost.step_time_s if cost.fits else math.inf)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_used_cost_model_prices_like_a_new_one(data: st.DataObject) -> None:
    """Nothing that it keeps between plans changes a price."""
    problem = data.draw(problems(max_batch=20))
    used = CostModel(problem)
    several = data.draw(st.lists(plans(problem), min_size=2, max_size=4))
    for plan in [*several, *several]:
        assert used.price(plan) == CostModel(problem).price(plan)


@settings(max_examples=60, deadline=None)
@given(pair=problems_with_plans(max_batch=20), data=st.data())
def test_the_order_of_pipelines_does_not_matter(pair: tuple[Problem, Plan], data: st.DataObject) -> None:
    problem, plan = pair
    shuffled = replace(plan, pipelines=tuple(data.draw(st.permutations(plan.pipelines))))
    one, other = CostModel(problem).price(plan), CostModel(problem).price(shuffled)
    assert other.step_time_s == pytest.approx(one.step_time_s, rel=1e-12)
    assert other.excess_bytes == pytest.approx(one.excess_bytes)


@settings(max_examples=60, deadline=None)
@given(pair=problems_with_plans(max_batch=20))
def test_recompute_costs_time_and_one_more_micro_batch_too(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = CostModel(problem)

    def with_policy(policy: str) -> Plan:
        return replace(
            plan,
            pipelines=tuple(
                replace(p, stages=tuple(replace(s, recompute=(policy,)) for s in p.stages)) for p in plan.pipelines
            ),
        )

    times = [model.price(with_policy(policy)).pipeline_s for policy in ("none", "selective", "full")]
    assert times == sorted(times)
    longer = tuple(replace(p, num_micro_batches=p.num_micro_batches + 1) for p in plan.pipelines)
    assert model.price(replace(plan, pipelines=longer)).pipeline_s > model.price(plan).pipeline_s


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_tp_stage_by_hand(policy: str) -> None:
    """Both A100s as one stage, eight micro-batches one after another."""
    work, gpu = PROBLEM.workload, CLUSTER.gpu_of(0)
    plan = Plan((Pipeline((Stage.of((0, 1), 0, 6, policy),), 8),))
    cost = CostModel(PROBLEM).price(plan)
    layer = layer_compute(MODEL, work, gpu, 2, 1)
    ends = [f(MODEL, work, gpu, 2, 1) for f in (embedding_compute, head_compute)]
    collective_s = ring_collective_s(2048 * 1024 * 2, 2, 100e9, 10e-6)
    forward_s = 6 * (layer.forward_s + 4 * collective_s) + sum(e.forward_s + collective_s for e in ends)
    again_s = {"none": 0.0, "selective": layer.attention_s, "full": layer.forward_s + 4 * collective_s}[policy]
    backward_s = 6 * (layer.backward_s + 6 * collective_s + again_s) + sum(e.backward_s + collective_s for e in ends)
    (stage,) = cost.pipelines[0].stages
    assert (stage.forward_s, stage.backward_s) == pytest.approx((forward_s, backward_s))
    assert cost.pipeline_s == pytest.approx(8 * (forward_s + backward_s))
    assert cost.gradient_sync_s == 0.0
    assert cost.optimizer_s == pytest.approx(optimizer_compute_s(work, gpu, stage.num_params))


def test_two_unequal_stages_by_hand() -> None:
    """A100 then RTX 3090 over 1.25 GB/s and 20 µs; GPipe: Σ + 7 · max, forward and back."""
    plan = Plan((Pipeline((Stage.of((0,), 0, 4), Stage.of((2,), 4, 6)), 8),), "gpipe")
    (priced,) = CostModel(PROBLEM).price(plan).pipelines
    hop_s = 2048 * 1024 * 2 / 1.25e9 + 20e-6
    assert (*priced.send_forward_s, *priced.send_backward_s) == pytest.approx((hop_s, hop_s))
    f, b = ([getattr(s, key) for s in priced.stages] for key in ("forward_s", "backward_s"))
    end_s = sum(f) + hop_s + 7 * max(*f, hop_s) + sum(b) + hop_s + 7 * max(*b, hop_s)
    assert priced.end_s == pytest.approx(end_s)


@settings(max_examples=100, deadline=None)
@given(pair=problems_with_plans())
def test_memory_is_that_of_the_position(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = CostModel(problem)
    cost = model.price(plan)
    shards = len(plan.pipelines) if plan.sharding.stage else 1
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        count = len(pipeline.stages)
        for k, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            memory = model.memory_model(model.site(stage.devices), pipeline.micro_batch_size)
            held = in_flight(plan.schedule, k, count, pipeline.num_micro_batches)
            assert stage_cost.memory == memory.stage(
                stage.num_layers, k == 0, k == count - 1, stage.policy, held, shards
            )


@settings(max_examples=100, deadline=None)
@given(plan=format_plans(CLUSTER))
def test_what_is_not_priced_is_refused_in_words(plan: Plan) -> None:
    from hexiopt.plan import unpriced

    feature = unpriced(plan)
    if feature is not None:
        with pytest.raises(ValueError, match="not priced yet") as caught:
            CostModel(PROBLEM).price(plan)
        assert feature in str(caught.value)


def test_every_unpriced_feature_has_its_word() -> None:
    from hexiopt.plan import SequenceGroup, SequenceLayout, Sharding, unpriced

    plain = Stage.of((0,), 0, 6)
    layout = SequenceLayout((SequenceGroup((0,), (2048,), (8,)),))

    def of(stage: Stage, **changes: object) -> str | None:
        return unpriced(replace(Plan((Pipeline((stage,), 8),)), **changes))  # type: ignore[arg-type]

    assert of(plain) is None
    assert of(plain, schedule="interleaved") == "the interleaved schedule"
    assert of(plain, sharding=Sharding(2)) == "sharding stage 2"
    assert "groups" in (of(plain, sharding=Sharding(1, "machine")) or "")
    assert of(replace(plain, replicas=(), sequence=layout)) == "a sequence layout"
    assert of(replace(plain, replicas=(Replica((0,), 1), Replica((1,), 1)))) == "a replicated stage"
    assert of(replace(plain, replicas=(Replica((0, 1), None, (5, 3)),))) == "stated heads"
    assert of(replace(plain, layers=((0, 3), (3, 6)))) == "a stage of several layer ranges"
    assert of(replace(plain, recompute=("none", "full"))) == "a recompute policy per layer"

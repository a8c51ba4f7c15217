"""The price of a plan: its parts, its kept intermediate results, and sums by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.compute import embedding_compute, head_compute, layer_compute, optimizer_compute_s
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers import coefficients as c
from hexiopt.plan.parallelism import Replica, Replicated, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage, feature_without_price
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from tests.alone import Alone
from tests.models import TINY
from tests.strategies import format_plans, plans, problems, problems_with_plans, roomy_problems_with_plans

MODEL = replace(TINY, name="m", num_layers=6, vocab_size=32_000, max_positions=2048)
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


@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_parts_make_up_the_step(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    cost = PlanPricer(problem).price(plan)
    assert cost.gradient_sync_s >= 0.0
    assert cost.optimizer_s > 0.0
    assert cost.pipeline_s == max(p.end_s for p in cost.pipelines)
    assert cost.pipeline_s + cost.gradient_sync_s + cost.optimizer_s == pytest.approx(cost.step_time_s, rel=1e-12)
    copies = max(sum(len(stage.parallelism.replicas) for stage in p.stages) - len(p.stages) for p in plan.pipelines)
    if len(plan.pipelines) == 1 and not problem.model.tied_embeddings and not copies:
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
            limits = [cluster.gpu_of(replica.devices[0]).usable_memory_bytes for replica in stage.parallelism.replicas]
            assert [executor.limit_bytes for executor in stage_cost.executors] == limits
            assert stage_cost.limit_bytes in limits
    excess = [
        executor.memory.total - executor.limit_bytes
        for p in cost.pipelines
        for s in p.stages
        for executor in s.executors
    ]
    p, s = cost.binding_stage()
    assert cost.excess_bytes == max(excess) == cost.pipelines[p].stages[s].excess_bytes
    assert cost.fits == (max(excess) <= 0)
    assert cost.objective == (cost.step_time_s if cost.fits else math.inf)


@given(data=st.data())
def test_a_used_cost_model_prices_like_a_new_one(data: st.DataObject) -> None:
    """Nothing that it keeps between plans changes a price."""
    problem = data.draw(problems(max_batch=20))
    used = PlanPricer(problem)
    several = data.draw(st.lists(plans(problem), min_size=2, max_size=4))
    for plan in [*several, *several]:
        assert used.price(plan) == PlanPricer(problem).price(plan)


@given(pair=problems_with_plans(max_batch=20))
def test_recompute_costs_time_and_one_more_micro_batch_too(pair: tuple[Problem, Plan]) -> None:
    """While messages go alone: where they share the network, one that starts later may meet fewer."""
    problem, plan = pair
    model = PlanPricer(problem, network=Alone())

    def with_policy(policy: str) -> Plan:
        return replace(
            plan,
            pipelines=tuple(
                replace(p, stages=tuple(replace(s, recompute=(policy,)) for s in p.stages)) for p in plan.pipelines
            ),
        )

    times = [model.price(with_policy(policy)).pipeline_s for policy in ("none", "selective", "full")]
    assert times == sorted(times)
    longer = tuple(
        replace(p, num_micro_batches=p.num_micro_batches + (len(p.stages) if p.num_chunks > 1 else 1))
        for p in plan.pipelines
    )
    assert model.price(replace(plan, pipelines=longer)).pipeline_s > model.price(plan).pipeline_s


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_tp_stage_by_hand(policy: str) -> None:
    """Both A100s as one stage, eight micro-batches one after another."""
    work, gpu = PROBLEM.workload, CLUSTER.gpu_of(0)
    plan = Plan((Pipeline((Stage.of((0, 1), 0, 6, policy),), 8),))
    cost = PlanPricer(PROBLEM).price(plan)
    layer = layer_compute(MODEL.layer, work, gpu, 2, 1)
    ends = [f(MODEL, work, gpu, 2, 1) for f in (embedding_compute, head_compute)]
    collective_s = ring_collective_s(2048 * 1024 * 2, 2, 100e9, 10e-6)
    forward_s = 6 * (layer.forward_s + 4 * collective_s) + sum(e.forward_s + collective_s for e in ends)
    recompute_s = {"none": 0.0, "selective": layer.attention_s, "full": layer.forward_s + 4 * collective_s}[policy]
    backward_s = 6 * (layer.backward_s + 6 * collective_s + recompute_s) + sum(
        e.backward_s + collective_s for e in ends
    )
    (stage,) = cost.pipelines[0].stages
    assert (stage.forward_s, stage.backward_s) == pytest.approx((forward_s, backward_s))
    assert cost.pipeline_s == pytest.approx(8 * (forward_s + backward_s))
    assert cost.gradient_sync_s == 0.0
    assert cost.optimizer_s == pytest.approx(optimizer_compute_s(work, gpu, stage.num_params))


def test_two_unequal_stages_by_hand() -> None:
    """A100 then RTX 3090 over 1.25 GB/s and 20 µs; GPipe: Σ + 7 · max, forward and back."""
    plan = Plan((Pipeline((Stage.of((0,), 0, 4), Stage.of((2,), 4, 6)), 8),), GPIPE)
    (priced,) = PlanPricer(PROBLEM).price(plan).pipelines
    message_s = 2048 * 1024 * 2 / 1.25e9 + 20e-6
    assert (*priced.send_forward_s, *priced.send_backward_s) == pytest.approx((message_s, message_s))
    f, b = ([getattr(s, key) for s in priced.stages] for key in ("forward_s", "backward_s"))
    end_s = sum(f) + message_s + 7 * max(*f, message_s) + sum(b) + message_s + 7 * max(*b, message_s)
    assert priced.end_s == pytest.approx(end_s)


@given(pair=problems_with_plans(plain=True))
def test_memory_is_that_of_the_position(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    copies = len(plan.pipelines) + sum(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    spread = plan.sharding.stage == 1 and problem.model.tied_embeddings and problem.workload.adapters is None
    shards = StateSharding(plan.sharding.stage, len(plan.pipelines), copies if spread else None)
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        count = len(pipeline.stages)
        for k, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            memory = model.stages.memory_model(model.tp_group(stage.devices), pipeline.micro_batch_size)
            held = in_flight(plan.schedule, StagePosition(k, count, pipeline.num_micro_batches))
            alone = memory.stage(stage.num_layers, k == 0, k == count - 1, stage.policy, held, shards)
            assert stage_cost.memory.communicators >= alone.communicators
            assert replace(stage_cost.memory, communicators=alone.communicators) == alone


def test_a_replica_takes_its_samples_and_its_own_gpu() -> None:
    """An A100 with three samples of four beside an RTX 3090 with one, before an A100 with all; messages by samples."""
    replicas = (Replica((0,), 3), Replica((2,), 1))
    stages = (Stage.of_replicas(replicas, ((0, 4),), ("none", "full", "full", "selective")), Stage.of((1,), 4, 6))
    model = PlanPricer(PROBLEM)
    cost = model.price(Plan((Pipeline(stages, 2, 4),), ONE_F_ONE_B, Sharding(1)))
    (priced,) = cost.pipelines
    for devices, samples, executor_cost in (
        ((0,), 3, priced.stages[0].executors[0]),
        ((2,), 1, priced.stages[0].executors[1]),
    ):
        tp_group = model.tp_group(devices)
        embedding, _ = model.stages.ends_s(tp_group, samples)
        times = [model.stages.layer_s(tp_group, samples, policy) for policy in ("none", "full", "full", "selective")]
        assert executor_cost.forward_s == pytest.approx(sum(f for f, _ in times) + embedding.forward_s)
        assert executor_cost.backward_s == pytest.approx(sum(b for _, b in times) + embedding.backward_s)
        assert executor_cost.limit_bytes == tp_group.gpu.usable_memory_bytes
    # Two holders of the first four layers and the embedding, one of the rest.
    work = PROBLEM.workload
    first, last = priced.stages
    assert [executor.memory.optimizer for executor in first.executors] == [8 * first.num_params / 2] * 2
    assert last.memory.optimizer == 8 * last.num_params
    assert (
        first.memory
        == max((executor for executor in first.executors), key=lambda executor: executor.excess_bytes).memory
    )
    # Both A100s share a machine and its ports; the RTX 3090's message crosses the network.
    sample_bytes = work.seq_len * MODEL.hidden_size * work.element_bytes
    timed = zip(priced.messages, priced.message_s, strict=True)
    seconds = {(message.backward, message.sender, message.receiver): message_s for message, message_s in timed}
    inside_s, outside_s = 3 * sample_bytes / 100e9 + 10e-6, sample_bytes / 1.25e9 + 20e-6
    assert seconds == pytest.approx(
        {(False, 0, 0): inside_s, (True, 0, 0): inside_s, (False, 1, 0): outside_s, (True, 0, 1): outside_s}
    )
    assert cost.gradient_sync_s > 0.0


def test_interleaved_stages_hold_the_ends_with_their_first_and_last_range() -> None:
    """Embedding with the first range of the first stage, head with the last of the last; in all, what 1F1B takes."""
    of = replace(PROBLEM, workload=replace(PROBLEM.workload, recompute="none"))
    model = PlanPricer(of)
    ranges = (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    woven = tuple(Stage(TensorParallel((s,)), layers) for s, layers in enumerate(ranges))
    plain = (Stage.of((0,), 0, 4), Stage.of((1,), 4, 6))
    (interleaved_cost,) = model.price(Plan((Pipeline(woven, 8),), INTERLEAVED)).pipelines
    (plain_cost,) = model.price(Plan((Pipeline(plain, 8),), INTERLEAVED)).pipelines
    for a, b in zip(interleaved_cost.stages, plain_cost.stages, strict=True):
        assert (a.forward_s, a.backward_s) == pytest.approx((b.forward_s, b.backward_s))
        assert a.memory.weights == b.memory.weights
    tp_group = model.tp_group((0,))
    layer = model.stages.layer_s(tp_group, 1, "none")
    embedding, head = model.stages.ends_s(tp_group, 1)
    assert interleaved_cost.stages[0].chunk_s[0][0] == pytest.approx(2 * layer[0] + embedding.forward_s)
    assert interleaved_cost.stages[0].chunk_s[1] == pytest.approx((2 * layer[0], 2 * layer[1]))
    assert interleaved_cost.stages[1].chunk_s[0] == pytest.approx(layer)
    assert interleaved_cost.stages[1].chunk_s[1][1] == pytest.approx(layer[1] + head.backward_s)
    wraps = {(link.backward, link.stage) for link in interleaved_cost.messages}
    assert wraps == {(False, 0), (True, 1), (False, 1), (True, 0)}
    # The first stage has begun 2·2 − 2 + 2 + 1 forwards of ranges of two layers, 1F1B two of four layers.
    tokens = of.workload.seq_len * c.TOKEN_ID_BYTES
    of_layers = (
        interleaved_cost.stages[0].memory.activations - 4 * tokens,
        plain_cost.stages[0].memory.activations - 2 * tokens,
    )
    assert of_layers[0] / of_layers[1] == pytest.approx(5 * 2 / (2 * 4))


@given(pair=roomy_problems_with_plans())
def test_replicas_spread_optimizer_states_over_all_holders(pair: tuple[Problem, Plan]) -> None:
    """Σ over a replica's layers of parameters over holders; in all, every layer's states once or (by TP) more."""
    problem, plan = pair
    plan = replace(plan, sharding=Sharding(1))
    model = PlanPricer(problem)
    cost = model.price(plan)
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        for s, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            ends = s == 0, s == len(pipeline.stages) - 1
            for replica, executor in zip(stage.parallelism.replicas, stage_cost.executors, strict=True):
                memory = model.stages.memory_model(model.tp_group(replica.devices), 1)
                held = [layer for first, end in stage.layers for layer in range(first, end)]
                expected = sum(memory.num_params(1, False, False) / num_holders(plan, layer) for layer in held)
                tail = memory.num_params(0, *ends) - memory.num_params(0, ends[0], False)
                expected += (memory.num_params(0, ends[0], False)) / num_holders(plan, 0)
                expected += tail / num_holders(plan, problem.model.num_layers - 1)
                if any(ends):  # a tied matrix is spread over both ends
                    of_end = num_holders(plan, 0 if ends[0] else problem.model.num_layers - 1)
                    expected += memory.rank_states.params.tied * (1 / num_ends(plan) - 1 / of_end)
                assert executor.memory.optimizer == pytest.approx(8 * expected)


def num_holders(plan: Plan, layer: int) -> int:
    """Replicas of all pipelines that hold a layer."""
    return sum(
        len(stage.parallelism.replicas)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if any(first <= layer < end for first, end in stage.layers)
    )


def num_ends(plan: Plan) -> int:
    """Replicas of all pipelines that hold the first or the last layer."""
    ends = [{id(stage): stage for stage in (pipeline.stages[0], pipeline.stages[-1])} for pipeline in plan.pipelines]
    return sum(len(stage.parallelism.replicas) for stages in ends for stage in stages.values())


@given(plan=format_plans(CLUSTER, max_layers=MODEL.num_layers))
def test_what_is_not_priced_is_refused_in_words(plan: Plan) -> None:
    assume(
        not any(
            isinstance(stage.parallelism, SequenceParallel) for pipeline in plan.pipelines for stage in pipeline.stages
        )
    )  # of other lengths
    features = [feature for pipeline in plan.pipelines if (feature := feature_without_price(pipeline))]
    if features:
        with pytest.raises(InputError, match="not priced yet; leave out") as caught:
            PlanPricer(PROBLEM).price(plan)
        assert str(caught.value) == features[0]


def test_only_stated_heads_are_not_priced() -> None:
    layout = SequenceParallel((SequenceGroup((0,), (2048,), (8,)),))
    for parallelism in (TensorParallel((0,)), layout, Replicated((Replica((0,), 1),))):
        assert feature_without_price(Pipeline((Stage(parallelism, ((0, 6),)),), 8)) is None
    stated = Pipeline((Stage.of((2,), 0, 3), Stage(TensorParallel((0, 1), (5, 3)), ((3, 6),))), 8)
    assert (
        feature_without_price(stated)
        == "stage 1 states the heads of a TP group, which are not priced yet; leave out `heads`"
    )

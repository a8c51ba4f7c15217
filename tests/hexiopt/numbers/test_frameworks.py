"""What frameworks do differently, one difference at a time, against the default."""

from dataclasses import replace
from typing import Any

import pytest

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.frameworks import Framework, default_framework, frameworks
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=8,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_size=5504,
    vocab_size=32000,
    max_positions=4096,
)


def cluster() -> Cluster:
    data = {
        "name": "two",
        "inter_machine": {"bandwidth_gb_per_s": 12.5},
        "machines": [
            {"name": "a", "gpu": "a100_80gb_sxm", "num_gpus": 2, "intra_bandwidth_gb_per_s": 200, "count": 2},
        ],
    }
    return cluster_from_section(Section(data, "test"))


PROBLEM = Problem(cluster(), MODEL, Workload(global_batch=16, seq_len=2048))


def price(policy: str = "none", zero: int = 0, tp: int = 2, **changes: Any) -> Cost:
    framework: Framework = replace(default_framework(), **{"layer_host_s": 0.0} | changes)
    groups = [(0, 1), (2, 3)] if tp == 2 else [(0,), (2,)]
    plan = Plan(tuple(Pipeline((Stage.of(g, 0, 8, policy),), 8) for g in groups), ONE_F_ONE_B, Sharding(zero))
    return PlanPricer(PROBLEM, framework).price(plan)


def busy(cost: Cost) -> tuple[float, float]:
    (stage,) = cost.pipelines[0].stages
    return stage.forward_s, stage.backward_s


def test_element_wise_traffic_and_attention_take_their_time() -> None:
    plain, slow = busy(price()), busy(price(memory_traffic=4.0))
    assert slow[0] > plain[0]
    assert slow[1] > plain[1]
    assert busy(price(attention_speed=0.5))[0] > plain[0]


def test_without_sequence_parallelism_norms_are_whole_and_the_backward_gathers_less() -> None:
    both = price(), price(sequence_parallel=False)
    assert busy(both[1])[0] > busy(both[0])[0]
    alone = price(tp=1), price(tp=1, sequence_parallel=False)
    assert busy(alone[0]) == busy(alone[1])


def test_hidden_collectives_cost_their_exposed_share() -> None:
    none, half, all_of = (busy(price(tp_exposed=share))[0] for share in (0.0, 0.5, 1.0))
    assert half - none == pytest.approx(all_of - half)
    assert none < half


def test_copies_of_gathered_activations_cost_memory_traffic_on_several_ranks_alone() -> None:
    plain, once, twice = (busy(price(tp_copies=n)) for n in (0, 1, 2))
    gpu = PROBLEM.cluster.machines[0].gpu
    message_bytes = 2048 * MODEL.hidden_size * 2
    copy_s = 2 * message_bytes / (gpu.hbm_bytes_per_s * gpu.efficiency.memory_max)
    # Four collectives in a layer's forward, six in its backward; one each way at either end of the model.
    assert once[0] - plain[0] == pytest.approx((8 * 4 + 2) * copy_s)
    assert once[1] - plain[1] == pytest.approx((8 * 6 + 2) * copy_s)
    assert twice[0] - once[0] == pytest.approx(once[0] - plain[0])
    assert busy(price(tp=1, tp_copies=1)) == busy(price(tp=1))


def test_full_recompute_may_leave_out_the_last_product() -> None:
    early, whole = (busy(price("full", recompute_stops_early=flag))[1] for flag in (True, False))
    assert early < whole
    assert busy(price("none"))[1] == busy(price("none", recompute_stops_early=True))[1]


def test_the_host_is_a_floor_of_each_layer() -> None:
    slow = busy(price(layer_host_s=1.0))
    assert slow[0] == pytest.approx(8.0, rel=0.05)
    assert slow[1] == pytest.approx(8.0, rel=0.05)
    assert busy(price(layer_host_s=1e-9)) == busy(price(layer_host_s=0.0))
    again = busy(price("full", layer_host_s=1.0))
    assert again[1] == pytest.approx(16.0, rel=0.05), "what is recomputed is issued once more"


def test_overlap_hides_sync_beside_the_last_backward_but_for_its_end() -> None:
    plain, hidden = price(gradient_sums="after"), price(gradient_sums="beside")
    assert 0 < hidden.gradient_sync_s < plain.gradient_sync_s
    assert hidden.gradient_sync_s >= plain.gradient_sync_s - busy(plain)[1] - 1e-12
    sharded, gathered = (price(zero=1, weight_gathers=when) for when in ("after", "beside"))
    assert gathered.optimizer_s < sharded.optimizer_s
    assert gathered.gradient_sync_s == sharded.gradient_sync_s
    # Part by part, what the last part makes follows: an eighth of the layers' gradients, or the embedding's.
    by_part = price(gradient_sums="by_part")
    whole = MODEL.embedding_params / (8 * MODEL.layer_params + MODEL.embedding_params + MODEL.head_params)
    assert by_part.gradient_sync_s >= whole * plain.gradient_sync_s * (1 - 1e-9)
    assert by_part.gradient_sync_s >= plain.gradient_sync_s - busy(plain)[1] - 1e-12


def test_contention_slows_lockstep_alone() -> None:
    assert price(zero=3, contention=0.5).step_time_s > price(zero=3).step_time_s
    assert price(zero=1, contention=0.5).step_time_s == price(zero=1).step_time_s


def test_holders_of_shards_cost_a_message_each() -> None:
    assert price(zero=1, holder_s=0.1).step_time_s == pytest.approx(price(zero=1).step_time_s + 0.2)
    assert price(zero=0, holder_s=0.1).step_time_s == price(zero=0).step_time_s


def test_all_frameworks_price() -> None:
    for framework in frameworks().values():
        plan = Plan((Pipeline((Stage.of((0, 1), 0, 8),), 8), Pipeline((Stage.of((2, 3), 0, 8),), 8)))
        assert PlanPricer(PROBLEM, framework).price(plan).step_time_s > 0

"""Who holds which experts, and what a cell does together; what of it is refused."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.exports import trainable
from hexiopt.exports.trainable import untrainable
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.kinds import Dense, Experts, LayerKind
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.actions import check_actions, rank_actions
from runtime.mapping.buckets import bucket_parts
from runtime.mapping.layout import layout_of
from runtime.mapping.lowering import Action, ActionKind
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import ExpertCell
from tests.runtime.expert_plans import COUNT, SHAPES, expert_model, random_expert_plan
from tests.runtime.ranks import CLUSTER

SEQ_LEN = 7
TYPES = tuple(SHAPES)
# Three ranks with samples, the last one of them first in the plan, and one with experts alone.
SHARED = ExpertParallel((ExpertReplica((3,), 1, (2,)), ExpertReplica((0, 1), 1, (1, 0)), ExpertReplica((2,), 0, (3,))))


def one_stage(group: Any, size: int = 2, num_layers: int = 2) -> Plan:
    return Plan((Pipeline((Stage(group, ((0, num_layers),), ("none",)),), 2, size),), ONE_F_ONE_B)


@given(st.permutations(range(4)), st.integers(1, 9), st.data())
def test_the_first_device_has_the_first_experts(order: list[int], total: int, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.integers(0, total)) for _ in range(3))
    counts = [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]
    ranges = ExpertCell.of(order, counts).experts(total)
    at = 0
    for rank, count in zip(order, counts, strict=True):
        assert ranges[rank] == (at, at + count)
        at += count
    even = ExpertCell.of(order).experts(total)
    sizes = [even[rank][1] - even[rank][0] for rank in order]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_held_once_by_each_pipeline(seed: int) -> None:
    """Of experts; of all else by each replica, or key-value heads by several ranks, and by no device of experts
    alone."""
    plan, model, _ = random_expert_plan(random.Random(seed), TYPES[seed % len(TYPES)])
    layout = layout_of(plan, model, CLUSTER)
    covered = Counter[str]()
    for held in layout.held:
        for part in held.parts:
            covered[part.name] += part.end - part.start
            pipelines = [layout.executor_of[rank].pipeline for rank in held.ranks]
            assert set(pipelines) == set(range(len(layout.lines)))
            if ".experts." in part.name:  # of each cell one rank holds it
                cells = {executor.cell.ranks for executor in layout.executor_of if executor.cell is not None}
                assert all(len(set(ranks) & set(held.ranks)) <= 1 for ranks in cells)
            hosts = [rank for rank in held.ranks if not layout.executor_of[rank].num_samples]
            assert not hosts or ".experts." in part.name
    assert covered == {part.name: part.shape[part.dim] for part in whole_parts(model)}


def test_experts_alone_are_executors_without_samples() -> None:
    layout = layout_of(one_stage(SHARED), expert_model("mixtral", 2))
    assert [executor.ranks for executor in layout.executor_of] == [(0, 1), (0, 1), (2,), (3,)]
    assert [executor.samples for executor in layout.executor_of] == [(1, 2), (1, 2), (2, 2), (0, 1)]
    assert {executor.together for executor in layout.executor_of} == {(0, 1, 2, 3)}
    assert (0, 1, 2, 3) in layout.groups()
    shards = [shard for executor in layout.lines[0].stages[0] for shard in executor.shards]
    assert sorted(shard.experts(COUNT) for shard in shards) == [(0, 2), (2, 3), (3, 3), (3, 6)]


def test_a_cell_runs_its_operations_in_one_order() -> None:
    """One rank that takes a forward before a backward of the others would wait in its exchange for ever."""
    plan, model = one_stage(SHARED), expert_model("mixtral", 2)
    layout = layout_of(plan, model)
    lists = list(rank_actions(layout, plan.schedule, model, SEQ_LEN, bucket_parts(layout.held, 0)))
    check_actions(layout, SEQ_LEN, lists)
    forwards = [
        k for k, action in enumerate(lists[2]) if isinstance(action, Action) and action.kind is ActionKind.FORWARD
    ]
    moved = list(lists[2])
    moved[forwards[0]], moved[forwards[1]] = moved[forwards[1]], moved[forwards[0]]
    lists[2] = tuple(moved)
    with pytest.raises(InputError, match="a step would hang: rank 0 waits in 0F0 of pipeline 0 for rank 2"):
        check_actions(layout, SEQ_LEN, lists)


MIXTRAL = expert_model("mixtral", 2)


@pytest.fixture
def as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models have no whole config.json."""
    monkeypatch.setattr(trainable, "_is_as_read", lambda model: True)


def with_layers(*kinds: LayerKind) -> ModelSpec:
    return MIXTRAL.replace(layers=kinds)


(KIND,) = set(MIXTRAL.layers)


@pytest.mark.parametrize(
    ("model", "workload", "plan", "line"),
    [
        (MIXTRAL, {}, one_stage(SHARED), None),
        (MIXTRAL, {"training": "lora"}, one_stage(SHARED), None),
        (
            MIXTRAL,
            {"optimizer": "muon"},
            None,
            "workload.optimizer: muon cannot be trained yet beside experts, only planned; take adamw",
        ),
        (
            MIXTRAL,
            {"routing": "forced"},
            None,
            "workload.routing: forced cannot be trained, only planned; take natural",
        ),
        (
            MIXTRAL,
            {},
            one_stage(ExpertParallel((ExpertReplica((0,), 2, (6,)),), 2)),
            "stage 0 of pipeline 0 has two waves, which cannot be trained, only planned; state one in the plan",
        ),
        (
            with_layers(KIND.with_experts(Experts(count=4, top_k=2, ffn_size=5)), KIND),
            {},
            None,
            "model mixtral: layers of 4 and 6 experts cannot be trained together; give all equally many",
        ),
        (with_layers(replace(KIND, channels=(Dense(ffn_size=5), *KIND.channels)), KIND), {}, None, None),
        (
            with_layers(KIND.with_experts(Experts(count=6, top_k=2, ffn_size=5, router_vectors=1)), KIND),
            {},
            None,
            "model mixtral: scales of a router's input or of experts cannot be trained, only planned; take a model "
            "without",
        ),
    ],
)
@pytest.mark.usefixtures("as_read")
def test_what_experts_cannot_be_trained_with_is_said(
    model: ModelSpec, workload: dict[str, Any], plan: Plan | None, line: str | None
) -> None:
    assert untrainable(model, Workload(4, SEQ_LEN, **workload), plan) == line


@pytest.mark.usefixtures("as_read")
def test_routers_choose_of_whole_groups() -> None:
    model = expert_model("deepseek_v3", 2)

    def refusal(**router: int) -> str | None:
        keys = tuple((dict(model.router) | router).items())
        return untrainable(model.replace(router=keys), Workload(4, SEQ_LEN), None)

    assert refusal() is None
    assert refusal(n_group=4) == "model deepseek_v3: 6 experts are not 4 equal groups; state another n_group"
    few = "model deepseek_v3: 2 experts are not among 1 of 6 groups of 1; state another topk_group"
    assert refusal(n_group=6, topk_group=1) == few

"""Layers recomputed together: what they store and take, in which plans they may be, and which files have them."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import MemoryModel
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import write_program
from hexiopt.exports.layout import BlockRecompute
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.plan_file import read_plan, write_plan
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import catalogue
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, recompute_groups
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.report.facts import PlanFacts
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget, Capabilities
from hexiopt.solving.referee import Refereed
from hexiopt.solving.result import Result, Status
from tests.strategies import layer_policies, models, workloads

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=12,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=2816,
    vocab_size=32000,
    max_positions=4096,
)
CLUSTER = Cluster.of({"a100_80gb_sxm": 4}, inter_gb_per_s=25, gpus_per_machine=4, name="c")
PROBLEM = Problem(CLUSTER, MODEL, Workload(16, 2048))
BY_3 = ("full", "joined", "joined") * 2
BY_2 = ("full", "joined") * 3
ALONE = ("full",) * 6


def two_stages(*policies: tuple[str, ...], zero: int = 1) -> Plan:
    first, last = (Stage(TensorParallel((s,)), ((6 * s, 6 * s + 6),), policies[s]) for s in (0, 1))
    return Plan((Pipeline((first, last), 16),), ONE_F_ONE_B, Sharding(zero))


@given(models(), workloads(), st.sampled_from((1, 2)), st.integers(1, 5), st.data())
def test_a_backward_holds_what_counting_says(
    model: ModelSpec, workload: Workload, tp: int, held: int, data: st.DataObject
) -> None:
    """An independent count: forwards store what layers keep; then, of one micro-batch, group by group from the last, a
    group's forward runs again and keeps everything until its backward has gone through. The model takes the worst of
    these moments, as if all that was stored were still there."""
    policies = data.draw(layer_policies(RECOMPUTE_POLICIES, [data.draw(st.integers(1, 7))]))
    memory = MemoryModel(model, workload, catalogue()["a100_80gb_sxm"], tp, 1)
    activations = memory.activations
    groups: list[list[str]] = []
    for policy in policies:
        if policy == "joined":
            groups[-1].append(policy)
        else:
            groups.append([policy])
    stored, again = 0.0, 0.0
    for group in groups:
        if group[0] == "full":
            stored += activations.layer_input
            again = max(again, len(group) * (activations.layer + activations.internals) - activations.layer_input)
        else:
            stored += activations.layer + (activations.internals if group[0] == "none" else 0.0)
            again = max(again, activations.internals if group[0] == "selective" else 0.0)
    stage_memory = memory.stage_of_layers(policies, False, False, holding(held))
    assert stage_memory.activations == pytest.approx(held * stored + again)
    assert recompute_groups(policies) == list(map(len, groups))


def test_groups_trade_what_is_stored_for_what_is_recomputed_at_once() -> None:
    """Of the first stage two micro-batches are in flight; only one group is recomputed at a time."""
    held = [
        PlanPricer(PROBLEM).price(two_stages(policies, policies)).pipelines[0].stages[0].memory.activations
        for policies in (ALONE, BY_2, BY_3)
    ]
    layer_input = 2048 * 1024 * 2
    memory = PlanPricer(PROBLEM).stages.memory_model(PlanPricer(PROBLEM).tp_group((0,)), 1)
    whole = memory.layer_activation_bytes("none")
    assert held[1] - held[0] == pytest.approx(whole - 2 * 3 * layer_input)
    assert held[2] - held[0] == pytest.approx(2 * whole - 2 * 4 * layer_input)


def test_time_is_that_of_full_recompute() -> None:
    """All of a group's layers run again; a framework that stops early does so once a group."""
    for framework, stops in ((default_framework(), 6), (replace(default_framework(), recompute_stops_early=True), 2)):
        pricer = PlanPricer(PROBLEM, framework)
        alone, by_3, none = (
            pricer.price(two_stages(policies, policies)).pipelines[0].stages[0]
            for policies in (ALONE, BY_3, ("none",) * 6)
        )
        forward_s = none.forward_s - pricer.stages.ends_s(pricer.tp_group((0,)), 1)[0].forward_s
        saved_s = (forward_s - (alone.backward_s - none.backward_s)) / 6  # of a layer that stops early
        assert (saved_s > 1e-9) == framework.recompute_stops_early
        assert by_3.forward_s == alone.forward_s
        assert by_3.backward_s - none.backward_s == pytest.approx(forward_s - stops * saved_s, rel=1e-6)


def test_files_and_reports_have_them(tmp_path: Path) -> None:
    plan = two_stages(BY_3, ("full", "joined", "none", "full", "joined", "joined"))
    cost = PlanPricer(PROBLEM).price(plan)
    write_plan(tmp_path / "plan.json", PROBLEM, plan, cost, {})
    assert read_plan(tmp_path / "plan.json").plan == plan
    first, last = PlanFacts(PROBLEM, plan, cost).stages(0)
    assert (first.recompute, last.recompute) == ("full by 3", "2 full, 3 joined, 1 none")


@pytest.mark.parametrize(
    ("layers", "policies", "message"),
    [
        (((0, 2),), ("joined", "full"), "layer 0 is joined to no layer"),
        (((0, 2), (4, 6)), ("full", "full", "joined", "joined"), "layer 4 is joined to no layer"),
        (((3, 5),), ("none", "joined"), "layer 4 is joined to 'none'"),
        (((3, 5),), ("selective", "joined"), "layer 4 is joined to 'selective'"),
        (((3, 5),), ("joined",), "layer 3 is joined to no layer"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    layers: tuple[tuple[int, int], ...], policies: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=f"{message}; join a layer to one of its range that is full or joined itself"):
        Stage(TensorParallel((0,)), layers, policies)


def test_rules_of_problems() -> None:
    plan = two_stages(BY_3, BY_3)
    assert check(PROBLEM, plan) == []
    assert check(replace(PROBLEM, workload=Workload(16, 2048, recompute="full")), plan) == []
    broken = {
        "recompute": Problem(CLUSTER, MODEL, Workload(16, 2048, recompute="none")),
        "space.recompute_per_layer": replace(PROBLEM, space=Space(recompute_per_layer=False)),
    }
    for rule, problem in broken.items():
        assert rule in [violation.rule for violation in check(problem, plan)]
    with pytest.raises(InputError, match="ZeRO-2 over layers recomputed together; recompute each by itself"):
        two_stages(BY_3, BY_3, zero=2)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_express_equal_groups_or_refuse(name: str) -> None:
    even, uneven = two_stages(BY_3, BY_3), two_stages(BY_3, BY_2)
    trainer = TRAINERS[name]
    if name not in ("hexiopt", "megatron", "megatron_bridge", "flagscale"):
        if trainer.unsuitable(PROBLEM) is None:
            with pytest.raises(InputError, match=f"{name} recomputes each layer by itself"):
                write_program(PROBLEM, even, trainer)
        return
    text = "\n".join(write_program(PROBLEM, even, trainer).files.values())
    if name == "hexiopt":
        return
    setting = "recompute-num-layers 3" if name != "megatron_bridge" else "model.recompute_num_layers=3"
    assert setting in text
    with pytest.raises(InputError, match=r"groups|not full of its first layers"):
        write_program(PROBLEM, uneven, trainer)


def test_groups_begin_anew_in_every_range() -> None:
    """As Megatron-Core's transformer blocks do, of which a stage has one for each of its ranges."""
    policies = BlockRecompute("full", together=2).of(((0, 4), (8, 12)))
    assert policies == ("full", "joined") * 4
    assert BlockRecompute("full", together=5).of(((0, 2), (8, 10))) == ("full", "joined", "full", "joined")


class Slow:
    """A solver of one plan, with a bound that holds for plans of its kind."""

    name = "slow"
    capabilities = Capabilities()

    def solve(self, problem: Problem, budget: Budget, *, start: Plan | None = None, **_: object) -> Result:
        assert start is None
        plan = two_stages(ALONE, ALONE)
        cost = PlanPricer(problem).price(plan)
        return Result("slow", Status.OPTIMAL, 0, 0.0, 1, plan, cost, bound_s=cost.step_time_s)


def test_no_bound_speaks_of_them() -> None:
    """A start that recomputes layers together stays, where it is faster, and is neither bounded nor called optimal."""
    pipelines = [Pipeline((Stage(TensorParallel((d,)), ((0, 12),), BY_3 * 2),), 4) for d in range(4)]
    start = Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(1))
    result = Refereed(Slow()).solve(PROBLEM, Budget(1), start=start)
    assert (result.plan, result.status, result.bound_s) == (start, Status.FEASIBLE, 0.0)
    assert result.restricted_bound is not None
    assert result.restricted_bound.space == "plans that recompute each layer by itself"
    assert result.restricted_bound.bound_s > result.objective
    worse = replace(start, pipelines=(replace(pipelines[0], num_micro_batches=16),))
    result = Refereed(Slow()).solve(PROBLEM, Budget(1), start=worse)
    assert (result.plan, result.status) == (two_stages(ALONE, ALONE), Status.OPTIMAL)
    with pytest.raises(InputError, match="start: breaks the rule batch"):
        Refereed(Slow()).solve(PROBLEM, Budget(1), start=replace(start, pipelines=start.pipelines[:1]))

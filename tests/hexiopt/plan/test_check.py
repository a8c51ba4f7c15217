"""The check: every rule broken in turn is reported with its word, and valid plans pass."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import Violation, check
from hexiopt.plan.parallelism import Replica, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.schedules.registry import INTERLEAVED
from tests.hexiopt.plan.two_pipelines import (
    CLUSTER,
    FIRST,
    MODEL,
    PLAN,
    SECOND,
    WORK,
    interleaved_plan,
    with_first,
    with_stage,
)
from tests.hexiopt.schedules.test_schedules import Eager
from tests.strategies import problems_with_plans


def problem(space: Space | None = None, **work: Any) -> Problem:
    return Problem(CLUSTER, MODEL, replace(WORK, **work), space or Space())


def rules(plan: Plan, of: Problem | None = None) -> set[str]:
    broken_rules = check(of or problem(), plan)
    assert all(isinstance(v, Violation) and str(v) == v.text and v.text for v in broken_rules)
    return {violation.rule for violation in broken_rules}


@given(pair=problems_with_plans())
def test_valid_plans_pass(pair: tuple[Problem, Plan]) -> None:
    of, plan = pair
    assert check(of, plan) == []
    cost = PlanPricer(of).price(plan)
    assert {v.rule for v in violations(of, plan, cost)} == (set() if cost.fits else {"memory"})


def test_the_example_is_valid() -> None:
    assert violations(problem(), PLAN, PlanPricer(problem()).price(PLAN)) == []


def of_layers(num_layers: int) -> Plan:
    """Both pipelines with so many layers in all."""
    first = replace(FIRST, stages=(*FIRST.stages[:-1], Stage.of((2,), 20, num_layers)))
    second = replace(SECOND, stages=(SECOND.stages[0], Stage.of(SECOND.stages[1].devices, 15, num_layers)))
    return Plan((first, second))


BROKEN: dict[str, tuple[Plan, str]] = {
    "an unknown device": (with_stage(Stage.of((8,), 12, 20)), "device"),
    "a stage over two machines": (with_stage(Stage.of((3, 4), 12, 20)), "tp"),
    "three ranks": (
        Plan((Pipeline((Stage.of((0, 1, 2), 0, 30),), 16),)),
        "tp",
    ),
    "the last layers missing": (of_layers(28), "layers"),
    "too many layers": (of_layers(31), "layers"),
    "nine ranges": (
        interleaved_plan(16, ranges=tuple(tuple((2 * c + s, 2 * c + s + 1) for c in range(9)) for s in (0, 1))),
        "interleaved",
    ),
    "too few sequences": (with_first(num_micro_batches=4), "batch"),
    "too many sequences": (with_first(num_micro_batches=6), "batch"),
    "micro-batches of five": (with_first(num_micro_batches=2, micro_batch_size=5), "batch"),
    "a schedule of one's own": (replace(PLAN, schedule=Eager()), "schedule"),
    "stated heads": (with_stage(Stage(TensorParallel((4,), (4,)), ((12, 20),))), "unpriced"),
    "a sequence layout": (
        with_stage(Stage(SequenceParallel((SequenceGroup((4,), (128,), (4,)),)), ((12, 20),), ("none",))),
        "space.sequence",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    plan, rule = BROKEN[name]
    assert rule in rules(plan)


TIGHT = Space(**dict.fromkeys(SWITCHES, False), num_pipelines=1, num_stages=2, max_tp=1)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("space", [TIGHT, *(Space(**{name: False}) for name in SWITCHES)])
def test_a_broken_plan_is_never_an_exception(name: str, space: Space) -> None:
    assert rules(BROKEN[name][0], problem(space))


def test_one_policy_written_for_each_layer_is_one_policy() -> None:
    plan = replace(PLAN, pipelines=(SECOND,))
    first = replace(SECOND.stages[0], recompute=("none",) * 15)
    plan = replace(plan, pipelines=(replace(SECOND, stages=(first, SECOND.stages[1]), num_micro_batches=16),))
    assert rules(plan, problem(Space(recompute_per_stage=False))) == set()


def test_thirty_layers_over_four_stages_are_not_28() -> None:
    stages = tuple(Stage.of((d,), 7 * d, 7 * d + 7) for d in range(4))
    (violation,) = check(problem(), Plan((Pipeline(stages, 16),)))
    assert violation.rule == "layers"
    assert "28" in violation.text
    assert "30" in violation.text


def test_every_violation_of_a_kind_is_told() -> None:
    """An unknown device, a wrong batch and a wrong schedule at once."""
    plan = replace(with_stage(Stage.of((8,), 12, 20)), schedule=Eager())
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], num_micro_batches=1), SECOND))
    assert rules(plan) == {"device", "batch", "schedule"}


# ------------------------------------------------------------------ the workload's choices


@pytest.mark.parametrize(
    ("work", "rule"),
    [
        ({"recompute": "none"}, "recompute"),
        ({"recompute": "selective"}, "recompute"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"optimizer_sharding": "1"}, "sharding"),
    ],
)
def test_the_workload_binds(work: dict[str, Any], rule: str) -> None:
    assert rules(PLAN, problem(**work)) == {rule}


def test_the_workload_leaves_what_it_states() -> None:
    assert rules(PLAN, problem(schedule="1f1b", optimizer_sharding="0")) == set()
    assert rules(replace(PLAN, sharding=Sharding(1)), problem(optimizer_sharding="1")) == set()


# ------------------------------------------------------------------ constraints and switches


@pytest.mark.parametrize(
    ("space", "rule"),
    [
        (Space(num_pipelines=1), "constraints"),
        (Space(num_pipelines=3), "constraints"),
        (Space(num_stages=2), "constraints"),
        (Space(max_tp=1), "tp"),
        (Space(exclude=("a:2",)), "exclude"),
        (Space(exclude=("b",)), "exclude"),
        (Space(max_micro_batch_size=1), "batch"),
        (Space(uneven_layers=False), "space.uneven_layers"),
        (Space(uneven_tp=False), "space.uneven_tp"),
        (Space(uneven_batch=False), "space.uneven_batch"),
        (Space(uneven_structure=False), "space.uneven_structure"),
        (Space(recompute_per_stage=False), "space.recompute_per_stage"),
    ],
)
def test_the_space_binds(space: Space, rule: str) -> None:
    assert rules(PLAN, problem(space)) == {rule}


def test_policies_layer_by_layer_switched_off() -> None:
    plan = with_stage(Stage(TensorParallel((4,)), ((12, 20),), (*["full"] * 3, *["none"] * 5)))
    assert rules(plan) == set()
    assert rules(plan, problem(Space(recompute_per_layer=False))) == {"space.recompute_per_layer"}


def test_replicas_switched_off() -> None:
    plan = with_stage(Stage.of_replicas((Replica((4,), 1), Replica((3,), 1)), ((12, 20),), ("full",)))
    assert rules(plan) == set()
    assert rules(plan, problem(Space(replicas=False))) == {"space.replicas"}


def test_interleaving_is_allowed() -> None:
    """Beside a pipeline of one stage and one range; within the limit on ranges, and where the workload asks for it."""
    plan = interleaved_plan(14, rest=2)
    assert rules(plan) == rules(plan, problem(schedule="interleaved")) == set()
    assert rules(plan, problem(schedule="1f1b")) == {"schedule"}
    assert rules(plan, problem(Space(max_chunks=1))) == {"interleaved"}
    assert rules(replace(PLAN, schedule=INTERLEAVED)) == set()  # one range: 1F1B


def test_a_policy_per_layer_is_allowed() -> None:
    plan = with_stage(Stage(TensorParallel((4,)), ((12, 20),), ("none", "full") * 4))
    assert rules(plan) == set()
    assert rules(plan, problem(recompute="full")) == {"recompute"}


def test_an_even_plan_passes_every_switch() -> None:
    """30 layers as 8, 8, 7, 7 in both pipelines; batches may differ by one micro-batch."""

    def pipeline(base: int, batches: int, size: int) -> Pipeline:
        cuts = (0, 8, 16, 23, 30)
        stages = tuple(Stage.of((base + k,), cuts[k], cuts[k + 1]) for k in range(4))
        return Pipeline(stages, batches, size)

    strict = Space(**dict.fromkeys(SWITCHES, False), num_pipelines=2, num_stages=4, max_tp=1)
    plan = Plan((pipeline(0, 9, 1), pipeline(4, 7, 1)))
    assert rules(plan, problem(strict)) == {"space.uneven_batch"}
    assert rules(Plan((pipeline(0, 5, 2), pipeline(4, 6, 1))), problem(strict)) == {"space.uneven_batch"}
    assert rules(Plan((pipeline(0, 8, 1), pipeline(4, 8, 1))), problem(strict)) == set()
    assert rules(Plan((pipeline(0, 9, 1), pipeline(4, 8, 1))), problem(strict, global_batch=17)) == set()
    assert rules(Plan((pipeline(0, 5, 2), pipeline(4, 4, 2))), problem(strict, global_batch=18)) == set()


def test_all_tp_degrees() -> None:
    plan = Plan((Pipeline((Stage.of((0, 1, 2), 0, 30),), 16),))
    assert rules(plan) == {"tp"}
    assert rules(plan, problem(Space(tp_degrees="all"))) == set()
    assert rules(plan, problem(Space(tp_degrees="all", max_tp=2))) == {"tp"}


# ------------------------------------------------------------------ memory


def test_a_device_without_room_is_named_with_what_it_lacks() -> None:
    big = replace(MODEL, hidden_size=8192, ffn_size=28_672, vocab_size=32_000)
    of = Problem(CLUSTER, big, WORK)
    cost = PlanPricer(of).price(PLAN)
    broken_rules = violations(of, PLAN, cost)
    assert {violation.rule for violation in broken_rules} == {"memory"}
    assert len(broken_rules) == 5
    p, s = cost.binding_stage()
    stage = cost.pipelines[p].stages[s]
    name = CLUSTER.device_name(PLAN.pipelines[p].stages[s].devices[0])
    (text,) = (v.text for v in broken_rules if f"device {name} " in v.text)
    assert f"{stage.excess_bytes / 2**30:.2f} GiB too much" in text
    assert check(of, PLAN) == []  # memory is checked where a cost is given

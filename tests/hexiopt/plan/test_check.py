"""The check: every rule broken in turn is reported with its word, and valid plans pass."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import Violation, check
from hexiopt.plan.plan import (
    Pipeline,
    Plan,
    Replica,
    SequenceGroup,
    SequenceLayout,
    Sharding,
    Stage,
    TensorParallel,
    held_by,
)
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.reading import Section
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from tests.hexiopt.schedules.test_schedules import Eager
from tests.strategies import problems_with_plans

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=30,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=100,
    vocab_size=1000,
    max_positions=1000,
)
CLUSTER = cluster_from_section(
    Section(
        {
            "name": "lab",
            "inter_machine": {"bandwidth_gb_per_s": 1.25},
            "machines": [
                {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
                {"name": "b", "gpu": "rtx_4090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
            ],
        },
        "test",
    )
)
# Two pipelines: TP 2, 1 and 1 over both machines with 12 + 8 + 10 layers; TP 2 and 2 with 15 + 15.
FIRST = Pipeline((Stage.of((0, 1), 0, 12), Stage.of((4,), 12, 20, "full"), Stage.of((2,), 20, 30)), 5, 2)
SECOND = Pipeline((Stage.of((5, 6), 0, 15), Stage.of((7,), 15, 30)), 6)
PLAN = Plan((FIRST, SECOND))
WORK = Workload(global_batch=16, seq_len=128)


def problem(space: Space | None = None, **work: Any) -> Problem:
    return Problem(CLUSTER, MODEL, replace(WORK, **work), space or Space())


def rules(plan: Plan, of: Problem | None = None) -> set[str]:
    found = check(of or problem(), plan)
    assert all(isinstance(v, Violation) and str(v) == v.text and v.text for v in found)
    return {violation.rule for violation in found}


def with_stage(stage: Stage, k: int = 1) -> Plan:
    """The first pipeline with another stage k."""
    stages = (*FIRST.stages[:k], stage, *FIRST.stages[k + 1 :])
    return replace(PLAN, pipelines=(replace(FIRST, stages=stages), SECOND))


def interleaved(
    batches: int,
    rest: int = 0,
    schedule: Schedule = INTERLEAVED,
    ranges: Any = (((0, 8), (16, 23)), ((8, 16), (23, 30))),
) -> Plan:
    """Two stages of two ranges, and `rest` sequences on a pipeline of its own."""
    stages = tuple(Stage(TensorParallel((s,)), own) for s, own in enumerate(ranges))
    alone = Pipeline((Stage(TensorParallel((7,)), ((0, 30),)),), rest)
    return Plan((Pipeline(stages, batches), *([alone] if rest else [])), schedule)


def with_first(**changes: Any) -> Plan:
    return replace(PLAN, pipelines=(replace(FIRST, **changes), SECOND))


@given(pair=problems_with_plans())
def test_valid_plans_pass(pair: tuple[Problem, Plan]) -> None:
    of, plan = pair
    assert check(of, plan) == []
    cost = PlanPricer(of).price(plan)
    assert {v.rule for v in violations(of, plan, cost)} == (set() if cost.fits else {"memory"})


def test_the_example_is_valid() -> None:
    assert violations(problem(), PLAN, PlanPricer(problem()).price(PLAN)) == []


BROKEN: dict[str, tuple[Plan, str]] = {
    "a device twice in a stage": (with_stage(Stage.of((4, 4), 12, 20)), "device"),
    "a device twice in a plan": (with_stage(Stage.of((5,), 12, 20)), "device"),
    "an unknown device": (with_stage(Stage.of((8,), 12, 20)), "device"),
    "a negative device": (with_stage(Stage.of((-1,), 12, 20)), "device"),
    "an unknown device twice": (with_stage(Stage.of((8, 8), 12, 20)), "device"),
    "a stage over two machines": (with_stage(Stage.of((3, 4), 12, 20)), "tp"),
    "no device": (with_stage(Stage.of((), 12, 20)), "tp"),
    "three ranks": (
        Plan((Pipeline((Stage.of((0, 1, 2), 0, 30),), 16),)),
        "tp",
    ),
    "a gap in the layers": (with_stage(Stage.of((4,), 13, 20)), "layers"),
    "layers twice": (with_stage(Stage.of((4,), 11, 20)), "layers"),
    "a stage without layers": (with_stage(Stage.of((4,), 12, 12)), "layers"),
    "a backward range": (with_stage(Stage.of((4,), 20, 12)), "layers"),
    "the last layers missing": (with_stage(Stage.of((2,), 20, 28), 2), "layers"),
    "too many layers": (with_stage(Stage.of((2,), 20, 31), 2), "layers"),
    "layers not from 0": (with_stage(Stage.of((0, 1), 1, 12), 0), "layers"),
    "stages in the wrong order": (with_first(stages=FIRST.stages[::-1]), "layers"),
    "no stage": (with_first(stages=()), "layers"),
    "unequally many ranges": (with_stage(Stage(TensorParallel((4,)), ((12, 15), (15, 20)))), "layers"),
    "ranges without interleaving": (interleaved(16, schedule=ONE_F_ONE_B), "interleaved"),
    "micro-batches that are no multiple of the stages": (interleaved(15, rest=1), "interleaved"),
    "ranges on a lone stage": (
        Plan((Pipeline((Stage(TensorParallel((0,)), ((0, 15), (15, 30))),), 16),), INTERLEAVED),
        "interleaved",
    ),
    "ranges in the wrong order": (interleaved(16, ranges=(((0, 8), (8, 16)), ((16, 23), (23, 30)))), "layers"),
    "nine ranges": (
        interleaved(16, ranges=tuple(tuple((2 * c + s, 2 * c + s + 1) for c in range(9)) for s in (0, 1))),
        "interleaved",
    ),
    "a policy for a layer too many": (
        with_stage(Stage(TensorParallel((4,)), ((12, 20),), ("none",) * 9)),
        "recompute",
    ),
    "too few sequences": (with_first(num_micro_batches=4), "batch"),
    "too many sequences": (with_first(num_micro_batches=6), "batch"),
    "no micro-batch": (
        Plan((replace(FIRST, num_micro_batches=8), replace(SECOND, num_micro_batches=0))),
        "batch",
    ),
    "a negative micro-batch count": (
        Plan((replace(FIRST, num_micro_batches=9), replace(SECOND, num_micro_batches=-2))),
        "batch",
    ),
    "micro-batches of five": (with_first(num_micro_batches=2, micro_batch_size=5), "batch"),
    "no pipeline": (Plan(()), "batch"),
    "an unknown policy": (with_stage(Stage.of((4,), 12, 20, "some")), "recompute"),
    "a schedule of one's own": (replace(PLAN, schedule=Eager()), "schedule"),
    "ZeRO 3 over unequal pipelines": (replace(PLAN, sharding=Sharding(3)), "sharding"),
    "sharding groups that leave a device out": (replace(PLAN, sharding=Sharding(1, ((0,),))), "sharding"),
    "replicas with too many samples": (
        with_stage(Stage(held_by((Replica((4,), 2), Replica((3,), 1))), ((12, 20),))),
        "replicas",
    ),
    "a replica of no sample": (
        with_stage(Stage(held_by((Replica((4,), 2), Replica((3,), 0))), ((12, 20),))),
        "replicas",
    ),
    "a lone replica of some samples": (with_stage(Stage(held_by((Replica((4,), 1),)), ((12, 20),))), "replicas"),
    "stated heads": (with_stage(Stage(TensorParallel((4,), (4,)), ((12, 20),))), "unpriced"),
    "a sequence layout": (
        with_stage(Stage(SequenceLayout((SequenceGroup((4,), (128,), (4,)),)), ((12, 20),), ("none",))),
        "space.sequence",
    ),
    "no policy": (with_stage(Stage(TensorParallel((4,)), ((12, 20),), ())), "recompute"),
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
    """A device twice, a wrong batch and a wrong schedule at once."""
    plan = replace(with_stage(Stage.of((5,), 12, 20)), schedule=Eager())
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
    plan = with_stage(Stage(held_by((Replica((4,), 1), Replica((3,), 1))), ((12, 20),), ("full",)))
    assert rules(plan) == set()
    assert rules(plan, problem(Space(replicas=False))) == {"space.replicas"}


def test_interleaving_is_allowed() -> None:
    """Beside a pipeline of one stage and one range; within the limit on ranges, and where the workload asks for it."""
    plan = interleaved(14, rest=2)
    assert rules(plan) == rules(plan, problem(schedule="interleaved")) == set()
    assert rules(plan, problem(schedule="1f1b")) == {"schedule"}
    assert rules(plan, problem(Space(max_chunks=1))) == {"interleaved"}
    assert rules(replace(PLAN, schedule=INTERLEAVED)) == set()  # one range: 1F1B


def test_a_policy_per_layer_is_allowed() -> None:
    plan = with_stage(Stage(TensorParallel((4,)), ((12, 20),), ("none", "full") * 4))
    assert rules(plan) == set()
    assert rules(plan, problem(recompute="full")) == {"recompute"}


@pytest.mark.parametrize("name", BROKEN)
def test_the_cost_model_refuses_what_no_schedule_can_run(name: str) -> None:
    plan, rule = BROKEN[name]
    if rule in ("replicas", "interleaved"):
        if "nine" not in name:
            with pytest.raises(ValueError, match="stage"):
                PlanPricer(problem()).price(plan)
        (violation,) = (v for v in check(problem(), plan) if v.rule == rule)
        assert "\n" not in violation.text


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
    found = violations(of, PLAN, cost)
    assert {violation.rule for violation in found} == {"memory"}
    assert len(found) == 5
    p, s = cost.binding_stage()
    stage = cost.pipelines[p].stages[s]
    name = CLUSTER.device_name(PLAN.pipelines[p].stages[s].devices[0])
    (text,) = (v.text for v in found if f"device {name} " in v.text)
    assert f"{stage.excess_bytes / 2**30:.2f} GiB too much" in text
    assert check(of, PLAN) == []  # memory is checked where a cost is given

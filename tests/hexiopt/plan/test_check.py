"""The check: every rule broken in turn is reported with its word, and valid plans pass."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.check import Violation, check
from hexiopt.plan.parallelism import Replica, Replicated, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.reading import Section
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from tests.hexiopt.schedules.test_schedules import Eager
from tests.strategies import JSON, problems_with_plans

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
    alone = [Pipeline((Stage(TensorParallel((7,)), ((0, 30),)),), rest)] if rest else []
    return Plan((Pipeline(stages, batches), *alone), schedule)


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
        interleaved(16, ranges=tuple(tuple((2 * c + s, 2 * c + s + 1) for c in range(9)) for s in (0, 1))),
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
    plan = interleaved(14, rest=2)
    assert rules(plan) == rules(plan, problem(schedule="interleaved")) == set()
    assert rules(plan, problem(schedule="1f1b")) == {"schedule"}
    assert rules(plan, problem(Space(max_chunks=1))) == {"interleaved"}
    assert rules(replace(PLAN, schedule=INTERLEAVED)) == set()  # one range: 1F1B


def test_a_policy_per_layer_is_allowed() -> None:
    plan = with_stage(Stage(TensorParallel((4,)), ((12, 20),), ("none", "full") * 4))
    assert rules(plan) == set()
    assert rules(plan, problem(recompute="full")) == {"recompute"}


SEQUENCE = SequenceParallel((SequenceGroup((4,), (128,), (4,)),))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no device": (lambda: Stage.of((), 12, 20), "the stage has no device; name at least one"),
    "a negative device": (
        lambda: TensorParallel((-1,)),
        "the stage has device -1; state devices by their numbers in the cluster, from 0 on",
    ),
    "a device by its name": (
        lambda: Replica(("a:0",), 1),  # type: ignore[arg-type]
        "a replica of the stage has device 'a:0'; state devices by their numbers in the cluster, from 0 on",
    ),
    "a device that is no list": (
        lambda: TensorParallel(0),  # type: ignore[arg-type]
        "TensorParallel: devices: 0 is not a list; write a tuple of all, even of one",
    ),
    "a stage of devices alone": (
        lambda: Stage((0, 1), ((0, 30),)),  # type: ignore[arg-type]
        "the stage has parallelism (0, 1); give TensorParallel, Replicated or SequenceParallel of "
        "hexiopt.plan.parallelism",
    ),
    "no policy": (
        lambda: Stage(TensorParallel((4,)), ((12, 20),), ()),
        "the stage has 0 recompute policies for 8 layers; state one, or one for each layer",
    ),
    "a policy for a layer too many": (
        lambda: Stage(TensorParallel((4,)), ((12, 20),), ("none",) * 9),
        "the stage has 9 recompute policies for 8 layers; state one, or one for each layer",
    ),
    "an unknown policy": (
        lambda: Stage.of((4,), 12, 20, "some"),
        "the stage has recompute policy 'some'; choose none, selective or full",
    ),
    "no range": (lambda: Stage(TensorParallel((4,)), ()), "the stage has no layer range; give it one"),
    "a range that is not nested": (
        lambda: Stage(TensorParallel((4,)), (0, 30)),  # type: ignore[arg-type]
        "the stage has layers (0, 30); 0 is not a range: write ((first, end),), the end not included and above the "
        "first",
    ),
    "a stage without layers": (
        lambda: Stage.of((4,), 12, 12),
        "the stage has layers ((12, 12),); (12, 12) is not a range: write ((first, end),), the end not included and "
        "above the first",
    ),
    "a backward range": (
        lambda: Stage.of((4,), 20, 12),
        "the stage has layers ((20, 12),); (20, 12) is not a range: write ((first, end),), the end not included and "
        "above the first",
    ),
    "ranges of a sequence layout": (
        lambda: Stage(SEQUENCE, ((0, 1), (2, 3))),
        "the stage has a sequence layout and 2 layer ranges; give it one range, or interleave stages without",
    ),
    "no replica": (lambda: Replicated(()), "the stage has no replica; name at least one"),
    "a replica of no sample": (
        lambda: Replica((3,), 0),
        "a replica of the stage has 0 samples; give it a whole number of them, at least 1",
    ),
    "a replica that states no samples": (
        lambda: Replicated((Replica((4,), 2), Replica((3,)))),
        "replica 1 of the stage has no samples; state them for each",
    ),
    "a replica of no device": (lambda: Replica((), 1), "a replica of the stage has no device; name at least one"),
    "a layout of no group": (lambda: SequenceParallel(()), "the sequence layout has no group; name at least one"),
    "a layout in another order": (
        lambda: SequenceParallel((SequenceGroup((4,), (128,), (4,)),), "random"),
        "the sequence layout has order 'random'; choose contiguous or zigzag",
    ),
    "a token count for no device": (
        lambda: SequenceGroup((4,), (64, 64), (4,)),
        "a group of the sequence layout has 1 devices and tokens (64, 64); state one number for every device",
    ),
    "a device of no head": (
        lambda: SequenceGroup((4, 5), (64, 64), (4, 0)),
        "a group of the sequence layout has heads (4, 0); give every device at least 1, or leave it out",
    ),
    "heads for another number of devices": (
        lambda: TensorParallel((0, 1), (3,)),
        "the stage has 2 devices and heads (3,); state one number for every device",
    ),
    "no stage": (lambda: with_first(stages=()), "the pipeline has no stage; give it at least one"),
    "a stage that is none": (
        lambda: Pipeline((TensorParallel((0,)),), 4),  # type: ignore[arg-type]
        "stage 0 is TensorParallel(devices=(0,), heads=None), not a Stage; give Stage(parallelism, layers)",
    ),
    "no micro-batch": (
        lambda: replace(SECOND, num_micro_batches=0),
        "the pipeline has 0 micro-batches of 1 sequences; give it a whole number of each, at least 1",
    ),
    "a negative micro-batch size": (
        lambda: replace(SECOND, micro_batch_size=-2),
        "the pipeline has 6 micro-batches of -2 sequences; give it a whole number of each, at least 1",
    ),
    "half a micro-batch": (
        lambda: replace(SECOND, num_micro_batches=2.5),
        "the pipeline has 2.5 micro-batches of 1 sequences; give it a whole number of each, at least 1",
    ),
    "unequally many ranges": (
        lambda: with_stage(Stage(TensorParallel((4,)), ((12, 15), (15, 20)))),
        "stage 1 has 2 layer ranges, stage 0 has 1; give all stages equally many",
    ),
    "replicas with too many samples": (
        lambda: with_stage(Stage.of_replicas((Replica((4,), 2), Replica((3,), 1)), ((12, 20),))),
        "stage 1 splits micro-batches of 2 sequences into 2 + 1; the samples of its replicas must sum to 2",
    ),
    "a lone replica of some samples": (
        lambda: with_stage(Stage.of_replicas((Replica((4,), 1),), ((12, 20),))),
        "stage 1 splits micro-batches of 2 sequences into 1; the samples of its replicas must sum to 2",
    ),
    "a gap in the layers": (
        lambda: with_stage(Stage.of((4,), 13, 20)),
        "stage 1 holds layers [13, 20) where layer 12 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "layers twice": (
        lambda: with_stage(Stage.of((4,), 11, 20)),
        "stage 1 holds layers [11, 20) where layer 12 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "layers not from 0": (
        lambda: with_stage(Stage.of((0, 1), 1, 12), 0),
        "stage 0 holds layers [1, 12) where layer 0 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "stages in the wrong order": (
        lambda: with_first(stages=FIRST.stages[::-1]),
        "stage 0 holds layers [20, 30) where layer 0 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "ranges in the wrong order": (
        lambda: interleaved(16, ranges=(((0, 8), (8, 16)), ((16, 23), (23, 30)))),
        "stage 1 holds layers [16, 23) where layer 8 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "no pipeline": (lambda: Plan(()), "plan: pipelines: the plan has no pipeline; give it at least one"),
    "a pipeline that is none": (
        lambda: Plan(FIRST.stages[:1]),  # type: ignore[arg-type]
        "plan: pipelines[0]: Stage(parallelism=TensorParallel(devices=(0, 1), heads=No... is not a Pipeline; give "
        "Pipeline(stages, ...)",
    ),
    "a sharding that is only a number": (
        lambda: replace(PLAN, sharding=3),
        "plan: sharding: 3 is not a Sharding; give Sharding(stage, groups)",
    ),
    "the last layers of one pipeline missing": (
        lambda: with_stage(Stage.of((2,), 20, 28), 2),
        "plan: pipelines[1]: 30 layers, where the first pipeline has 28; each holds all layers of the model",
    ),
    "a device twice in a stage": (
        lambda: with_stage(Stage.of((4, 4), 12, 20)),
        "plan: pipelines: device 4 is used 2 times; give each device one place in the plan",
    ),
    "a device twice in a plan": (
        lambda: with_stage(Stage.of((5,), 12, 20)),
        "plan: pipelines: device 5 is used 2 times; give each device one place in the plan",
    ),
    "ranges without interleaving": (
        lambda: interleaved(16, schedule=ONE_F_ONE_B),
        "plan: pipelines[0]: several layer ranges a stage under 1f1b; take the interleaved schedule",
    ),
    "micro-batches that are no multiple of the stages": (
        lambda: interleaved(15, rest=1),
        "plan: pipelines[0]: 15 micro-batches for 2 interleaved stages; take a multiple of 2",
    ),
    "ranges on a lone stage": (
        lambda: Plan((Pipeline((Stage(TensorParallel((0,)), ((0, 15), (15, 30))),), 16),), INTERLEAVED),
        "plan: pipelines[0]: 2 layer ranges on the only stage; interleave two stages or more",
    ),
    "ZeRO 4": (lambda: Sharding(4), "sharding stage 4 is not known; choose 0, 1, 2 or 3"),
    "sharding by rack": (
        lambda: Sharding(1, "rack"),
        "sharding groups are 'rack'; choose all, machine or lists of devices",
    ),
    "sharding groups that are no lists": (
        lambda: Sharding(1, (0, 1)),  # type: ignore[arg-type]
        "sharding groups are (0, 1); choose all, machine or lists of devices",
    ),
    "ZeRO 3 over unequal pipelines": (
        lambda: replace(PLAN, sharding=Sharding(3)),
        "plan: sharding: ZeRO-3 over pipelines of unequally many stages; give all as many",
    ),
    "ZeRO 2 in chunks": (
        lambda: replace(interleaved(16), sharding=Sharding(2)),
        "plan: sharding: ZeRO-2 under the interleaved schedule; take 1f1b or gpipe",
    ),
    "sharding groups that leave a device out": (
        lambda: replace(PLAN, sharding=Sharding(1, ((0,),))),
        "plan: sharding: device 1 is in 0 sharding groups; put it into exactly one",
    ),
}


PARTS = (
    *(PLAN, FIRST, FIRST.stages[0], FIRST.stages[0].parallelism, Sharding(1, ((0, 1),)), Replica((0,), 1)),
    *(Replicated((Replica((4,), 1), Replica((3,), 1))), SEQUENCE, SEQUENCE.groups[0]),
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_problem_is_needed_to_judge_is_refused_when_it_is_made(name: str) -> None:
    build, line = REFUSED[name]
    with pytest.raises(InputError) as caught:
        build()
    assert str(caught.value) == line


@given(which=st.integers(0, len(PARTS) - 1), value=JSON, data=st.data())
def test_any_value_makes_a_part_of_a_plan_or_is_refused(which: int, value: Any, data: st.DataObject) -> None:
    part = PARTS[which]
    name = data.draw(st.sampled_from([field.name for field in fields(part)]))
    with suppress(InputError):  # whose text is one line by its class
        hash(replace(part, **{name: value}))  # type: ignore[type-var]


def test_lists_make_the_plan_that_tuples_make() -> None:
    """So that equal plans are equal, and hash alike."""
    stages = [
        Stage(TensorParallel([0, 1]), [(0, 12)], "full"),  # type: ignore[arg-type]
        Stage(Replicated([Replica([4], 1), Replica([3], 1)]), [(12, 20)], ["none"]),  # type: ignore[arg-type]
        Stage(SequenceParallel([SequenceGroup([2], [128], [4])]), [(20, 30)]),  # type: ignore[arg-type]
    ]
    listed = Plan([Pipeline(stages, 5, 2)], sharding=Sharding(1, [[0, 1, 2], [3, 4]]))  # type: ignore[arg-type]
    sequence = SequenceParallel((SequenceGroup((2,), (128,), (4,)),))
    split = Stage.of_replicas((Replica((4,), 1), Replica((3,), 1)), ((12, 20),))
    pipeline = Pipeline((Stage.of((0, 1), 0, 12, "full"), split, Stage(sequence, ((20, 30),))), 5, 2)
    assert listed == Plan((pipeline,), sharding=Sharding(1, ((0, 1, 2), (3, 4))))
    assert len({listed, replace(listed)}) == 1


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

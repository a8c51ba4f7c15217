"""Types of a plan refuse, when they are made, what no problem is needed to judge."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import Replica, Replicated, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from tests.hexiopt.plan.two_pipelines import (
    FIRST,
    PLAN,
    SECOND,
    interleaved_plan,
    with_first,
    with_stage,
)
from tests.strategies import JSON

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
        "the stage has parallelism (0, 1); give TensorParallel, Replicated, SequenceParallel or ExpertParallel of "
        "hexiopt.plan.parallelism",
    ),
    "no policy": (
        lambda: Stage(TensorParallel((4,)), ((12, 20),), ()),
        "the stage: recompute: [] is empty; choose one of none, selective, full, joined",
    ),
    "a policy for a layer too many": (
        lambda: Stage(TensorParallel((4,)), ((12, 20),), ("none",) * 9),
        "the stage has 9 recompute policies for 8 layers; state one, or one for each layer",
    ),
    "an unknown policy": (
        lambda: Stage.of((4,), 12, 20, "some"),
        "the stage: recompute: 'some' is not known; known: full, joined, none, selective",
    ),
    "no range": (lambda: Stage(TensorParallel((4,)), ()), "the stage has no layer range; give it one"),
    "a range that is not nested": (
        lambda: Stage(TensorParallel((4,)), (0, 30)),  # type: ignore[arg-type]
        "the stage: layers: 0 is not a range; write [first, end], the end not included and above the first",
    ),
    "a stage without layers": (
        lambda: Stage.of((4,), 12, 12),
        "the stage: layers: (12, 12) is not a range; write [first, end], the end not included and above the first",
    ),
    "a backward range": (
        lambda: Stage.of((4,), 20, 12),
        "the stage: layers: (20, 12) is not a range; write [first, end], the end not included and above the first",
    ),
    "ranges of a sequence layout": (
        lambda: Stage(SEQUENCE, ((0, 1), (2, 3))),
        "the stage has a sequence layout and 2 layer ranges; give it one range, or interleave stages without",
    ),
    "no replica": (lambda: Replicated(()), "the stage: replicas: [] is empty; name at least one replica"),
    "a replica of no sample": (
        lambda: Replica((3,), 0),
        "a replica of the stage: samples: 0 is out of range; it must be at least 1 and at most 10000000",
    ),
    "a replica that states no samples": (
        lambda: Replicated((Replica((4,), 2), Replica((3,)))),
        "replica 1 of the stage has no samples; state them for each",
    ),
    "a replica of no device": (lambda: Replica((), 1), "a replica of the stage has no device; name at least one"),
    "a layout of no group": (
        lambda: SequenceParallel(()),
        "the sequence layout: groups: [] is empty; name at least one group",
    ),
    "a layout in another order": (
        lambda: SequenceParallel((SequenceGroup((4,), (128,), (4,)),), "random"),
        "the sequence layout: order: 'random' is not known; known: contiguous, zigzag",
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
        "stage 0 is TensorParallel(devices=(0,), heads=None, degree=None), not a Stage; "
        "give Stage(parallelism, layers)",
    ),
    "no micro-batch": (
        lambda: replace(SECOND, num_micro_batches=0),
        "the pipeline: num_micro_batches: 0 is out of range; it must be at least 1 and at most 10000000",
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
    "ranges in the wrong order": (
        lambda: interleaved_plan(16, ranges=(((0, 8), (8, 16)), ((16, 23), (23, 30)))),
        "stage 1 holds layers [16, 23) where layer 8 is next; each stage goes on where the one before it ends, the "
        "first from layer 0",
    ),
    "no pipeline": (lambda: Plan(()), "plan: pipelines: [] is empty; a plan has at least one pipeline"),
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
    "a device twice in a plan": (
        lambda: with_stage(Stage.of((5,), 12, 20)),
        "plan: pipelines: device 5 is used 2 times; give each device one place in the plan",
    ),
    "ranges without interleaving": (
        lambda: interleaved_plan(16, schedule=ONE_F_ONE_B),
        "plan: pipelines[0]: several layer ranges a stage under 1f1b; take the interleaved schedule",
    ),
    "micro-batches that are no multiple of the stages": (
        lambda: interleaved_plan(15, rest=1),
        "plan: pipelines[0]: 15 micro-batches for 2 interleaved stages; take a multiple of 2",
    ),
    "ranges on a lone stage": (
        lambda: Plan((Pipeline((Stage(TensorParallel((0,)), ((0, 15), (15, 30))),), 16),), INTERLEAVED),
        "plan: pipelines[0]: 2 layer ranges on the only stage; interleave two stages or more",
    ),
    "ZeRO 4": (lambda: Sharding(4), "sharding: stage: 4 is out of range; it must be at least 0 and at most 3"),
    "sharding by rack": (
        lambda: Sharding(1, "rack"),
        "sharding: groups: 'rack' is not known; known: all, machine",
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
        lambda: replace(interleaved_plan(16), sharding=Sharding(2)),
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


def test_replicas_that_share_experts_keep_whole_sequences() -> None:
    pipeline = Pipeline((Stage(TensorParallel((0, 1, 2, 3), degree=2), ((0, 4),)),), 3, 4)
    assert pipeline.resize(1) is None
    assert pipeline.resize(6) == replace(pipeline, micro_batch_size=6)


@pytest.mark.parametrize(("size", "samples"), [(8, [2, 6]), (2, None), (12, [3, 9]), (6, None)])
def test_replicas_share_micro_batches_of_another_size_in_proportion(size: int, samples: list[int] | None) -> None:
    """Of four samples one replica has one, the other three; a stage with a TP group alone has all."""
    replicas = Replicated((Replica((0,), 1), Replica((1,), 3)))
    pipeline = Pipeline((Stage(replicas, ((0, 2),)), Stage.of((2,), 2, 4)), 3, 4)
    resized = pipeline.resize(size)
    if samples is None:
        assert resized is None
    else:
        assert resized is not None
        assert (resized.micro_batch_size, resized.num_micro_batches) == (size, 3)
        assert [replica.samples for replica in resized.stages[0].parallelism.replicas] == samples
        assert resized.stages[1] == pipeline.stages[1]


def test_replicas_that_share_experts_divide_micro_batches() -> None:
    """Else some would have nothing to do, for nothing."""
    stage = Stage(TensorParallel((0, 1, 2, 3), None, 1), ((0, 2),))
    assert Pipeline((stage,), 1, 8).resize(4) == Pipeline((stage,), 1, 4)
    assert Pipeline((stage,), 1, 8).resize(2) is None
    with pytest.raises(InputError, match=r"4 replicas that share experts; they divide a micro-batch evenly, .* not 2"):
        Pipeline((stage,), 1, 2)

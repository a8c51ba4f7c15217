"""A step's lists of actions: against torch's own checks, against a single queue a rank, and against the simulation."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.operation import BACKWARD_TURN, FORWARD_TURN
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from hexiopt.schedules.schedule import Programme, Schedule, StagePosition
from runtime.mapping.lowering import (
    Action,
    ActionKind,
    ActionList,
    LastBackward,
    Lockstep,
    Reduction,
    StepShape,
    UnitCollective,
    lower,
)
from runtime.mapping.one_order import JointEvent, check_inputs, check_one_order, check_units
from tests.hexiopt.schedules.test_schedules import MEGATRONS, Eager
from tests.slow import slow_but
from tests.strategies import problems_with_plans

RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD)
NO_MESSAGES = ((0.0, 0.0),)  # of a stage


def shapes(stages: tuple[int, ...] = (1, 2, 3, 4, 8), most_batches: int = 12) -> Iterator[StepShape]:
    for schedule, count, chunks in product((*SCHEDULES, Eager()), stages, (1, 2, 3)):
        for batches in range(1, most_batches + 1):
            if schedule.broken_rule(count, chunks, batches) is None:
                yield StepShape.even(schedule, count, batches, chunks)


def joint_events(lists: tuple[ActionList, ...]) -> list[list[JointEvent]]:
    """What each stage does, with whom: a stage is a rank here."""
    count = len(lists)
    stages = []
    for stage, actions in enumerate(lists):
        events = []
        for action in actions:
            if isinstance(action, Reduction):
                events.append(JointEvent(f"sum {action.number}", tuple(s for s in range(count) if action in lists[s])))
            elif isinstance(action, UnitCollective) or action.kind in COMPUTES:
                events.append(JointEvent(str(action), (stage,)))
            else:
                earlier = action.stage - (action.kind in (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD))
                ranks = tuple(sorted((earlier % count, (earlier + 1) % count)))
                events.append(
                    JointEvent(f"{'B' if action.backward else 'F'}{action.micro_batch} over {earlier}", ranks)
                )
        stages.append(events)
    return stages


def one_ahead(actions: Sequence[Any]) -> tuple[Any, ...]:
    """Every receive posted one operation before that which needs it, as a loop does that looks ahead by one."""
    order: list[Any] = []
    last = 0  # where the last forward or backward stands
    for action in actions:
        if isinstance(action, Action) and action.kind in RECEIVES:
            continue
        if isinstance(action, Action) and action.kind in COMPUTES:
            if action.input in actions and action.input not in order:
                order.insert(last, action.input)
            last = len(order)
        order.append(action)
    return tuple(order)


def test_small_lists_are_these() -> None:
    first, last = lower([StepShape.even(ONE_F_ONE_B, 2, 3)])[0]
    assert " ".join(map(str, first)) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2"
    )
    assert " ".join(map(str, last)) == ("1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2")


@pytest.mark.parametrize("some", slow_but(["small"], ["small", "all"]))
def test_torch_finds_nothing_wrong(some: str) -> None:
    """Its check of what is computed, its simulation of what is sent, and that it sends the same for the same orders."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    tried = 0
    for shape in shapes((2, 3, 4), 5) if some == "small" else shapes():
        count, every = shape.num_stages, shape.num_stages * shape.num_chunks
        lists = {
            s: [torch._Action.from_str(str(action)) for action in actions]
            for s, actions in enumerate(lower([shape])[0])
        }
        computes = {
            s: [action for action in actions if action.computation_type in (torch.F, torch.B)]
            for s, actions in lists.items()
        }
        torch._validate_schedule(computes, count, every, shape.num_micro_batches)
        torch._simulate_comms_compute(lists, lambda stage, count=count: stage % count, every)
        theirs = torch._add_send_recv(computes, lambda stage, count=count: stage % count, every)
        assert {s: sorted(map(str, actions)) for s, actions in lists.items()} == {
            s: sorted(map(str, actions)) for s, actions in theirs.items()
        }
        tried += 1
    assert tried >= (40 if some == "small" else 240)


def test_lists_end_with_one_queue_a_rank_and_have_every_input_before() -> None:
    for shape in shapes((1, 2, 3, 5), 9):
        (lists,) = lower([shape])
        check_one_order(joint_events(lists))
        for actions in lists:
            check_inputs(actions, shape.num_stages * shape.num_chunks, shape.num_micro_batches)


TIMES = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda pair: (float(pair[0]), float(pair[1])))
MESSAGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (float(pair[0]), float(pair[1])))


@given(st.data())
def test_whatever_operations_take(data: st.DataObject) -> None:
    """Pipelines side by side with unequal stages, which sum the gradients of parts of their last backwards together."""
    step_shapes, parts = [], []
    for p in range(data.draw(st.integers(1, 3))):
        schedule, count, chunks = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(1, 4)), 1
        if schedule == INTERLEAVED and count > 1:
            chunks = data.draw(st.integers(1, 3))
        batches = count * data.draw(st.integers(1, 3)) if chunks > 1 else data.draw(st.integers(1, 6))
        each = st.tuples(*[st.tuples(*[TIMES] * chunks)] * count)
        cut = st.tuples(*[st.tuples(*[st.integers(1, 4)] * chunks)] * count)
        message_s = data.draw(st.tuples(*[MESSAGES] * count))
        shape = StepShape(schedule, batches, data.draw(each), message_s, data.draw(cut))
        step_shapes.append(shape)
        for s, c in product(range(count), range(chunks)):
            parts += [LastBackward(p, s, c, part) for part in range(shape.last_parts[s][c])]
    sums = data.draw(st.lists(st.frozensets(st.sampled_from(parts), min_size=1, max_size=5), max_size=6))
    lists = lower(step_shapes, sums)
    at, ranks, number = {}, [], 0
    for p, stages in enumerate(lists):
        for s in range(len(stages)):
            at[p, s] = number
            number += 1
    for p, stages in enumerate(lists):
        for s, events in enumerate(joint_events(stages)):
            ranks.append([])
            for action, event in zip(stages[s], events, strict=True):
                of = tuple(at[p, rank] for rank in event.ranks)
                if isinstance(action, Reduction):
                    of = tuple(sorted({at[part.pipeline, part.stage] for part in sums[action.number]}))
                ranks[-1].append(JointEvent(event.what + ("" if isinstance(action, Reduction) else f" of {p}"), of))
    check_one_order(ranks)
    for p, stages in enumerate(lists):
        shape = step_shapes[p]
        for s, actions in enumerate(stages):
            check_inputs(actions, shape.num_stages * shape.num_chunks, shape.num_micro_batches)
            for n, action in enumerate(actions):
                if isinstance(action, Reduction):
                    assert all(
                        Action(part.chunk * shape.num_stages + s, ActionKind.BACKWARD, shape.num_micro_batches - 1, cut)
                        in actions[:n]
                        for part in sums[action.number]
                        if (part.pipeline, part.stage) == (p, s)
                        for cut in [part.part if shape.last_parts[s][part.chunk] > 1 else None]
                    )


def test_a_receive_stands_before_the_operation_during_which_its_message_is_made() -> None:
    """So it can come meanwhile; of two messages made at once, only one can."""
    times = (((2.0, 4.0),), ((1.0, 3.0),))
    first, _ = lower([StepShape(ONE_F_ONE_B, 4, times, NO_MESSAGES * 2, ((1,), (1,)))])[0]
    spelled = list(map(str, first))
    assert spelled.index("0RECV_B1") < spelled.index("0F2") < spelled.index("0SEND_F2")


def ends_s(lists: tuple[ActionList, ...], shape: StepShape, *, posted_at_once: bool) -> float:
    """When the last stage ends. A host computes and posts in the order of its list, a message starts when it is sent
    and its receive is posted, those of a boundary and direction go one after another."""
    count, now_s, at = len(lists), [0.0] * len(lists), [0] * len(lists)
    sent, posted, free = {}, {}, dict[tuple[int, bool], float]()
    came: dict[tuple[int, bool, int], float] = {}
    moved = True
    while moved:
        moved = False
        for s, actions in enumerate(lists):
            while at[s] < len(actions):
                action = actions[at[s]]
                assert isinstance(action, Action)
                back = action.backward
                if action.kind in COMPUTES:
                    boundary = action.stage if back else action.stage - 1
                    if 0 <= boundary < count * shape.num_chunks - 1:
                        if (boundary, back, action.micro_batch) not in came:
                            break
                        now_s[s] = max(now_s[s], came[boundary, back, action.micro_batch])
                    now_s[s] += shape.chunk_s[s][action.stage // count][back]
                else:
                    earlier = action.kind in (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD)
                    key = action.stage - earlier, back, action.micro_batch
                    (posted if action.kind in RECEIVES else sent)[key] = now_s[s]
                    if key in sent and (posted_at_once or key in posted):
                        start = max(sent[key], 0.0 if posted_at_once else posted[key], free.get(key[:2], 0.0))
                        free[key[:2]] = start + shape.message_s[(key[0] + back) % count][back]
                        came.setdefault(key, free[key[:2]])
                at[s] += 1
                moved = True
    assert at == list(map(len, lists))
    return max(now_s)


@pytest.mark.parametrize("schedule", MEGATRONS, ids=str)
def test_messages_come_while_stages_compute(schedule: Schedule) -> None:
    """Where times are known, one order of all costs no time against receives that are posted as early as can be."""
    rng = random.Random(0)
    chunks = 2 if schedule == INTERLEAVED else 1
    for count, most_s in product((2, 3, 4), (0.05, 0.3, 1.0)):
        forwards = [rng.uniform(0.7, 1.3) for _ in range(count)]
        message_s = tuple((rng.uniform(0, most_s), rng.uniform(0, most_s)) for _ in range(count))
        shape = StepShape(
            schedule, 4 * count, tuple(((f, 2 * f),) * chunks for f in forwards), message_s, ((1,) * chunks,) * count
        )
        (lists,) = lower([shape])
        best = ends_s(lists, shape, posted_at_once=True)
        assert ends_s(lists, shape, posted_at_once=False) <= 1.001 * best
        (unaware,) = lower([replace(shape, message_s=NO_MESSAGES * count)])
        assert ends_s(unaware, shape, posted_at_once=False) >= best


# ------------------------------------------------------------------ in lockstep


def locksteps(count: int, gathers: bool, stages: int = 2) -> list[Lockstep]:
    """Every stage with those of its number in all of `count` pipelines."""
    return [Lockstep(frozenset((p, s) for p in range(count)), gathers) for s in range(stages)]


def spell(action: Action | Reduction | UnitCollective) -> str:
    return f"{'S' if action.scatters else 'G'}:{action.part}" if isinstance(action, UnitCollective) else str(action)


def test_a_small_list_in_lockstep_is_this() -> None:
    """Weights one unit ahead, two units at most; gradients scattered after a unit's backward, messages before."""
    shape = replace(StepShape.even(ONE_F_ONE_B, 2, 1), last_parts=((3,), (2,)))
    (first, last), other = lower([shape, shape], (), locksteps(2, True))
    assert (first, last) == other
    assert " ".join(map(spell, first)) == (
        "G:0F0.0 G:0F0.1 0F0.0 G:0F0.2 0F0.1 0F0.2 0SEND_F0 0RECV_B0 "
        "G:0B0.0 G:0B0.1 0B0.0 S:0B0.0 G:0B0.2 0B0.1 S:0B0.1 0B0.2 S:0B0.2"
    )
    assert " ".join(map(spell, last)) == (
        "1RECV_F0 G:1F0.0 G:1F0.1 1F0.0 1F0.1 G:1B0.0 G:1B0.1 1B0.0 S:1B0.0 1B0.1 1SEND_B0 S:1B0.1"
    )
    ((first, _), _) = lower([shape, shape], (), locksteps(2, False))
    assert " ".join(map(spell, first)) == "0F0 0SEND_F0 0RECV_B0 0B0.0 S:0B0.0 0B0.1 S:0B0.1 0B0.2 S:0B0.2"


@given(st.data())
def test_lockstep_has_one_order(data: st.DataObject) -> None:
    """Pipelines with any times, and sums of what is left to the last backwards: all have units in the same order."""
    count, stages, gathers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    batches, cut = data.draw(st.integers(1, 5)), data.draw(st.tuples(*[st.tuples(st.integers(1, 4))] * stages))
    schedule = data.draw(st.sampled_from([candidate for candidate in SCHEDULES if candidate.lockstep]))
    times = st.tuples(*[st.tuples(TIMES)] * stages)
    messages = st.tuples(*[MESSAGES] * stages)
    step_shapes = [StepShape(schedule, batches, data.draw(times), data.draw(messages), cut) for _ in range(count)]
    sums = [frozenset(LastBackward(p, s, 0, cut[s][0] - 1) for p in range(count)) for s in range(stages)]
    lists = lower(step_shapes, sums, locksteps(count, gathers, stages))
    events = []
    for p, stage_actions in enumerate(lists):
        for s, actions in enumerate(stage_actions):
            check_inputs(actions, stages, batches)
            check_units(actions, gathers)
            units = [unit for unit in actions if isinstance(unit, UnitCollective)]
            assert units == [unit for unit in lists[0][s] if isinstance(unit, UnitCollective)]
            assert len(units) == batches * cut[s][0] * (3 if gathers else 1)
            events.append([])
            for action, event in zip(actions, joint_events(stage_actions)[s], strict=True):
                of = [p * stages + rank for rank in event.ranks]
                if isinstance(action, (UnitCollective, Reduction)):
                    of = [q * stages + s for q in range(count)]
                what = event.what if len(of) == count > 1 else f"{event.what} of {p}"
                events[-1].append(JointEvent(what, tuple(of)))
    check_one_order(events)


def test_unequal_counts_in_lockstep_are_refused() -> None:
    """Three micro-batches beside two: what is gathered once more waits for ever."""
    with pytest.raises(
        InputError,
        match=r"^a step would hang: stage 0 of pipeline 1, with 2 micro-batches, gathers or scatters another number of "
        r"times than stage 0 of pipeline 0, with 3; give pipelines equally many stages, layers and micro-batches$",
    ):
        lower([StepShape.even(ONE_F_ONE_B, 2, count) for count in (3, 2)], (), locksteps(2, True))


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("G0 F0 F1", "0F0.1 comes before a gather of its weights"),
        ("G0 G1 G2 F0", "gather of weights for 0F0.2 comes before what is gathered is used"),
        ("G0 F0 G1", r"nothing uses the weights or gradients of"),
        ("G0 B0 G1 B1 S0", "0B0.1 comes before a scatter of 0B0.0"),
        ("G0 B0 S1", "scatter of gradients of 0B0.1 does not follow 0B0.1"),
        ("G0 B0", "nothing uses the weights or gradients of"),
    ],
)
def test_units_out_of_order(spelling: str, message: str) -> None:
    kind = ActionKind.BACKWARD if "B" in spelling else ActionKind.FORWARD
    actions = [
        part if word[0] in "FB" else UnitCollective(word[0] == "S", part)
        for word in spelling.split()
        for part in [Action(0, kind, 0, int(word[1]))]
    ]
    with pytest.raises(InputError, match=message):
        check_units(tuple(actions), True)


# ------------------------------------------------------------------ what would hang


def test_receives_posted_one_operation_ahead_would_hang() -> None:
    """With one queue a rank, under every schedule that has no more micro-batches in flight than it must."""
    for shape in shapes((2, 3, 4, 8)):
        if shape.schedule in MEGATRONS:
            lists = tuple(map(one_ahead, lower([shape])[0]))
            with pytest.raises(InputError, match=r"a step would hang: rank \d waits in .* for rank \d, which is at "):
                check_one_order(joint_events(lists))


def test_who_waits_for_whom() -> None:
    first, second = JointEvent("sum 0", (0, 1)), JointEvent("sum 1", (0, 1))
    with pytest.raises(
        InputError,
        match=r"^a step would hang: rank 0 waits in sum 0 for rank 1, which is at sum 1; "
        r"rank 1 waits in sum 1 for rank 0, which is at sum 0",
    ):
        check_one_order([[first, second], [second, first]])
    with pytest.raises(InputError, match="rank 0 waits in sum 1 for rank 1, which has ended"):
        check_one_order([[first, second], [first]])


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("1F0 1RECV_F0 1B0 1SEND_B0", "1F0 comes before 1RECV_F0"),
        ("1RECV_F0 1B0 1F0 1SEND_B0", "1B0 comes before 1F0"),
        ("1RECV_F0 1F0 1SEND_B0 1B0", "1SEND_B0 comes before 1B0"),
        ("1RECV_F0 1F0 1F0 1B0 1SEND_B0", "1F0 is there twice"),
        ("1RECV_F0 1F0 1B0", "lacks or has too much: 1SEND_B0"),
    ],
)
def test_a_list_out_of_order(spelled: str, message: str) -> None:
    kinds = {kind.value: kind for kind in ActionKind}
    actions = tuple(Action(int(word[0]), kinds[word[1:-1]], int(word[-1])) for word in spelled.split())
    with pytest.raises(InputError, match=message):
        check_inputs(actions, 2, 1)


@dataclass(frozen=True)
class Backwards(Schedule):
    """All stages but the last want gradients before they have sent anything."""

    name: ClassVar[str] = "backwards"

    def programme(self, at: StagePosition) -> Programme:
        forwards, backwards = (FORWARD_TURN, at.num_micro_batches), (BACKWARD_TURN, at.num_micro_batches)
        return (forwards, backwards) if at.last else (backwards, forwards)


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    with pytest.raises(InputError, match="schedule backwards: operations wait for each other for ever: stage 0"):
        lower([StepShape.even(Backwards(), 2, 1)])


# ------------------------------------------------------------------ the simulation


@settings(max_examples=max(10, settings().max_examples // 3))
@given(problems_with_plans(max_batch=20))
def test_the_simulation_does_what_lists_say(case: tuple[Problem, Plan]) -> None:
    """In the same order, and sends the same messages."""
    problem, plan = case
    plan = replace(plan, pipelines=plan.pipelines[:1])
    model = PlanPricer(problem)
    events = list(model.spans(case[1], model.price(case[1]), 0))
    (pipeline,) = plan.pipelines
    count = len(pipeline.stages)
    shape = StepShape.even(plan.schedule, count, pipeline.num_micro_batches, pipeline.num_chunks)
    for stage, actions in enumerate(lower([shape])[0]):
        stage_events = [event for event in events if event.stage == stage]
        for replica in {event.executor for event in stage_events}:
            mine = [e for e in stage_events if e.executor == replica and not e.is_message]
            assert [(e.kind == "backward", e.chunk * count + stage, e.micro_batch) for e in mine] == [
                (a.backward, a.stage, a.micro_batch) for a in actions if isinstance(a, Action) and a.kind in COMPUTES
            ]
        sent = {
            (e.kind == "send_backward", e.chunk * count + stage, e.micro_batch)
            for e in stage_events
            if "send" in e.kind
        }
        sends = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
        assert sent == {
            (a.backward, a.stage, a.micro_batch) for a in actions if isinstance(a, Action) and a.kind in sends
        }

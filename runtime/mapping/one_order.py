"""Whether what ranks do ends, whatever else runs on them: checked before a run, without knowing how it was made."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hexiopt.errors import InputError
from runtime.mapping.lowering import Action, ActionKind, ActionList, UnitCollective


class JointEvent(NamedTuple):
    """Something that `ranks` (ascending) do together, or one alone. Those that are equal are the same one."""

    what: str
    ranks: tuple[int, ...]


def check_one_order(of_ranks: Sequence[Sequence[JointEvent]]) -> None:
    """Raise InputError unless all events of ranks can take place in one order, of which each rank's is a part.

    It is run: an event takes place when it is the next one of all its ranks. The message names who waits for whom.
    """
    at = [0] * len(of_ranks)

    def next_of(rank: int) -> JointEvent | None:
        return of_ranks[rank][at[rank]] if at[rank] < len(of_ranks[rank]) else None

    moved = deque(range(len(of_ranks)))
    while moved:
        event = next_of(moved.popleft())
        if event is not None and all(next_of(rank) == event for rank in event.ranks):
            for rank in event.ranks:
                at[rank] += 1
            moved += event.ranks
    stuck = [(rank, event) for rank in range(len(of_ranks)) if (event := next_of(rank)) is not None]
    if stuck:
        raise InputError("a step would hang: " + "; ".join(_waits(rank, event, next_of) for rank, event in stuck))


def _waits(rank: int, event: JointEvent, next_of: Callable[[int], JointEvent | None]) -> str:
    for other in event.ranks:
        theirs = next_of(other)
        if theirs != event:
            does = "has ended" if theirs is None else f"is at {theirs.what}"
            return f"rank {rank} waits in {event.what} for rank {other}, which {does}"
    raise AssertionError("it could have taken place")


def check_inputs(actions: ActionList, num_virtual_stages: int, num_micro_batches: int) -> None:
    """Raise InputError unless a stage's list has everything once, and after all that it needs."""
    listed = [action for action in actions if isinstance(action, Action)]
    times = Counter(action._replace(part=None) for action in listed)
    begun, done = Counter[Action](), set[Action]()
    split = {action.stage for action in listed if action.kind is ActionKind.INPUT}
    for action in listed:
        whole = action._replace(part=None)
        for need in _needs(whole, num_virtual_stages, whole.stage in split):
            if need not in done:
                raise InputError(f"a step's list is not in order: {action} comes before {need}, which it needs")
        if whole in done or action.part not in (None, begun[whole]) or (action.part is None and times[whole] > 1):
            raise InputError(f"a step's list is not in order: {action} is there twice, or parts of it are missing")
        begun[whole] += 1
        if begun[whole] == times[whole]:
            done.add(whole)
    due = {
        Action(stage, kind, batch)
        for stage in {action.stage for action in listed}
        for kind in set(ActionKind) - (_WHOLE if stage in split else _SPLIT)
        for batch in range(num_micro_batches)
        if not (stage == 0 and kind in _OF_EARLIER) and not (stage == num_virtual_stages - 1 and kind in _OF_LATER)
    }
    if due != done:
        raise InputError(f"a step's list lacks or has too much: {', '.join(sorted(map(str, due ^ done)))}")


def check_units(actions: ActionList, gathers: bool) -> None:
    """Raise InputError unless a stage in lockstep gathers, if it `gathers`, the weights of every part of a forward or
    backward once before it, those of two parts at most at once, and scatters the gradients of every part of a backward
    next of all that it does with units."""
    gathered, unscattered = list[Action](), list[Action]()
    for action in actions:
        match action:
            case UnitCollective(scatters=False, part=part):
                gathered.append(part)
                if len(gathered) > 2 or gathered.count(part) > 1:
                    raise InputError(f"a step's list is not in order: {action} comes before what is gathered is used")
            case UnitCollective(part=part):
                if unscattered != [part]:
                    raise InputError(f"a step's list is not in order: {action} does not follow {part}")
                unscattered.clear()
            case Action(kind=ActionKind.FORWARD | ActionKind.BACKWARD):
                if unscattered:
                    raise InputError(
                        f"a step's list is not in order: {action} comes before a scatter of {unscattered[0]}"
                    )
                if gathers and gathered[:1] != [action]:
                    raise InputError(f"a step's list is not in order: {action} comes before a gather of its weights")
                if gathers:
                    gathered.pop(0)
                if action.kind is ActionKind.BACKWARD:
                    unscattered.append(action)
    if gathered or unscattered:
        unused = gathered + unscattered
        raise InputError(f"a step's list is not in order: nothing uses the weights or gradients of {unused}")


_WHOLE, _SPLIT = {ActionKind.BACKWARD}, {ActionKind.INPUT, ActionKind.WEIGHTS}  # a stage's backwards are these or those
_OF_EARLIER = {ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD}  # exchanged with the virtual stage before
_OF_LATER = {ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD}


def _needs(action: Action, num_virtual_stages: int, is_split: bool) -> list[Action]:
    """What a stage must have done before."""
    backward = Action(action.stage, ActionKind.INPUT if is_split else ActionKind.BACKWARD, action.micro_batch)
    forward = Action(action.stage, ActionKind.FORWARD, action.micro_batch)
    match action.kind:
        case ActionKind.FORWARD:
            return [action.input] if action.stage else []
        case ActionKind.BACKWARD | ActionKind.INPUT:
            return [forward, *([action.input] if action.stage < num_virtual_stages - 1 else [])]
        case ActionKind.SEND_FORWARD:
            return [forward]
        case ActionKind.SEND_BACKWARD | ActionKind.WEIGHTS:
            return [backward]
        case _:
            return []

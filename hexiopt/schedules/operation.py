"""The operations of a pipeline's stages. A schedule says which kinds it has and in which order they come."""

from enum import Enum
from typing import NamedTuple


class OperationKind(Enum):
    """What a stage does for a micro-batch: its value is the word for it, and `step` says whether its messages go to the
    next stage (1), to the one before (-1), or whether it has none (0).

    Where a schedule has WEIGHTS, a backward leaves gradients of weights to them, layer by layer (`split.py`).
    """

    FORWARD = "forward", 1
    BACKWARD = "backward", -1
    WEIGHTS = "weights", 0

    step: int

    def __new__(cls, word: str, step: int) -> "OperationKind":
        """The kind whose value is `word`."""
        kind = object.__new__(cls)
        kind._value_, kind.step = word, step
        return kind

    @property
    def letter(self) -> str:
        """The capital that the literature uses."""
        letter: str = self.value[0].upper()
        return letter

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names, which takes longer


class Turn(NamedTuple):
    """The next operation of a layer range, by the range's number in its stage."""

    kind: OperationKind
    chunk: int


# Of stages that hold one layer range.
FORWARD_TURN = (Turn(OperationKind.FORWARD, 0),)
BACKWARD_TURN = (Turn(OperationKind.BACKWARD, 0),)


class Operation(NamedTuple):
    """An operation of one layer range of a stage for one micro-batch."""

    kind: OperationKind
    chunk: int
    micro_batch: int

    @property
    def backward(self) -> bool:
        """Whether gradients go back."""
        return self.kind is OperationKind.BACKWARD


def next_place(
    kind: OperationKind, stage: int, chunk: int, num_stages: int, num_chunks: int, steps: int = 1
) -> tuple[int, int] | None:
    """(stage, layer range) where the output of an operation goes, or where its input comes from (`steps` -1); None
    where it goes or comes from nowhere.

    Layer range c of stage s is virtual stage c · p + s of p stages.
    """
    at = chunk * num_stages + stage + kind.step * steps
    if not kind.step or not 0 <= at < num_stages * num_chunks:
        return None
    return at % num_stages, at // num_stages

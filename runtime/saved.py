"""What autograd saves, by the part of a rank's memory that it belongs to: said to whoever counts, if anyone does."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor


class SavedCounter(Protocol):
    """Counts saved tensors."""

    def part(self, name: str, transient_bytes: int) -> AbstractContextManager[None]:
        """What is saved in here belongs to that part of `Memory`, with further bytes for the moment."""
        ...

    def pack(self, tensor: Tensor) -> Any:
        """Counts a tensor as saved for as long as what is returned lives."""
        ...


_counters: list[SavedCounter] = []


@contextmanager
def counting(counter: SavedCounter) -> Iterator[None]:
    """What is saved in here is said to `counter`."""
    _counters.append(counter)
    try:
        yield
    finally:
        _counters.pop()


@contextmanager
def label_saved(part: str, transient_bytes: int) -> Iterator[None]:
    """What autograd saves in here belongs to that part of `Memory`, with further bytes for the moment."""
    if not _counters:
        yield
        return
    with _counters[-1].part(part, transient_bytes):
        yield


def count_saved(*tensors: Tensor) -> list[Any]:
    """What counts tensors as saved for as long as it lives: those of products that are put off."""
    return [_counters[-1].pack(tensor) for tensor in tensors] if _counters else []

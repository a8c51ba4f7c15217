"""What a rank of a training run holds, by the parts of `Memory`."""
from collections.abc import Iterator
from contextlib import contextmanager
@contextmanager
def saved_as(part: str) -> Iterator[None]:
    yield

"""Values computed on first use."""

from collections.abc import Callable
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """`memo[key]` is `make(key)`, computed on first use. Beyond `limit` entries the older half is dropped.

    A look-up that hits is a dict's, in C. Whatever else `make` depends on must not change.
    """

    __slots__ = ("_limit", "_make")

    def __init__(self, make: Callable[[K], V], limit: int = 65_536) -> None:
        super().__init__()
        self._make, self._limit = make, limit

    def __missing__(self, key: K) -> V:
        value = self._make(key)
        if len(self) >= self._limit:
            for old in list(islice(self, (len(self) + 1) // 2)):
                del self[old]
        self[key] = value
        return value

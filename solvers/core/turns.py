"""Work that several processes share as each becomes free: what is to be done next, and how often it has been tried."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

_LOOK_AGAIN_S = 0.01


class Turns:
    """Numbers of pieces of work, each with how often it has been tried; at most `most` tries each.

    Whoever is free takes the first of those that were tried least and that nobody is at. With `shared`, processes
    forked from this one take from the same.
    """

    def __init__(self, tries: Sequence[int], most: int, *, shared: bool) -> None:
        self._most = most
        self._lock: AbstractContextManager[object] = nullcontext()
        # Tries so far, `most` where nothing is left to do, and −1 − tries where somebody is at it.
        self._tries: NDArray[np.int32] = np.array(tries, np.int32)
        if shared:
            context = get_context("fork")
            self._lock, kept = context.Lock(), self._tries
            self._tries = np.frombuffer(context.RawArray("i", max(1, len(kept))), np.int32)[: len(kept)]
            self._tries[:] = kept

    def take(self, keep_on: Callable[[], None]) -> tuple[int, int] | None:
        """A number and how often it was tried before; None where all is done. Where others are at all that is left,
        wait for what they give back; `keep_on` is called meanwhile and may raise."""
        while True:
            with self._lock:
                free = np.flatnonzero((self._tries >= 0) & (self._tries < self._most))
                if len(free):
                    number = int(free[self._tries[free].argmin()])
                    tries = int(self._tries[number])
                    self._tries[number] = -1 - tries
                    return number, tries
                if not (self._tries < 0).any():
                    return None
            keep_on()
            time.sleep(_LOOK_AGAIN_S)

    def give_back(self, number: int, *, done: bool) -> None:
        """End a try, with success or to be tried again. After `close`, nothing is tried again."""
        with self._lock:
            if self._tries[number] < 0:
                self._tries[number] = self._most if done else -self._tries[number]

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._lock:
            self._tries[:] = self._most

"""What searches of one run tell each other: the best that each has found, at fixed numbers of its steps.

One search is the hub. The others ask it: each sends what it has and gets what the rest had since it last asked. Where
steps are limited, all wait until everyone has asked, so that what a search hears depends on steps alone; where time is,
nobody waits, and at most one message is under way in either direction.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol


class IncumbentExchange(Protocol):
    """One search's side of it."""

    def swap(self, news: Any) -> list[Any]:
        """Pass on `news` (picklable; None: none), and take what the others have passed on."""


class HubExchange:
    """The side that all others ask; `ends` lead to them. `counted`: whether it waits for all of them."""

    def __init__(self, ends: Sequence[Connection], counted: bool) -> None:
        self._counted = counted
        self._news: dict[Connection, list[Any]] = {end: [] for end in ends}  # not yet passed on to each
        self._own: list[Any] = []
        self._asked: set[Connection] = set()

    def swap(self, news: Any) -> list[Any]:
        """As `IncumbentExchange` says."""
        self._add(news, None)
        self._listen(wait=self._counted)
        self._reply()
        own, self._own = self._own, []
        return own

    def serve(self) -> None:
        """Answer the others without waiting; for a hub whose own search has ended."""
        self._listen(wait=False)
        if not self._counted or self._asked >= self._news.keys():
            self._reply()

    def release(self) -> None:
        """From now on nobody waits."""
        self._counted = False

    def _add(self, news: Any, sender: Connection | None) -> None:
        if news is None:
            return
        for end, waiting in self._news.items():
            if end is not sender:
                waiting.append(news)
        if sender is not None:
            self._own.append(news)

    def _listen(self, *, wait: bool) -> None:
        for end in list(self._news):
            try:
                if end not in self._asked and (wait or end.poll()):
                    self._add(end.recv(), end)
                    self._asked.add(end)
            except (EOFError, OSError):
                self._drop(end)

    def _reply(self) -> None:
        for end in list(self._asked):
            try:
                end.send(self._news[end])
                self._news[end] = []
                self._asked.discard(end)
            except OSError:
                self._drop(end)

    def _drop(self, end: Connection) -> None:
        self._news.pop(end, None)
        self._asked.discard(end)


class MemberExchange:
    """The side of a search that asks the hub, to which `end` leads."""

    def __init__(self, end: Connection, counted: bool) -> None:
        self._end, self._counted = end, counted
        self._unsent: Any = None
        self._waiting = False

    def close(self) -> None:
        """Ask nothing and read nothing any more."""
        self._end.close()

    def swap(self, news: Any) -> list[Any]:
        """As `IncumbentExchange` says; of unsent news, the latest are passed on."""
        self._unsent = self._unsent if news is None else news
        try:
            if not self._waiting:
                self._end.send(self._unsent)
                self._unsent, self._waiting = None, True
            if not self._counted and not self._end.poll():
                return []
            found: list[Any] = self._end.recv()
            self._waiting = False
            return found
        except (EOFError, OSError):  # the hub has ended
            return []

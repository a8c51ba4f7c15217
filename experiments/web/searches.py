"""Searches for the page: one at a time, each a process that ends with the request which began it."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_JOB = f"{__package__}.job"
_BEAT_S = 0.5  # after which it is looked whether the browser is still there
_BEGIN_S = 10.0
_GRACE_S = 2.0  # to end by itself
_MOST_FOLDERS = 8  # whose files can be had
_MAX_LINE_BYTES = 2**22


@dataclass
class Searches:
    """Searches whose files are below `folder`."""

    folder: Path
    _process: asyncio.subprocess.Process | None = None
    _taken_until_s: float = 0.0
    _keys: list[str] = field(default_factory=list)

    def take(self) -> bool:
        """Take the right to the next search, for as long as it takes to begin one; False where one is running."""
        running = self._process is not None and self._process.returncode is None
        if running or time.monotonic() < self._taken_until_s:
            return False
        self._taken_until_s = time.monotonic() + _BEGIN_S
        return True

    def file(self, key: str, name: str) -> Path:
        """The file of a search, which need not exist. Raises KeyError for a search that is not known."""
        if key not in self._keys:
            raise KeyError(key)
        return self.folder / key / name

    async def run(self, question: dict[str, Any], has_left: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """What the search says, a line of JSON each, and empty ones while it is silent; it ends early when the browser
        `has_left`, and with this iterator."""
        key, process = self._new_folder(), None
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _JOB, str(self.folder / key)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
            self._taken_until_s = 0.0
            assert process.stdin is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            yield _line(key=key)
            ended = False
            async for line in _lines(process, has_left):
                ended = ended or b'"done": true' in line
                yield line
            if not ended and not await has_left():
                await process.wait()
                yield _line(done=True, refused=f"the search ended unexpectedly, with code {process.returncode}")
        finally:
            if process is not None:
                await _end(process)
            self._taken_until_s = 0.0

    def _new_folder(self) -> str:
        key = secrets.token_urlsafe(8)
        (self.folder / key).mkdir()
        self._keys.append(key)
        while len(self._keys) > _MOST_FOLDERS:
            shutil.rmtree(self.folder / self._keys.pop(0), ignore_errors=True)
        return key


def _line(**news: Any) -> bytes:
    return json.dumps(news).encode() + b"\n"


async def _lines(process: asyncio.subprocess.Process, has_left: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    reading = asyncio.ensure_future(process.stdout.readline())
    try:
        while not await has_left():
            done, _ = await asyncio.wait([reading], timeout=_BEAT_S)
            if not done:
                yield b"\n"
                continue
            line = reading.result()
            if not line:
                return
            yield line
            reading = asyncio.ensure_future(process.stdout.readline())
    finally:
        reading.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), _GRACE_S)
        except TimeoutError:
            continue
    await process.wait()

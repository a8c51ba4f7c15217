"""Signs of life of the processes of a machine, in a file each, which their agent reads."""

import os
import struct
import threading
import time
from pathlib import Path
from statistics import median

_BEAT_S = 1.0
_SILENT_STEPS = 5
_RECENT = 20  # steps that say how long one usually takes
START_S = 120.0  # in which a spawned process must have imported torch, before it can give a sign of life
_FORMAT = struct.Struct("=4d")  # alive until, a step ends until (seconds of the monotonic clock), and both limits


class Vitals:
    """Tells the agent that this process lives, once a second, and that its steps end.

    A process is lost when it gives no sign of life for `silence_s`, or for as long as five steps usually take. One
    that lives may still wait for ever for others that do not: it is lost too when no step has ended for that long and
    `timeout_s`, the limit of messages and collectives. The first step may take longer: operators are compiled and
    communicators made in it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(_path(folder, os.getpid()), os.O_WRONLY | os.O_CREAT, 0o600)
        self._silence_s, self._timeout_s = START_S, 0.0
        self._steps_s: list[float] = []
        self._step_until, self._step_limit_s = float("inf"), 0.0
        self._beat()
        threading.Thread(target=self._beat_for_ever, daemon=True).start()

    def limit(self, silence_s: float, timeout_s: float) -> None:
        """State the limits, which were those of a start."""
        self._silence_s, self._timeout_s = silence_s, timeout_s
        self._beat()

    def step_ended(self, seconds: float) -> None:
        """A step has ended that took so long."""
        self._steps_s = [*self._steps_s[1 - _RECENT :], seconds]
        self.note_progress()

    def note_progress(self) -> None:
        """Something has ended that counts as a step."""
        if self._steps_s:
            self._step_limit_s = self._limit_s() + self._timeout_s
            self._step_until = time.monotonic() + self._step_limit_s
            self._beat()

    def _limit_s(self) -> float:
        return max(self._silence_s, _SILENT_STEPS * median(self._steps_s) if self._steps_s else 0.0)

    def _beat(self) -> None:
        limit_s = self._limit_s()
        values = time.monotonic() + limit_s, self._step_until, limit_s, self._step_limit_s
        os.pwrite(self._file, _FORMAT.pack(*values), 0)

    def _beat_for_ever(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            self._beat()


def silence_of(folder: Path, pid: int) -> tuple[float, str] | None:
    """What is wrong with the process `pid`, if anything: until when nothing was, and in words."""
    try:
        alive, step, limit_s, step_limit_s = _FORMAT.unpack(_path(folder, pid).read_bytes())
    except (FileNotFoundError, struct.error):
        return None  # it is starting
    now = time.monotonic()
    if now > alive:
        return alive, f"has given no sign of life for {limit_s:.0f} s"
    if now > step:
        return step, f"has ended no step for {step_limit_s:.0f} s"
    return None


def forget(folder: Path) -> None:
    """Remove the files of processes that have ended."""
    for path in folder.glob("vitals-*"):
        path.unlink(missing_ok=True)


def _path(folder: Path, pid: int) -> Path:
    return folder / f"vitals-{pid}"

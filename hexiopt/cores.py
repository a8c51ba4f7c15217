"""The processor cores that this process may use."""

import os


def usable_cores() -> int:
    """The cores that the operating system lets this process run on, where it tells (Linux), else all; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))

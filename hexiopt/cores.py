"""The processor cores that this process may use."""

import os


def usable_cores() -> int:
    """The number of cores that this process may run on, as far as the operating system tells (Linux), else of all."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))

"""The machine that measures."""

import os
import platform


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine() -> str:
    """The machine in words."""
    return f"{num_cores()} cores, {platform.machine()}, Python {platform.python_version()}"

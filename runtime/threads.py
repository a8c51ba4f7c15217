"""Threads of the processes that compute on one CPU."""

import os


def threads_of_each(num_processes: int) -> int:
    """How many threads each of some processes has, of the cores that this one may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)

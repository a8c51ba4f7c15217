"""Threads of the processes that compute on one CPU."""

from hexiopt.cores import usable_cores


def threads_of_each(num_processes: int) -> int:
    """How many threads each of some processes has, of the cores that this one may run on."""
    return max(1, usable_cores() // num_processes)

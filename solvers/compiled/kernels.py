"""How the kernels of the compiled search are compiled.

They allocate nothing, so none counts references (`_nrt`), which takes more than half of the time otherwise. Those that
no Python calls have no wrappers, which take a third of the time to compile.

numba keeps what it compiled until the file of the function changes, not those of the functions that it calls: so a file
with entries is as new as the newest beside it and here.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
_ALONE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@cache
def _renew(source: str) -> None:
    """Make a file as new as those whose kernels it calls."""
    own = Path(source)
    with suppress(OSError):  # who cannot write there has not changed anything either
        newest = max(
            path.stat().st_mtime_ns for folder in {own.parent, Path(__file__).parent} for path in folder.glob("*.py")
        )
        if newest > own.stat().st_mtime_ns:
            os.utime(own, ns=(newest, newest))


def entry(function: Function) -> Function:
    """Compile a function that Python calls."""
    _renew(function.__code__.co_filename)
    compiled: Function = numba.njit(**_OPTIONS)(function)
    return compiled


def kernel(function: Function) -> Function:
    """Compile a function that compiled ones alone call."""
    compiled: Function = numba.njit(**_OPTIONS, **_ALONE)(function)
    return compiled

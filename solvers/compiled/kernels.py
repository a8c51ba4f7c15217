"""How the kernels of the compiled search are compiled.

They allocate nothing, so none counts references (`_nrt`), which takes more than half of the time otherwise. Those that
no Python calls have no wrappers, which take a third of the time to compile.

numba keeps what it compiled until the file of the function changes, and does not look at the files of the functions
that it calls. So what is kept of a folder goes once a file with kernels there, or here, is newer.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
_ALONE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def entry(function: Function) -> Function:
    """Compile a function that Python calls."""
    return _compiled(function, _OPTIONS)


def kernel(function: Function) -> Function:
    """Compile a function that compiled ones alone call."""
    return _compiled(function, _OPTIONS | _ALONE)


def _compiled(function: Function, options: dict[str, Any]) -> Function:
    forget_stale(Path(function.__code__.co_filename).parent)
    compiled: Function = numba.njit(**options)(function)
    return compiled


@cache
def forget_stale(folder: Path) -> None:
    """Delete what numba keeps of a folder from before the last change of a file with kernels there, or here. It could
    not even read an index that names a type which is gone."""
    sources = (path for own in {folder, Path(__file__).parent} for path in own.glob("*.py"))
    changed_s = max((path.stat().st_mtime for path in sources if b"kernel" in path.read_bytes()), default=0.0)
    for path in _cached(folder):
        with suppress(OSError):  # another process has deleted it, or nobody may
            if path.stat().st_mtime < changed_s:
                path.unlink()


def _cached(folder: Path) -> Iterator[Path]:
    """The files that numba keeps of a folder: beside it, or where the environment says."""
    yield from (folder / "__pycache__").glob("*.nb[ic]")
    if elsewhere := os.environ.get("NUMBA_CACHE_DIR"):
        yield from Path(elsewhere).glob(f"{folder.name}_*/*.nb[ic]")

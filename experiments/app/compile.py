"""Compiles all numba kernels once per machine, so that no search spends its time limit on it; `make install` runs it.

python -m experiments.app.compile
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hexiopt
from hexiopt.own_packages import HOME

SOURCES = (
    "hexiopt/cost/clock/events.py",
    "hexiopt/bounds/box_stages.py",
    "hexiopt/bounds/kernel.py",
    "solvers/compiled/batches.py",
    "solvers/compiled/gathers.py",
    "solvers/compiled/late.py",
    "solvers/compiled/layers.py",
    "solvers/compiled/messages.py",
    "solvers/compiled/pipelines.py",
    "solvers/compiled/rings.py",
    "solvers/compiled/state.py",
    "solvers/compiled/step.py",
    "solvers/loop/dice.py",
    "solvers/loop/edits.py",
    "solvers/loop/grids.py",
    "solvers/loop/pipeline_moves.py",
    "solvers/loop/rebuild.py",
    "solvers/loop/stage_moves.py",
    "solvers/loop/starts.py",
    "solvers/loop/templates.py",
    "solvers/loop/walk.py",
    "solvers/proof/joint.py",
    "solvers/proof/kernels.py",
    "solvers/proof/pipeline_search.py",
    "solvers/proof/sums.py",
)
_PARTS = ("bounds", "search")  # of `kernels.py`
_ROOTS = {"hexiopt": Path(hexiopt.__file__).resolve().parent.parent, "solvers": HOME}
_KERNEL = re.compile(r"^@(?:numba\.(?:njit|vectorize)\(.*cache=True.*|kernel|entry)\ndef (\w+)", re.MULTILINE)
_WIDE = Path.home() / ".cache" / "numba"  # where numba keeps what it cannot keep beside the sources


def compile_once() -> None:
    """Run `main`, and say so, where numba's cache lacks a kernel or has one of older sources."""
    if next(missing_kernels(), None) is not None:
        when = "before the search and its time limit begin (make install does it too)"
        print(f"hexiopt: compiling once, for one to three minutes, {when}", file=sys.stderr, flush=True)
        main()


def missing_kernels() -> Iterator[str]:
    """The kernels that numba would compile. Importing one compiles it, so this reads names and times of files."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return
    cache_folder = os.environ.get("NUMBA_CACHE_DIR")
    elsewhere = list((Path(cache_folder) if cache_folder else _WIDE).rglob("*.nbi"))
    for source in SOURCES:
        path = _ROOTS[source.partition("/")[0]] / source
        text, changed_s = path.read_text(encoding="utf-8"), path.stat().st_mtime
        files = [*elsewhere, *([] if cache_folder else (path.parent / "__pycache__").glob("*.nbi"))]
        there = {file.name.partition(".py3")[0] for file in files if file.stat().st_mtime >= changed_s}
        for kernel in _KERNEL.finditer(text):
            if f"{path.stem}.{kernel[1]}-{text.count(chr(10), 0, kernel.start()) + 1}" not in there:
                yield f"{path.stem}.{kernel[1]}"


def main() -> list[str]:
    """Compile the search beside bounds and proof, in two processes; the parts that failed. What they leave out, numba
    compiles when it is first called."""
    from solvers.compiled.kernels import forget_stale  # here, because numba takes a second to start

    for folder in sorted({(_ROOTS[source.partition("/")[0]] / source).parent for source in SOURCES}):
        forget_stale(folder)
    command = [sys.executable, "-P", "-m", f"{__package__}.kernels"]  # apart: it imports all that searches
    processes = {part: subprocess.Popen([*command, part]) for part in _PARTS}
    return [part for part, process in processes.items() if process.wait()]


def check_all() -> None:
    """Run `main`. Exits with a line where a part failed, or calls none of the functions that need a kernel."""
    if failed := main():
        sys.exit(f"compiling: failed: {', '.join(failed)}; the error stands above")
    if left := list(missing_kernels()):
        sys.exit(f"compiling: no part of kernels.py calls {', '.join(left)}; add the calls there")


if __name__ == "__main__":
    check_all()

"""How `pip` builds this project: as setuptools does, but in a wheel all packages stand inside of `hexiopt`.

A checkout's packages are imported as `conf`, `experiments`, `runtime` and `solvers`, names that an environment of a
user's may need for others. In a wheel they are `hexiopt.packages.conf` and so on: their files are moved, and imports
that name them with them. Nothing else is rewritten; modules that need a name as text ask `hexiopt/own_packages.py`, or
use their own `__package__`.
"""

import ast
import base64
import hashlib
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # what pip asks a backend for
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]
_INSIDE = "hexiopt.packages."  # `hexiopt.solvers` is a function


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel into `wheel_directory`; returns its file name."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    move_into_hexiopt(Path(wheel_directory, name))
    return name


def move_into_hexiopt(wheel: Path) -> None:
    """Rewrite the wheel with all its other packages inside of `hexiopt`."""
    with zipfile.ZipFile(wheel) as before:
        files = {item.filename: (item, before.read(item)) for item in before.infolist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    top = {name.partition("/")[0] for name in files}
    moved = sorted(top - {"hexiopt", record.partition("/")[0]})
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as after:
        for name, (item, data) in files.items():
            if name == record:
                continue
            item.filename = f"hexiopt/packages/{name}" if name.partition("/")[0] in moved else name
            data = _content(name, data, moved)
            after.writestr(item, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{item.filename},sha256={digest},{len(data)}\n")
        after.writestr(record, "".join([*lines, f"{record},,\n"]))


def _content(name: str, data: bytes, moved: Sequence[str]) -> bytes:
    if name.endswith(".py"):
        return with_moved_imports(data.decode("utf-8"), moved).encode("utf-8")
    if name.endswith(".dist-info/top_level.txt"):
        return b"hexiopt\n"
    if name.endswith((".dist-info/entry_points.txt", ".yaml")):  # `own = solvers.registry:BUILT_IN`, Hydra's `_target_`
        target = rf"^( *(?:_target_: |\w+ = ))(?=(?:{'|'.join(moved)})[.])"
        return re.sub(target, rf"\1{_INSIDE}", data.decode("utf-8"), flags=re.MULTILINE).encode("utf-8")
    return data


def with_moved_imports(source: str, moved: Sequence[str]) -> str:
    """A module's source, with its imports of the packages `moved` from inside of `hexiopt`; lines stay where they are.

    Raises ValueError for `import solvers.x`, which is used by a name that is not the same there.
    """
    lines = source.encode("utf-8").splitlines(keepends=True)  # columns are those of UTF-8
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in moved for alias in node.names):
            raise ValueError(f"{ast.unparse(node)}: write from ... import ..., which holds in a wheel too")
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in moved:
            line, at = lines[node.lineno - 1], node.col_offset
            lines[node.lineno - 1] = line[:at] + re.sub(rb"^from\s+", f"from {_INSIDE}".encode(), line[at:])
    return b"".join(lines).decode("utf-8")

"""A stranger's package, as pip would have installed it: a module and its entry point, in a folder on the path."""

import sys
from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, code: str, **solvers: str) -> None:
    """Put `module` with `code` into `folder`, and the folder on the path; `solvers` are its classes by solver name."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = "".join(f"{name} = {module}:{made}\n" for name, made in solvers.items())
    (info / "entry_points.txt").write_text(f"[hexiopt.solvers]\n{points}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)

"""What numba keeps of compiled kernels goes once a file that they may call is newer."""

import os
from pathlib import Path

import pytest

from solvers.compiled import kernels


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_compiled_before_a_change_is_forgotten(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "moves"
    cache_folder = tmp_path / "cache" / "moves_1a2b" if elsewhere else folder / "__pycache__"
    cache_folder.mkdir(parents=True)
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    changed_s = max(path.stat().st_mtime for path in Path(kernels.__file__).parent.glob("*.py")) + 100
    for name, made_s in (("callee.py", changed_s), ("caller.py", changed_s - 50)):
        (folder / name).write_text("@kernel")
        os.utime(folder / name, (made_s, made_s))
    (folder / "without.py").touch()
    os.utime(folder / "without.py", (changed_s + 50, changed_s + 50))
    for name, made_s in (("caller.walk-1.nbi", changed_s - 1), ("caller.walk-1.1.nbc", changed_s + 1)):
        (cache_folder / name).touch()
        os.utime(cache_folder / name, (made_s, made_s))
    kernels.forget_stale(folder)
    assert [path.name for path in cache_folder.iterdir()] == ["caller.walk-1.1.nbc"]

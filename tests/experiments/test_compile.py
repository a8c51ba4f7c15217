"""What `make install` compiles. Whether that is all, it says itself: nothing else begins without a compiled kernel."""

import os
import re
from pathlib import Path

import pytest

from experiments.app import compile as compiling
from experiments.app.compile import SOURCES, check_all, compile_once, missing_kernels
from tests.conftest import ROOT

_COMPILED = re.compile(r"^@(?:numba\.(?:njit|vectorize)\(.*cache=True.*|kernel|entry)\ndef (\w+)", re.MULTILINE)


def test_what_is_missing_or_older_than_its_source_is_compiled_before_a_search_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [path for folder in ("hexiopt", "solvers") for path in (ROOT / folder).rglob("*.py")]
    assert set(SOURCES) == {str(path.relative_to(ROOT)) for path in sources if _COMPILED.search(path.read_text())}
    runs: list[int] = []
    monkeypatch.setattr(compiling, "main", lambda: runs.append(1))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernels = list(missing_kernels())
    assert {"events.ends_s", "kernel.least_prices"} <= set(kernels)
    compile_once()
    assert (len(runs), capsys.readouterr().err.count("hexiopt: compiling once")) == (1, 1)
    for path in (ROOT / source for source in SOURCES):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if text.startswith(("@numba.njit", "@numba.vectorize", "@kernel", "@entry")):
                name = path.read_text().splitlines()[line].removeprefix("def ").partition("(")[0]
                (tmp_path / f"{path.stem}.{name}-{line}.py311.nbi").touch()
    assert not list(missing_kernels())
    compile_once()
    assert (len(runs), capsys.readouterr().err) == (1, "")
    for old in tmp_path.glob("events.ends_s-*"):
        os.utime(old, (1.0, 1.0))
    assert list(missing_kernels()) == ["events.ends_s"]
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    compile_once()
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("failed", "message"), [([], r"no part of kernels.py calls .*events\.ends_s, "), (["search"], "failed: search; ")]
)
def test_installing_ends_where_a_kernel_is_left_out_or_a_part_fails(
    failed: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "main", lambda: failed)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=message):
        check_all()


def test_parts_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_PARTS", ("unknown",))
    assert compiling.main() == ["unknown"]


def test_what_numba_keeps_of_older_sources_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before the last change of a file with kernels in its folder; and what is newer stays."""
    cached = tmp_path / "hexiopt" / "__pycache__"
    cached.mkdir(parents=True)
    (tmp_path / "hexiopt" / "law.py").write_text("# a kernel\n")
    for name in ("old", "new"):
        (cached / f"law.{name}-1.py311.nbi").touch()
    os.utime(cached / "law.old-1.py311.nbi", (1.0, 1.0))
    later_s = (tmp_path / "hexiopt" / "law.py").stat().st_mtime + 1e6  # after the file of `forget_stale`, too
    os.utime(cached / "law.new-1.py311.nbi", (later_s, later_s))
    monkeypatch.setattr(compiling, "SOURCES", ("hexiopt/law.py",))
    monkeypatch.setattr(compiling, "_ROOTS", {"hexiopt": tmp_path})
    monkeypatch.setattr(compiling, "_PARTS", ())
    assert compiling.main() == []
    assert [path.name for path in cached.iterdir()] == ["law.new-1.py311.nbi"]

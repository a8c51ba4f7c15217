"""Notebooks run from top to bottom with --quick, and draw what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path), "--quick"]
    ran = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    picture = ran.stdout.splitlines()[-1]
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "# %% [markdown]" in path.read_text(encoding="utf-8")

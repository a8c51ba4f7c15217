"""What `make install` compiles."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_COMPILED = re.compile(r"^@numba\.njit\(.*cache=True.*\)\ndef (\w+)", re.MULTILINE)


@pytest.mark.slow
def test_every_kernel_is_compiled_before_a_search_needs_it(tmp_path: Path) -> None:
    sources = [path for folder in ("hexiopt", "solvers") for path in (ROOT / folder).rglob("*.py")]
    kernels = {f"{path.stem}.{name}" for path in sources for name in _COMPILED.findall(path.read_text())}
    assert {"kernel.ends_s", "kernel.fewest"} <= kernels
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "experiments.app.compile"], cwd=ROOT, env=environment, check=True)
    assert kernels == {path.name.rsplit("-", 1)[0] for path in tmp_path.rglob("*.nbi")}

"""A server of the page, as its user starts it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that `hexiopt page` prints, with its token."""
    pytest.importorskip("starlette", reason="needs starlette: pip install 'hexiopt[page]'")
    pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'hexiopt[page]'")
    folder: Path = tmp_path_factory.mktemp("page")
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "hexiopt", "page", "page.port=0", "hydra.run.dir=out"]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", line), line
        yield line
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) in (0, 130)
    assert not list(folder.glob("hexiopt-page-*")), "what searches wrote is removed"

"""Fixtures of all tests: the command line in this process, in an empty folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code and output."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def hexiopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `hexiopt ARGS` with an empty folder as working directory, which is `tmp_path`."""
    from experiments.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEXIOPT_DEBUG", raising=False)

    def run(*args: str) -> Ran:
        capsys.readouterr()
        code = main(list(args))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run

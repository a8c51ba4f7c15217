"""Fixtures of all tests: the command line in this process, in an empty folder; a browser.

Property tests draw the same examples in every run, so that a failure is a change's own; `make stress` draws new ones
(`HYPOTHESIS_PROFILE=new`).
"""

import gc
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may slow a machine down
settings.register_profile("same", UNTIMED, derandomize=True, max_examples=25)
settings.register_profile("new", UNTIMED, print_blob=True, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).parent.parent
# Tests fork, which no process can that has touched a GPU: they compute on the CPU, but for some that start processes.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("COLUMNS", None)  # the width of tables is not that of the terminal that runs the tests
STRESS = os.environ.get("HEXIOPT_STRESS") == "1"  # whole sweeps, by `make stress`


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: millions of objects that stay, a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code and output."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def _end_workers() -> None:
    """End joblib's worker processes: kept for the next sweep, they would write into this test's folder."""
    executor = sys.modules.get("joblib.externals.loky.reusable_executor")
    if executor is not None and executor._executor is not None:
        executor._executor.shutdown(wait=True)


@pytest.fixture
def hexiopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `hexiopt ARGS` with an empty folder as working directory, which is `tmp_path`."""
    from experiments.app.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEXIOPT_DEBUG", raising=False)

    def run(*args: str) -> Ran:
        capsys.readouterr()
        code = main(list(args))
        captured = capsys.readouterr()
        _end_workers()
        return Ran(code, captured.out, captured.err)

    return run


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; skips where Playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as started:
        path = next(filter(None, map(shutil.which, CHROMIUM)), None)
        try:
            chromium = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()

"""The Python of the README and of its page runs as written, block after block, in an empty folder."""

import re
from pathlib import Path
from typing import Any

import pytest

import hexiopt
from hexiopt.bounds import bound_under_s
from hexiopt.solving import Budget
from tests.conftest import ROOT

README = ROOT / "README.md"


def run(page: Path) -> dict[str, Any]:
    """The names that the blocks of a page leave."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return names


def check_readme(names: dict[str, Any], printed: str, folder: Path) -> None:
    lines = printed.splitlines()
    assert lines[0] == "llama2_7b on hexiscale_setting_2"
    assert len(lines) <= 10
    assert hexiopt.load_plan(folder / "plan.json") == names["result"].plan


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_begins_with_it() -> None:
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^```(\w+)$", text, re.MULTILINE)[0] == "python"


def test_the_readme_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a budget of a few steps; a slow test runs it as written."""
    pytest.importorskip("pymetis")
    for verb in ("solve", "compare"):
        few_steps = lambda time_limit_s, max_steps: Budget(600.0, max_steps or 5)  # noqa: E731
        monkeypatch.setattr(f"hexiopt.study.{verb}.Budget", few_steps)
    at_once = lambda pricer, problem, limit_s: bound_under_s(pricer, problem, 0.0)  # noqa: E731
    monkeypatch.setattr("hexiopt.study.price.bound_under_s", at_once)
    check_readme(run(README), capsys.readouterr().out, folder)


@pytest.mark.slow
def test_the_readme_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pymetis")
    names = run(README)
    check_readme(names, capsys.readouterr().out, folder)


@pytest.mark.slow
def test_its_page_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(ROOT / "docs" / "python.md")
    stdout = capsys.readouterr().out
    assert "every rule is kept" in stdout
    assert "8 jobs: 8 done" in stdout
    assert names["jobs"]["exit_code"].count(0) == 8
    assert {"timeline.png", "compared.png", "freedoms.png", "sweep", "job", "problem.json"} == {
        path.name for path in folder.iterdir()
    }


@pytest.mark.slow
def test_questions_are_answered_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(ROOT / "docs" / "questions.md")
    assert "every rule is kept" in capsys.readouterr().out
    assert names["fit"]["fits"][0] == "yes"
    assert (folder / "whatif.png").is_file()

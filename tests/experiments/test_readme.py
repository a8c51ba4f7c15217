"""The README's commands run.

Every line of a `bash` block that starts with hexiopt is run, in order, in one folder that holds the README's
files (a `yaml` block whose first line is `# NAME`) and experiments/data. A budget in steps, which means the same on
every machine, is appended to commands that search, and no time for the bound where none is stated; the many searches
of a sweep draw no report, and `profile` is given little time; of the published runs every tenth is left, and `validate`
takes those of the folder. Lines that start with make or source are not run.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, Run

RUNS = "experiments/data/measured_training_throughput.csv"
QUICK = {"profile": ["profile.seconds=0.02", "profile.processes=1"], "validate": [f"data={RUNS}"]}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parsed = [shlex.split(line, comments=True) for line in lines if line.strip()]
    for words in parsed:
        assert words[0] in ("hexiopt", "make", "source"), f"what is {words}?"
    return [words[1:] for words in parsed if words[0] == "hexiopt"]


def searches(words: list[str]) -> bool:
    about = ("--help", "-sc", "--cfg")
    given = words[0] in ("plan", "compare", "explain", "train", "emulate") and not any(word in about for word in words)
    return given and not any(word.startswith("plan=") for word in words)


def budget(words: list[str]) -> list[str]:
    if "-m" in words:
        return ["solver.max_steps=30", "bound.time_limit_s=0", "report=false"]
    if words[0] == "train":
        return ["solver.max_steps=100", "workload=small", "workload.global_batch=4"]
    if words[0] == "emulate":  # as fast as it goes
        return ["solver.max_steps=100", "emulate.steps=1", "emulate.dilation=0.1", "emulate.solvers=[megatron]"]
    stated = any(word.startswith("bound.") for word in words)
    return ["solver.max_steps=100", *([] if stated else ["bound.time_limit_s=0"])]


def test_the_readmes_commands_run(hexiopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    pytest.importorskip("joblib")
    shutil.copytree(ROOT / "experiments" / "data", tmp_path / "experiments" / "data")
    runs = tmp_path / RUNS
    head, *rows = runs.read_text(encoding="utf-8").splitlines()
    runs.write_text("\n".join([head, *rows[::10]]), encoding="utf-8")
    for block in blocks("yaml"):
        name = block.splitlines()[0].removeprefix("# ").strip()
        (tmp_path / name).write_text(block)
    found = commands()
    assert len(found) > 10
    for words in found:
        ran = hexiopt(*words, *(budget(words) if searches(words) else QUICK.get(words[0], [])))
        assert ran.code == 0, f"{shlex.join(words)}: {ran.err}"
        assert ran.out


def test_the_readme_names_every_solver_and_verb() -> None:
    from experiments.verbs import VERBS
    from solvers.registry import names

    for name in (*names(), *VERBS):
        assert f"| `{name}` |" in README, name


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

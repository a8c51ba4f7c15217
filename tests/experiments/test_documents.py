"""The commands of the README and of the documents run, their links lead somewhere, and they name what there is.

Every line of a `bash` block that starts with hexiopt is run, page by page and in order, in a folder that holds the
page's files (a `yaml` block whose first line is `# NAME`) and experiments/data. Commands that search get a budget in
steps, which means the same on every machine, and no time for the bound where none is stated; the many searches of a
sweep draw no report, and `profile` gets little time; `validate` gets every tenth of the published runs. Lines that
start with make or source are not run, nor, but in the README, what tests of their own run so, and those that an earlier
one is like but for values, unless another needs what they write.
"""

import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest

from experiments.app.common import config_names
from experiments.app.config import READS
from experiments.app.flags import parse
from experiments.app.verb_help import refuse_unread
from experiments.app.verbs import VERBS
from solvers.registry import BUILT_IN
from tests.conftest import ROOT, Run

RUNS = "experiments/data/measured_training_throughput.csv"
QUICK = {
    "fit": ["solver.max_steps=5", "fit.precision=1"],
    "profile": ["profile.seconds=0.02", "profile.processes=1"],
    "replan": ["solver.max_steps=40"],
    "validate": [f"data={RUNS}"],
}
OWN_TESTS = (  # beginnings of commands that tests of their own run so
    *("calibrate", "emulate", "export export.checkpoint"),
    *("train plan=", "train cluster=small_mixed model=tiny "),
)
README = ROOT / "README.md"
AGENTS = ROOT / "AGENTS.md"
PAGES = [README, AGENTS, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    parsed = [shlex.split(line, comments=True) for line in lines if line.strip()]
    for words in parsed:
        assert words[0] in ("hexiopt", "make", "source"), f"what is {words}?"
    return [words[1:] for words in parsed if words[0] == "hexiopt"]


def searches(words: list[str]) -> bool:
    about = ("--help", "-sc", "--cfg")
    given = words[0] in ("plan", "compare", "explain", "train", "emulate", "import") and not any(
        word in about for word in words
    )
    return given and not any(word.startswith("plan=") for word in words)


def budget(words: list[str]) -> list[str]:
    bound = ["bound.time_limit_s=0"] if "bound" in READS[words[0]] else []
    if "-m" in words:
        return ["solver.max_steps=15", *bound, "report=false"]
    if words[0] == "train":
        return ["solver.max_steps=100", "workload=small", "workload.global_batch=4"]
    if words[0] == "emulate":  # as fast as it goes
        return ["solver.max_steps=100", "emulate.steps=1", "emulate.dilation=0.1", "emulate.solvers=[megatron]"]
    stated = any(word.startswith("bound.") for word in words)
    return ["solver.max_steps=40", *([] if stated else bound)]


RUNNABLE = [page for page in PAGES if commands(page) and page.name != "add_a_solver.md"]  # whose solver is none of ours


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_commands_name_what_there_is(page: Path) -> None:
    """Verbs, flags, keys and configurations; slow tests run them."""
    written = {block.splitlines()[0].removeprefix("# ").strip() for block in blocks(page, "yaml")}
    for verb, *words in commands(page):
        assert verb in VERBS or verb.startswith("-"), verb
        flags = parse(words)
        if verb not in VERBS or flags.shell_completion:
            continue
        refuse_unread(verb, flags.overrides)
        keys = {key.partition(".")[0] for key in READS[verb]} | {"hydra", "experiment", "sweep"}
        for key, _, value in (word.lstrip("+~").partition("=") for word in flags.overrides):
            assert key.partition(".")[0].partition("/")[0] in keys, key
            if key in ("cluster", "model", "experiment"):
                for name in value.split(","):
                    assert name in {*config_names(key), *written} or "/" in name, name


@cache
def commands_to_run(page: Path) -> list[list[str]]:
    earlier = {like(words) for other in RUNNABLE[: RUNNABLE.index(page)] for words in commands_to_run(other)}
    chosen: list[list[str]] = []
    for words in reversed(commands(page)):  # those that need a folder before those that write it
        folder = next((word.partition("=")[2] for word in words if word.startswith("hydra.run.dir=")), None)
        needed = folder is not None and any(folder in word for later in chosen for word in later)
        tested = page != README and " ".join(words).startswith(OWN_TESTS)
        if not tested and (needed or like(words) not in earlier):
            chosen.insert(0, words)
    return chosen


def like(words: list[str]) -> tuple[str, frozenset[str]]:
    """Verb and keys of a command, without folders."""
    keys = {word.partition("=")[0] for word in words[1:]}
    return words[0], frozenset(keys - {"hydra.run.dir", "hydra.sweep.dir"})


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(commands_to_run, RUNNABLE)], ids=lambda page: page.name)
def test_commands_run(page: Path, hexiopt: Run, tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    pytest.importorskip("joblib")
    shutil.copytree(ROOT / "experiments" / "data", tmp_path / "experiments" / "data")
    runs = tmp_path / RUNS
    head, *rows = runs.read_text(encoding="utf-8").splitlines()
    runs.write_text("\n".join([head, *rows[::10]]), encoding="utf-8")
    for block in blocks(page, "yaml"):
        name = block.splitlines()[0].removeprefix("# ").strip()
        (tmp_path / name).write_text(block)
    for words in commands_to_run(page):
        ran = hexiopt(*words, *(budget(words) if searches(words) else QUICK.get(words[0], [])))
        assert ran.code == 0, f"{shlex.join(words)}: {ran.err}"
        assert ran.out


def test_readme_and_pages_show_enough_commands() -> None:
    assert len(commands(README)) >= 5
    assert sum(len(commands(page)) for page in PAGES) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_solver_and_verb_has_its_row() -> None:
    solvers = (ROOT / "docs" / "solvers.md").read_text(encoding="utf-8")
    for name in BUILT_IN:
        assert f"| `{name}` |" in solvers, name
    planning = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for name in VERBS:
        assert f"| `{name}` |" in planning, name


def test_what_scripts_are_told_names_every_verb_in_80_lines() -> None:
    text = AGENTS.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert [name for name in VERBS if not re.search(rf"`(hexiopt )?{name}\b", text)] == []


def test_the_readme_fits_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8")) <= 6000


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", README.read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

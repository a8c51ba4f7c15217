"""The code of the pages on how to add a schedule and a baseline does what they say."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.solving import Budget
from tests.conftest import ROOT
from tests.solvers import problems
from tests.solvers.baselines import problems as mixed
from tests.solvers.baselines import published_spaces
from tests.solvers.baselines.random_plans import random_plans
from tests.spans import all_spans


def definitions(page: str) -> SimpleNamespace:
    """What the first block of Python on a page defines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": page.removesuffix(".md")}
    exec(compile(block, page, "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


def test_a_schedule_of_the_page_is_priced_simulated_and_checked() -> None:
    problem = problems.loose()
    layers, devices = problem.model.num_layers, problem.usable_devices
    stages = tuple(Stage.of((d,), s * layers // 2, (s + 1) * layers // 2) for s, d in enumerate(devices[:2]))
    plan = Plan((Pipeline(stages, problem.workload.global_batch),), definitions("add_a_schedule.md").Eager())
    model = PlanPricer(problem)
    cost = model.price(plan)
    assert max(span.end_s for span in all_spans(model, plan, cost)) == pytest.approx(cost.pipeline_s, rel=1e-9)
    assert {violation.rule for violation in check(problem, plan)} <= {"schedule"}  # which the workload may fix


def test_a_baseline_of_the_page_is_fair_to_its_space() -> None:
    """Its plan lies in the space, and no random plan of the space beats it, as is asked of every baseline."""
    problem, solver, space = mixed.slow_network(), definitions("add_a_baseline.md").ZeroThree(), space_of_the_page()
    result = solver.solve(problem, Budget(3600.0))
    assert result.plan is not None, result.reason
    assert space.first_violation(problem, result.plan) is None
    drawn = set(random_plans(space, problem, random.Random(1), 500))
    assert len(drawn) >= 10
    pricer = PlanPricer(problem)
    assert result.objective <= 1.02 * min(pricer.price(plan).objective for plan in drawn)


def row_of_the_page() -> str:
    """The row of `SPACES` on the page on baselines."""
    page = (ROOT / "docs" / "add_a_baseline.md").read_text(encoding="utf-8")
    [row] = re.findall(r'^```text\n(    "zero_3": PublishedSpace.*?)^```$', page, re.MULTILINE | re.DOTALL)
    return str(row)


def space_of_the_page() -> published_spaces.PublishedSpace:
    space = eval(f"{{{row_of_the_page()}}}", vars(published_spaces))["zero_3"]
    assert isinstance(space, published_spaces.PublishedSpace)
    return space


def house(folder: Path) -> Path:
    """A copy of the project, with what numba has compiled, which lies beside the sources."""
    for name in ("hexiopt", "solvers", "experiments", "runtime", "conf", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new), encoding="utf-8")


def code_of(page: str) -> str:
    [block] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


def passes(folder: Path, *tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


@pytest.mark.slow
def test_tests_stay_green_with_the_schedule_of_the_page(tmp_path: Path) -> None:
    """Those that are parametrised over all schedules, or rest on what schedules state."""
    folder = house(tmp_path)
    (folder / "hexiopt" / "schedules" / "eager.py").write_text(code_of("add_a_schedule.md"))
    registry = folder / "hexiopt" / "schedules" / "registry.py"
    replace_text(registry, "(GPIPE, ONE_F_ONE_B, INTERLEAVED)  #", "(GPIPE, ONE_F_ONE_B, INTERLEAVED, Eager())  #")
    first = "from hexiopt.schedules.gpipe import GPipe\n"
    replace_text(registry, first, "from hexiopt.schedules.eager import Eager\n" + first)
    schedules = ("tests/hexiopt/schedules", "tests/hexiopt/plan/test_every_stage_type.py", "tests/hexiopt/bounds")
    passes(folder, *schedules, "tests/solvers/baselines/test_published_space.py", "tests/hexiopt/problem/test_space.py")


@pytest.mark.slow
def test_tests_stay_green_with_the_baseline_of_the_page(tmp_path: Path) -> None:
    folder = house(tmp_path)
    (folder / "solvers" / "baselines" / "zero_3.py").write_text(code_of("add_a_baseline.md"))
    first = '    "hexiseq": '
    row = '    "zero_3": "baselines.zero_3:ZeroThree",\n'
    assert row in (ROOT / "docs" / "add_a_baseline.md").read_text(encoding="utf-8")
    replace_text(folder / "solvers" / "registry.py", first, row + first)
    spaces, row = folder / "tests" / "solvers" / "baselines" / "published_spaces.py", row_of_the_page()
    replace_text(spaces, '    "ring": ', row + '    "ring": ')
    with (folder / "docs" / "baselines.md").open("a") as page:
        page.write("\n**`zero_3`** has no planner.\n")
    replace_text(folder / "docs" / "solvers.md", "| `fsdp` |", "| `zero_3` | ZeRO-3 |\n| `fsdp` |")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-m", "tests.api_reference"], cwd=folder, env=environment, check=True)
    tests = ("tests/solvers/baselines/test_published_space.py", "tests/experiments/test_documents.py")
    passes(folder, *tests, "tests/hexiopt/study/test_reference.py", "tests/solvers/test_registry.py")

"""What the wheel carries, and that it works where nothing else of us is: no checkout, no name but `hexiopt`."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from sysconfig import get_path

import pytest

from experiments.packaging.backend import move_into_hexiopt, with_moved_imports
from hexiopt.own_packages import PACKAGES
from tests.conftest import ROOT

PACKAGING = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = [name.rstrip("*") for name in PACKAGING["packages"]["find"]["include"]]
PROBLEM = ("cluster=small_mixed", "model=opt_350m", "workload.seq_len=2048", "workload.global_batch=32")
_USE = """
import hexiopt as hx
problem = hx.Problem(hx.cluster("small_mixed"), hx.model("opt_350m"), hx.Workload(seq_len=2048, global_batch=32))
result = hx.solve(problem, "random", max_steps=5)
print(hx.__path__[0])
print(result.status, "portfolio" in hx.solvers())
"""
SEARCH = (*PROBLEM, "solver.time_limit_s=60", "solver.max_steps=50")


def test_every_data_file_is_in_the_wheel() -> None:
    try:
        listing = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout of git")
    tracked = {ROOT / line for line in listing.stdout.splitlines() if not line.endswith(".py")}
    globs = PACKAGING["package-data"].items()
    shipped = {path for name, patterns in globs for pattern in patterns for path in (ROOT / name).glob(pattern)}
    assert ROOT / "experiments/data/sailor/network.json" in tracked
    assert sorted(tracked - shipped) == []


def test_every_module_can_be_moved() -> None:
    """Its imports name packages, relative ones and `import solvers` do not occur, and no text names a module."""
    assert sorted(PACKAGES) == sorted(set(FOLDERS) - {"hexiopt"})
    names = "|".join(PACKAGES)
    text = re.compile(rf"[\"'](?:pkg://|-m )?(?:{names})\.\w+[\w.:]*[\"' ]|files\([\"'](?:{names})")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            moved = with_moved_imports(source, PACKAGES)
            assert not re.search(rf"^\s*(?:from|import) (?:{names})\b", moved, re.MULTILINE), path
            assert moved.replace("from hexiopt.packages.", "from ") == source, path
            assert not text.search(source), f"{path}: {text.search(source)}; use hexiopt/own_packages.py"


def test_imports_are_moved_where_they_stand() -> None:
    source = 'def é(): from solvers.core import x; from solversx import solvers\n"from solvers import y"\n'
    assert with_moved_imports(source, ["solvers"]) == source.replace(
        "from solvers.core", "from hexiopt.packages.solvers.core"
    )
    with pytest.raises(ValueError, match=r"import conf\.a as b: write from"):
        with_moved_imports("import conf.a as b", ["conf"])


def test_a_wheel_is_rewritten_with_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    files = {
        "hexiopt/a.py": "from conf import b\n",
        "conf/b.yaml": "x:\n  _target_: conf.c.D\n  note: conf.c\n",
        "x-1.dist-info/top_level.txt": "conf\nhexiopt\n",
        "x-1.dist-info/entry_points.txt": "[g]\nown = conf.c:D\nother = hexiopt.a:b\n",
        "x-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    move_into_hexiopt(wheel)
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    record = texts.pop("x-1.dist-info/RECORD").splitlines()
    assert texts == {
        "hexiopt/a.py": "from hexiopt.packages.conf import b\n",
        "hexiopt/packages/conf/b.yaml": "x:\n  _target_: hexiopt.packages.conf.c.D\n  note: conf.c\n",
        "x-1.dist-info/top_level.txt": "hexiopt\n",
        "x-1.dist-info/entry_points.txt": "[g]\nown = hexiopt.packages.conf.c:D\nother = hexiopt.a:b\n",
    }
    assert [line.partition(",")[0] for line in record] == [*texts, "x-1.dist-info/RECORD"]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Beside a user's folders of the names that ours have. Its first search compiles, and says so; `fit` needs none."""
    wheels, site = tmp_path / "wheels", tmp_path / "env"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps"]
    built = _run([*pip, "--no-build-isolation", "--wheel-dir", str(wheels), str(_source(tmp_path))], tmp_path)
    if "No module named 'setuptools'" in built.stderr or "Cannot import 'setuptools" in built.stderr:
        pytest.skip("no setuptools to build with")
    assert built.returncode == 0, built.stderr
    venv.create(site, with_pip=False)
    packages = Path(get_path("purelib", "venv", vars={"base": str(site), "platbase": str(site)}))
    (wheel,) = wheels.iterdir()
    installed = _run([*pip[:-2], "install", "--no-deps", "--target", str(packages), str(wheel)], tmp_path)
    assert installed.returncode == 0, installed.stderr
    ours = {path.name for path in packages.iterdir()} - {"bin"}
    assert {name for name in ours if not name.endswith(".dist-info")} == {"hexiopt"}
    (packages / "dependencies.pth").write_text(get_path("purelib") + "\n")  # of this environment; ours come first

    folder = tmp_path / "elsewhere"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('the user\\'s own')\n")
    hexiopt = [str(site / "bin" / "python"), "-m", "hexiopt"]
    for verb, says in (("fit", "FITS"), ("plan", "tokens/s")):
        ran = _run([*hexiopt, verb, *SEARCH], folder)
        assert ran.returncode == 0, ran.stderr
        assert says in ran.stdout
        assert ran.stderr.count("hexiopt: compiling once") == (verb == "plan"), ran.stderr
    ran = _run([hexiopt[0], "-c", _USE], folder)
    assert (ran.returncode, ran.stdout) == (0, f"{packages}/hexiopt\nfeasible True\n"), ran.stderr


def _source(folder: Path) -> Path:
    """A copy of what is built: a build leaves folders beside the sources."""
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        subprocess.run(["cp", "-R", str(ROOT / name), str(copy)], check=True)
    return copy


def _run(command: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)

"""What the wheel carries: every tracked file of a package that is no module."""

import subprocess
import tomllib

import pytest

from tests.conftest import ROOT

PACKAGING = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
PACKAGES = [name.rstrip("*") for name in PACKAGING["packages"]["find"]["include"]]


def test_every_data_file_is_in_the_wheel() -> None:
    try:
        found = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout of git")
    tracked = {ROOT / line for line in found.stdout.splitlines() if not line.endswith(".py")}
    globs = PACKAGING["package-data"].items()
    shipped = {path for name, own in globs for pattern in own for path in (ROOT / name).glob(pattern)}
    assert ROOT / "experiments/data/sailor/network.json" in tracked
    assert sorted(tracked - shipped) == []

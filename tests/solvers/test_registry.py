"""Solvers by name: ours, as the project declares them, and those of other packages."""

import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from hexiopt.errors import InputError, RenamedWarning
from hexiopt.solving import registry as plugins
from hexiopt.solving.registry import ALIASES, TABLE_GROUP
from solvers import registry
from tests.conftest import ROOT
from tests.solvers.stranger import install


def test_the_project_declares_its_table() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][TABLE_GROUP]
    assert [resolve_name(target) for target in declared.values()] == [registry.BUILT_IN]
    assert registry.BUILT_IN.items() <= plugins.solver_targets().items()


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_solver_is_called_as_declared(name: str) -> None:
    solver = registry.make_solver(name)
    assert solver.name == name
    assert [solver.capabilities.busy(usable) for usable in (1, 8)] in ([1, 1], [1, 2], [1, 8])


def test_the_queries_divide_our_solvers() -> None:
    queries = (registry.for_any_problem, registry.baseline, registry.of_sequences, registry.small_oracle)
    names = [name for query in queries for name in registry.names(query)]
    assert sorted(names) == sorted(registry.BUILT_IN)
    assert registry.names(registry.small_oracle) == ("sequence_exact",)


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_an_old_name_still_serves_and_says_so(old: str, new: str) -> None:
    with pytest.warns(RenamedWarning, match=f"solver: {old} now means {new}; the old name goes soon"):
        assert registry.make_solver(old).name == new
    assert old not in registry.known()


def test_a_package_cannot_take_the_name_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch, tmp_path / "site", "pirate", "class Portfolio: ...", portfolio="Portfolio", a_rival="Portfolio"
    )
    assert registry.known()["portfolio"] == registry.BUILT_IN["portfolio"]
    assert registry.known()["a_rival"] == "pirate:Portfolio"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nowhere", "cannot be imported (No module named 'nowhere')"),
        ("", "cannot be imported (module 'broken' has no attribute 'Mine')"),
        ("class Mine: ...", "has no name and no capabilities and no solve"),
    ],
)
def test_a_broken_package_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, message: str
) -> None:
    install(monkeypatch, tmp_path / "site", "broken", code, a_rival="Mine")
    with pytest.raises(InputError) as caught:
        registry.make_solver("a_rival")
    assert str(caught.value).startswith("solver: a_rival: broken:Mine ")
    assert message in str(caught.value)
    assert registry.make_solver("random").name == "random"

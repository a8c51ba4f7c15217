"""The site: its navigation names every page, links between files become links between pages, and it builds strictly."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.app import site
from tests.conftest import ROOT

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def nav_pages(nav: Any) -> Iterator[str]:
    """Every page of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav if isinstance(nav, list) else nav.values():
            yield from nav_pages(part)


def sources() -> dict[str, Path]:
    """The file of each page of the site."""
    docs = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    return docs | {page: ROOT / source for source, page in site.pages().items()}


def prose(path: Path) -> str:
    """The text of a page, of a notebook without its outputs."""
    return (path.with_suffix(".py") if path.suffix == ".ipynb" else path).read_text(encoding="utf-8")


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(nav_pages(NAV)) == sorted(sources())


@pytest.mark.parametrize("page", sorted(sources()))
def test_links_lead_to_pages(page: str) -> None:
    files = sources()
    text = site.with_links(prose(files[page]), page)
    for target in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if not re.match(r"https://", target):
            at = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            assert at in files or (ROOT / "docs" / at).is_file(), target


def test_links_are_moved_with_their_pages() -> None:
    text = "[a](docs/planning.md#sweeps) ![b](docs/validation.png) [`c`](hexiopt/solving/solver.py) [d](https://e.org/f.md)"
    assert site.with_links(text, "index.md") == (
        "[a](planning.md#sweeps) ![b](validation.png) `c` [d](https://e.org/f.md)"
    )
    assert site.with_links("[a](../README.md)", "python.md") == "[a](index.md)"
    assert (
        site.with_links("[a](../../docs/results/index.md)", "notebooks/01_first_plan.md") == "[a](../results/index.md)"
    )
    assert site.with_links("[a](02_hexiscale_case_study.ipynb)", "notebooks/01_first_plan.md") == (
        "[a](02_hexiscale_case_study.md)"
    )
    assert site.with_links("```\n[a](../README.md)\n```", "python.md") == "```\n[a](../README.md)\n```"
    assert site.with_links("[a](nowhere.md)", "python.md") == "[a](nowhere.md)"  # for MkDocs to complain about


def test_formulas_are_drawn_by_the_browser_itself() -> None:
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    text = site.with_formulas("Its peak $P$ in\n\n$$t = \\frac{F}{P}$$\n\n`$HOME` stays, and\n\n```\n$a$\n```\n")
    assert text.count("<math") == 2
    assert "<mfrac>" in text
    assert "`$HOME`" in text
    assert "$a$" in text


@pytest.mark.slow
def test_it_builds_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mkdocs", "material", "nbconvert", "latex2mathml"):
        pytest.importorskip(package, reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    made = (tmp_path / "site" / "notebooks" / "01_first_plan.html").read_text(encoding="utf-8")
    assert "output_01" in made
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="http[^"]*\.(?:js|css|woff2?)', start)

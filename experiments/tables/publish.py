"""Tables into the documentation: a section of docs/results.md between two markers, and its picture beside it."""

import re
import shutil
from pathlib import Path

import hexiopt
from hexiopt.plan_file import write_text

DOCS = Path(hexiopt.__file__).parent.parent / "docs"


def publish(name: str, text: str, picture: Path, docs: Path = DOCS) -> None:
    """Put the section `name` in the place of its earlier version, or at the end."""
    page = docs / "results.md"
    shutil.copyfile(picture, docs / picture.name)
    write_text(page, replaced(page.read_text(encoding="utf-8"), name, text))


def replaced(page: str, name: str, text: str) -> str:
    """The page with the section `name`."""
    start, end = f"<!-- {name}: written by experiments.tables -->", f"<!-- {name}: end -->"
    section = f"{start}\n{text.rstrip()}\n{end}\n"
    old = re.compile(rf"{re.escape(start)}\n.*?{re.escape(end)}\n", re.DOTALL)
    if old.search(page):
        return old.sub(lambda _: section, page, count=1)
    return f"{page.rstrip()}\n\n{section}"

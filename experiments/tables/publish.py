"""Tables into the documentation: a section of docs/results.md between two markers, and its picture beside it."""

import re
import shutil
from pathlib import Path

import hexiopt
from hexiopt.readers.plan_file import write_text

DOCS = Path(hexiopt.__file__).parent.parent / "docs"


WRITER = "experiments.tables"


def publish(name: str, text: str, picture: Path, docs: Path = DOCS) -> None:
    """Put the section `name` and its picture in the place of their earlier versions, or at the end."""
    shutil.copyfile(picture, docs / picture.name)
    publish_section(name, text, docs)


def publish_section(name: str, text: str, docs: Path = DOCS, writer: str = WRITER) -> None:
    """Put the section `name` in the place of its earlier version, or at the end; `writer` is the module it is of."""
    page = docs / "results.md"
    write_text(page, replaced(page.read_text(encoding="utf-8"), name, text, writer))


def replaced(page: str, name: str, text: str, writer: str = WRITER) -> str:
    """The page with the section `name`."""
    start, end = f"<!-- {name}: written by {writer} -->", f"<!-- {name}: end -->"
    section = f"{start}\n{text.rstrip()}\n{end}\n"
    old = re.compile(rf"{re.escape(start)}\n.*?{re.escape(end)}\n", re.DOTALL)
    if old.search(page):
        return old.sub(lambda _: section, page, count=1)
    return f"{page.rstrip()}\n\n{section}"

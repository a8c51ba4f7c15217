"""Hooks of MkDocs: pages that stand outside docs/, and links between files of the project as links between pages.

README.md becomes the first page, each notebook with its outputs a page. A link to a file that is no page (a source, a
configuration) becomes the file's name. Formulas become MathML, which browsers draw without a script.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOKS = "experiments/notebooks"
_OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#\s]+)(#[^)\s]*)?\)")
_FORMULA = re.compile(r"(?P<code>`[^`\n]*`)|\$\$(?P<block>[^$]+)\$\$|\$(?P<inline>[^$\n]+)\$")


def pages() -> dict[str, str]:
    """The page in the site of each file of the project that has one outside docs/: README.md → index.md."""
    notebooks = {path.name: path.stem for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))}
    return _OUTSIDE | {f"{NOTEBOOKS}/{name}": f"notebooks/{stem}.md" for name, stem in notebooks.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the pictures of the notebooks."""
    from mkdocs.structure.files import File

    for source, page in pages().items():
        if source.endswith(".md"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
            continue
        text, pictures = notebook_page(ROOT / source)
        files.append(File.generated(config, page, content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links to files of the project as links to pages of the site."""
    return with_formulas(with_links(markdown, page.file.src_uri))


def with_links(markdown: str, page: str) -> str:
    """The text of the page `page` of the site, with links that hold there."""
    homes = {target: source for source, target in pages().items()}
    home = posixpath.dirname(homes.get(page, f"docs/{page}"))

    def move_link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target or (page.startswith("notebooks/") and target.startswith("output_")):
            return match[0]
        source = posixpath.normpath(posixpath.join(home, target))
        site_page = pages().get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else None)
        if site_page is None or not site_page.endswith((".md", ".png")):
            return label.strip("![]") if (ROOT / source).exists() else match[0]
        return f"{label}({os.path.relpath(site_page, posixpath.dirname(page) or '.')}{anchor})"

    return "".join(part if fenced else _LINK.sub(move_link, part) for fenced, part in _fences(markdown))


def with_formulas(markdown: str) -> str:
    """The text with each $formula$ and $$formula$$ as MathML."""
    from latex2mathml.converter import convert

    def draw_formula(match: re.Match[str]) -> str:
        if match["code"]:
            return match["code"]
        display = "block" if match["block"] else "inline"
        mathml = convert(match["block"] or match["inline"], display=display)
        # Else a line that begins with a formula would be a block.
        return mathml if match["block"] else f"<span>{mathml}</span>"

    return "".join(part if fenced else _FORMULA.sub(draw_formula, part) for fenced, part in _fences(markdown))


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook with its outputs as Markdown, and its pictures by name."""
    from nbconvert import MarkdownExporter

    prefix = f"output_{path.stem[:2]}"
    exporter_class: Any = MarkdownExporter  # typed only where it is installed
    exporter = exporter_class()
    body, resources = exporter.from_filename(str(path), {"unique_key": prefix, "output_files_dir": "."})
    pictures = {posixpath.basename(name): data for name, data in resources["outputs"].items()}
    return body.replace("](./output_", "](output_"), pictures


def _fences(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text in parts, with whether each is a block of code."""
    for part in re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL):
        yield part.startswith("```"), part

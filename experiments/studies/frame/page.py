"""The page of a study: its file, in jupytext's percent format, is run cell by cell, and what cells show is exported as
Markdown. Code and what it prints are not part of the page."""

import linecache
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies.frame.figures import png
from experiments.studies.frame.search import SearchSpec, take_measured
from experiments.studies.frame.words import hardware, markdown, workloads
from hexiopt.errors import InputError
from hexiopt.files.problem_file import problem_sha256
from hexiopt.study.running import in_notebook

Shown = str | tuple[str, str, Figure]  # Markdown; or file name, caption and figure
_shown: list[Shown] = []


def show(
    tables: Mapping[str, pd.DataFrame] | None = None,
    claims: Sequence[str] = (),
    figure: Figure | None = None,
    notes: str = "",
    caption: str = "",
    name: str = "",
) -> None:
    """Put onto the page a figure with its caption, tables of texts by heading, claims computed from rows, and notes.

    `name` is the figure's file name without ending (default: the study's).
    """
    if figure is not None:
        _put((name, caption, figure))
    for heading, table in (tables or {}).items():
        _put("\n\n".join([*([f"**{heading}**"] if heading else []), markdown(table)]))
    if claims:
        _put("\n".join(f"- {claim[:1].upper()}{claim[1:]}" for claim in claims))
    if notes:
        _put(notes)


def _put(part: Shown) -> None:
    _shown.append(part)
    if in_notebook():
        from IPython.display import Markdown, display

        display(Markdown(part) if isinstance(part, str) else part[2])  # type: ignore[no-untyped-call]


@dataclass
class Page:
    """A study that has been run: Markdown, figures as PNG by file name, the names its cells gave, what keeps it from
    being published, in words, and its searches with their rows."""

    text: str
    figures: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    specs: list[SearchSpec] = field(default_factory=list)
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)


def run(source: Path, command: str) -> Page:
    """Run a study. A failed assertion breaks a claim, and the cells after it are run all the same; after any other
    error no more are (HEXIOPT_DEBUG=1 raises it). Below what the cells show stand the conditions of its searches."""
    study = source.stem.partition("_")[2]
    page = Page("", names={"__name__": f"study_{study}", "__file__": str(source)})
    title, parts = study, [f"<!-- Written by {command}: change the study, not this page. -->"]
    _shown.clear()
    take_measured()
    for k, cell in enumerate(jupytext.read(source, fmt="py:percent").cells):
        if cell.cell_type == "markdown":
            if cell.source.startswith("#"):
                title = cell.source.splitlines()[0].lstrip("# ")
            if cell.source.startswith("# "):  # no empty line before the title of the page
                parts[0] += f"\n{cell.source}"
            else:
                parts.append(cell.source)
            continue
        place = f"{source.name}, cell {k}"
        linecache.cache[place] = (len(cell.source), None, cell.source.splitlines(keepends=True), place)
        try:
            exec(compile(cell.source, place, "exec"), page.names)
        except AssertionError as error:
            line = cell.source.splitlines()[_line_of(error, place) - 1]
            page.broken.append(f"no longer holds: {place}: {error if error.args else line}")
        except InputError:
            raise
        except Exception as error:
            if os.environ.get("HEXIOPT_DEBUG") == "1":
                raise
            page.broken.append(f"{place}, line {_line_of(error, place)}: {type(error).__name__}: {error}")
            break
        for part in _shown:
            if not isinstance(part, str):
                name, caption, figure = part
                file = f"{name or study}.png"
                page.figures[file] = png(figure)
                part = f"![{caption or title}]({file})"
            parts.append(part)
        _shown.clear()
    page.specs, page.rows = take_measured()
    if page.specs:
        parts.append(conditions(page.specs, page.rows, command))
    page.text = "\n\n".join(parts) + "\n"
    return page


def _line_of(error: Exception, place: str) -> int:
    """The line of a cell in which an error arose."""
    lines = [frame.lineno or 1 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    return lines[-1] if lines else 1


def conditions(specs: Sequence[SearchSpec], rows: pd.DataFrame, command: str) -> str:
    """The conditions of the rows as Markdown: hardware, workload, limits, machine, and the command that repeats the
    study."""
    problems = list({problem_sha256(spec.problem): spec.problem for spec in specs}.values())
    limits = rows.groupby("solver", sort=False)["time_limit_s"].unique()
    budgets = [
        f"{solver} {' / '.join(f'{limit:g}' for limit in sorted(limits_s))} s" for solver, limits_s in limits.items()
    ]
    steps = sorted({spec.job.budget.max_steps or 0 for spec in specs} - {0})
    budgets += [f"but the searches end after {' or '.join(map(str, steps))} steps"] if steps else []
    code = ", ".join(dict.fromkeys(text[:8] for text in rows["code"]))
    plans = " or ".join(dict.fromkeys(problem.plans_in_words for problem in problems))
    lines = [
        *hardware(problems),
        f"Workload: {workloads(problems)}; everything else is left to the search, unless a row says otherwise.",
        *([f"Bounds and gaps: of {plans}."] if (rows["bound_s"] > 0).any() else []),
        f"Time limits: {', '.join(budgets)}; seeds {', '.join(map(str, sorted(set(rows['seed']))))}.",
        f"Measured {' and '.join(sorted(set(rows['date'])))} on {'; '.join(dict.fromkeys(rows['machine']))}; code "
        f"{code}. Every plan is priced by our cost model, unless a column says otherwise.",
        f"Command: `{command}`",
    ]
    return "## Conditions\n\n" + "\n".join(f"- {line}" for line in lines)

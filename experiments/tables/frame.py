"""The frame of every table: its searches run, and CSV, picture and Markdown written from what they found."""

import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from experiments.tables.figures import save
from experiments.tables.markdown import Cell, bullets, hardware, workload
from experiments.tables.options import Options, parse
from experiments.tables.publish import publish
from experiments.tables.running import run_all
from experiments.tables.store import Store, code_sha256
from experiments.tables.task import Found, Task
from hexiopt.errors import InputError
from hexiopt.problem.problem import sha256_of
from hexiopt.readers.plan_file import write_text

Rows = Sequence[Mapping[str, Cell]]


@dataclass(frozen=True)
class Report:
    """What a table shows: its CSV rows, Markdown tables, sentences computed from them, and its picture.

    `notes` say how columns are computed; `more` has the rows of further CSV files by the end of their name.
    """

    rows: Rows
    tables: Sequence[str]
    sentences: Sequence[str]
    notes: Sequence[str]
    figure: Figure
    more: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of the papers: the searches it needs, and the report on what they found. Its command is the module of
    its name in `package`."""

    name: str
    title: str
    tasks: Callable[[Options], Sequence[Task]]
    report: Callable[[Options, Found], Report]
    package: str = "experiments.tables"


def make(table: Table, options: Options, console: Console) -> list[str]:
    """Measure what is not measured yet and write everything; returns the searches that failed, in words."""
    tasks = table.tasks(options)
    found = run_all(table.name, tasks, Store(options.out / "searches", any_code=options.any_code), console)
    report = table.report(options, found)
    folder = options.out / table.name
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{table.name}.csv", csv_text(report.rows))
    for name, rows in report.more.items():
        write_text(folder / f"{table.name}_{name}.csv", csv_text(rows))
    save(report.figure, folder / f"{table.name}.png")
    text = markdown(table, options, tasks, found, report)
    write_text(folder / f"{table.name}.md", text)
    if options.publish:
        publish(table.name, text, folder / f"{table.name}.png")
    return [f"{task}: {found[task].reason}" for task in tasks if found[task].status == "failed"]


def csv_text(rows: Rows) -> str:
    """Rows of equal keys as CSV; None is an empty cell. Nothing where there are none."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown(table: Table, options: Options, tasks: Sequence[Task], found: Found, report: Report) -> str:
    """The section of a table: picture, tables, sentences, notes, conditions."""
    problems = list(dict.fromkeys(task.problem for task in tasks))
    clusters = hardware((problem.cluster for problem in problems), problems[0].workload.precision)
    limits: dict[str, set[float]] = {}
    for task in tasks:
        limits.setdefault(task.solver, set()).add(task.time_limit_s)
    budgets = [f"{solver} {' / '.join(f'{limit:g}' for limit in sorted(own))} s" for solver, own in limits.items()]
    code = sha256_of(sorted({code_sha256(task.solver) for task in tasks}))[:8]
    seeds = sorted({task.seed for task in tasks})
    conditions = (
        *clusters,
        f"workload: {workload(problems)}; everything else left to the search, unless a row says otherwise",
        f"every plan is priced by our cost model; code {code}{' or earlier' if options.any_code else ''}",
        f"time limits: {', '.join(budgets)}; seeds {', '.join(map(str, seeds))}; {'; '.join(found.machines(tasks))}",
        f"command: `{options.command(f'{table.package}.{table.name}')}`",
    )
    parts = (
        f"## {table.title}",
        f"![{table.title}]({table.name}.png)",
        *report.tables,
        bullets(report.sentences),
        "\n".join(report.notes),
        "Conditions:",
        bullets(conditions),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def main(table: Table, doc: str | None, argv: Sequence[str] | None = None) -> int:
    """Make one table; 0 done, 1 where a search failed, 2 for bad input."""
    return run_tables([table], doc, sys.argv[1:] if argv is None else argv)


def run_tables(tables: Sequence[Table], doc: str | None, argv: Sequence[str]) -> int:
    """Make tables one after the other, by one command line."""
    try:
        options = parse(doc, argv)
        errors, shown = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 160)
        failed: list[str] = []
        for table in tables:
            failed += make(table, options, errors)
            folder = options.out / table.name
            shown.print(Markdown(_without_picture((folder / f"{table.name}.md").read_text(encoding="utf-8"))))
            _show_paths(shown, folder)
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hexiopt: interrupted; run the same command again, and it goes on from here", file=sys.stderr)
        return 130
    for line in failed:
        print(f"hexiopt: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _without_picture(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("!["))


def _show_paths(console: Console, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)

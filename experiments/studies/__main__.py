"""Runs studies and writes a page for each: `python -m experiments.studies NAME [...]`.

    python -m experiments.studies rivals --quick        # a tiny setting, a few steps a search; what they say is nothing
    python -m experiments.studies all --publish         # every page of docs/results/; takes hours

Searches are kept in OUT/searches: studies share them, and after an interruption only the rest is run. For other limits,
seeds or settings, change the study's file.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hexiopt
from experiments.studies import SOURCES
from experiments.studies.frame.page import Page, run
from experiments.studies.frame.search import ANY_CODE, FOLDER
from experiments.studies.frame.settings import quick
from hexiopt.errors import InputError
from hexiopt.files.plan_file import write_text

DOCS = Path(hexiopt.__file__).parent.parent / "docs" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies; returns 0 when done, 1 where a search failed or a claim no longer holds, 2 for bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(words)
    flags = {"QUICK": "1" if options.quick else "", ANY_CODE: "1" if options.any_code else ""}
    os.environ.update({FOLDER: str(options.out / "searches"), **{name: flag for name, flag in flags.items() if flag}})
    any_fault = False
    try:
        if quick() and options.publish:
            raise InputError("--publish: a quick study measures nothing worth publishing; leave out --quick, or QUICK")
        names = [*SOURCES] if "all" in options.names else [*dict.fromkeys(options.names)]
        for number, name in enumerate(names, start=1):
            print(f"hexiopt: {name} (study {number} of {len(names)})", file=sys.stderr)
            more = [word for word in words if word not in (*SOURCES, "all")]
            page = run(SOURCES[name], " ".join(["python -m experiments.studies", name, *more]))
            lines = faults(name, page)
            any_fault |= bool(lines)
            for folder in [options.out / name, *([DOCS] if options.publish and not lines else [])]:
                write(name, page, folder)
            for line in lines:
                print(f"hexiopt: {line}", file=sys.stderr)
            print(options.out / name / f"{name}.md")
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hexiopt: interrupted; run the same command again to continue from here", file=sys.stderr)
        return 130
    return 1 if any_fault else 0


def faults(name: str, page: Page) -> list[str]:
    """Why a page is not published, in lines: searches that failed, claims that no longer hold, and errors."""
    searches = page.rows[page.rows["status"] == "failed"] if page.specs else page.rows
    lines = [f"{name}: {row.solver}, {row.key}: {row.reason}" for row in searches.itertuples()]
    return lines + [f"{name}: {line}" for line in page.broken]


def write(name: str, page: Page, folder: Path) -> None:
    """Write page and figures. Raises InputError where the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from None
    write_text(folder / f"{name}.md", page.text)
    for file, figure in page.figures.items():
        (folder / file).write_bytes(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*SOURCES, "all")
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="as QUICK=1: a tiny setting, a few steps a search")
    parser.add_argument("--publish", action="store_true", help="write page and figures into docs/results/ too")
    parser.add_argument("--any-code", action="store_true", help="also use searches of other versions of the code")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder (default results)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

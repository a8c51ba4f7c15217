"""Measures studies and writes a page for each: `python -m experiments.studies NAME [...]`.

    python -m experiments.studies rivals --quick                        # seconds, on a tiny setting; no claims
    python -m experiments.studies scaling --sizes 16 64                 # smaller clusters only
    python -m experiments.studies small_suite --only problem=lab solver=exact --limits exact=60
    python -m experiments.studies all --publish                         # every page of docs/results/; about three hours

Measurements are kept in OUT/searches: studies share them, and after an interruption only the rest is run.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from experiments.studies import NAMES, study
from experiments.studies.frame.study import SIZES, Scale
from hexiopt.errors import InputError
from solvers.registry import names as solver_names

_QUICK_SIZES, _QUICK_SEEDS, _SEEDS = (16,), 2, 5
_MOST_S = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies; returns 0 when done, 1 where a search failed, 2 for bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    given = _parser().parse_args(words)
    errors, quoted = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 160)
    failed: list[str] = []
    try:
        scale = _scale(given)
        if given.quick and given.publish:
            raise InputError("--publish: --quick measures nothing worth publishing; leave one out")
        for name in NAMES if "all" in given.names else dict.fromkeys(given.names):
            options = shlex.join(word for word in words if word not in (*NAMES, "all"))
            command = f"python -m experiments.studies {name} {options}".rstrip()
            done = study(name).run(scale, given.out, command, errors, any_code=given.any_code)
            if given.publish:
                done.publish()
            failed += done.failed
            text = done.page.read_text(encoding="utf-8").splitlines()
            quoted.print(Markdown("\n".join(line for line in text if not line.startswith(("![", "<!--")))))
            for path in (*done.tables, *done.figures, done.page):
                quoted.print(str(path), markup=False, highlight=False, soft_wrap=True)
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hexiopt: interrupted; run the same command again to continue from here", file=sys.stderr)
        return 130
    for line in failed:
        print(f"hexiopt: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = solver_names(lambda able: able.sequence != "only")
    parser.add_argument("names", nargs="+", choices=(*NAMES, "all"), metavar="NAME", help=", ".join((*NAMES, "all")))
    parser.add_argument("--quick", action="store_true", help="a tiny setting, in seconds; no claims")
    parser.add_argument("--publish", action="store_true", help="write page and figures into docs/results/ too")
    parser.add_argument("--any-code", action="store_true", help="also use measurements of other versions of the code")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder (default results)")
    parser.add_argument("--seconds", type=float, default=1.0, help="a factor for all time limits (default 1)")
    parser.add_argument("--limits", nargs="+", default=[], metavar="SOLVER=S", help="time limits of some solvers")
    parser.add_argument("--seeds", type=int, default=None, help=f"of convergence (default {_SEEDS})")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, metavar="GPUS", help="of scaling, scheduling")
    parser.add_argument("--solvers", nargs="+", choices=known, default=[], metavar="SOLVER", help="of small_suite")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL=VALUE", help="rows with this label (* allowed)")
    parser.add_argument(
        "--inter-gb-per-s",
        type=float,
        default=None,
        metavar="GB/S",
        help="between machines, of HexiScale's settings and long contexts",
    )
    return parser


def _scale(given: argparse.Namespace) -> Scale:
    only: dict[str, list[str]] = {}
    for flag, words in (("--only", given.only), ("--limits", given.limits)):
        if wrong := [word for word in words if "=" not in word]:
            raise InputError(f"{flag}: {wrong[0]!r} has no '='; write NAME=VALUE")
    for word in given.only:
        label, _, value = word.partition("=")
        only.setdefault(label, []).append(value)
    limits_s = {
        solver: _seconds("--limits", text) for solver, _, text in (word.partition("=") for word in given.limits)
    }
    sizes = tuple(sorted(set(given.sizes or (_QUICK_SIZES if given.quick else SIZES))))
    for size in sizes:
        if size < 8 or size % 8:
            raise InputError(f"--sizes: {size} is not a number of GPUs in machines of eight; state a multiple of 8")
    seeds = (_QUICK_SEEDS if given.quick else _SEEDS) if given.seeds is None else given.seeds
    if seeds < 1:
        raise InputError(f"--seeds: {seeds} is out of range; state 1 or more")
    factor = _seconds("--seconds", given.seconds)
    return Scale(factor, seeds, given.quick, sizes, tuple(given.solvers), given.inter_gb_per_s, limits_s, only)


def _seconds(flag: str, text: str | float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < _MOST_S:
        raise InputError(f"{flag}: {text} is not a time limit; state a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

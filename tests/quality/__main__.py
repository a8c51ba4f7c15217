"""Are plans of the default worse than they were? `make quality`: about 10 minutes on two cores.

python -m tests.quality                                  # against the stored step times; ends with 1 where it is worse
python -m tests.quality --store [--cpu-seconds 4 | --steps 400] [--problems desk,campus]
python -m tests.quality --against ../before --cpu-seconds 1,3,10 [--solver NAME] [--problems a,b] [--seeds 5]

Golden plans say that a search has changed; this panel says whether that was for the worse. It is worse if the geometric
mean of (now / stored) over all problems is above 1.002, or the mean over seeds of one problem above 1.01 of the stored
one.

Budgets are steps, so that a run gives the same plans on a busy machine; how many stands with each problem in
`stored.json`. What a step is, is the solver's own business, and takes longer on more GPUs: `--store --cpu-seconds S`
stores as many as a search takes in S seconds of CPU time here. Whether a change is worth its time, only CPU time can
say: `--against` runs the solvers of two checkouts (or two solvers of one) in
turns, each run in a new process on one core, its clock being CPU time.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hexiopt.cores import usable_cores
from tests.golden import files
from tests.quality import stored
from tests.quality.problems import PROBLEMS
from tests.quality.runs import Outcome, Run, Side, by_cpu_time, by_steps, compile_kernels
from tests.quality.stored import Entry
from tests.quality.table import Row, mean, table, worse

SEEDS = 3


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.quality", description=__doc__, formatter_class=form)
    parser.add_argument("--problems", type=_names, default=list(PROBLEMS), metavar="A,B", help="only these")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many, from 0 (default {SEEDS})")
    parser.add_argument("--solver", default="portfolio", help="of this checkout (default: portfolio)")
    parser.add_argument("--store", action="store_true", help="store what comes out")
    parser.add_argument("--steps", type=int, help="instead of the stored number of steps")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="runs at once (default: cores)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, or this one, to compare with")
    parser.add_argument("--against-solver", default="portfolio", metavar="NAME", help="its solver (default: portfolio)")
    parser.add_argument("--cpu-seconds", type=_limits, metavar="S,S", help="of --against (default 1,3,10) or --store")
    options = parser.parse_args(argv)
    if options.against is not None:
        options.cpu_seconds = options.cpu_seconds or [1.0, 3.0, 10.0]
    elif options.cpu_seconds and (not options.store or options.steps is not None or len(options.cpu_seconds) > 1):
        parser.error("--cpu-seconds: needs --against, or --store without --steps and one number")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PROBLEMS]:
        raise argparse.ArgumentTypeError(f"no problem of the panel: {', '.join(unknown)}")
    return names


def _limits(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def by_problem(options: argparse.Namespace, entries: dict[str, Entry]) -> dict[str, list[Outcome]]:
    """The outcomes of all seeds by problem, each within its steps."""
    runs = [
        Run(Side(solver=options.solver), name, seed, max_steps=steps_of(options, entries, name))
        for name in options.problems
        for seed in range(options.seeds)
    ]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.problems}
    for run, outcome in _track(by_steps(runs, options.processes), len(runs)):
        outcomes[run.problem].append(outcome)
    return outcomes


def steps_of(options: argparse.Namespace, entries: dict[str, Entry], name: str) -> int:
    """The budget of a problem: as asked for, or as stored."""
    if options.steps is not None:
        return int(options.steps)
    if options.cpu_seconds:
        [(_, outcome)] = by_cpu_time([Run(Side(solver=options.solver), name, 0, cpu_s=options.cpu_seconds[0])])
        return int(float(f"{outcome.steps:.2g}"))
    return entries[name].max_steps if name in entries else stored.FEW_STEPS


def against_stored(options: argparse.Namespace) -> int:
    """Compare with what is stored, and print the table; 1 where plans are worse, or can no longer be compared."""
    entries = stored.read()
    missing = [name for name in options.problems if name not in entries]
    options.problems = [name for name in options.problems if name in entries]
    plans = files.read(stored.PLANS)
    if faults := list(filter(None, (stored.stale(name, entries[name], plans[name]) for name in options.problems))):
        print("\n".join([*faults, "Store the panel again (--store), at a commit whose search has not changed."]))
        return 1
    rows = []
    for name, outcomes in by_problem(options, entries).items():
        before_s = entries[name].step_time_s[: options.seeds]
        rows.append(Row(name, before_s, tuple(outcome.step_time_s for outcome in outcomes[: len(before_s)])))
    print(table(rows) if rows else "")
    faults = worse(rows) if rows else []
    print("\n".join(["Worse:", *faults]) if faults else "Not worse. Where it is better, store it (--store).")
    if missing:
        print(f"Not judged, as nothing is stored of it (--store): {', '.join(missing)}")
    return 1 if faults or missing else 0


def store(options: argparse.Namespace) -> int:
    """Run and store, a problem at a time, so that what is done remains."""
    entries = stored.read()
    rows = []
    for name in options.problems:
        steps = steps_of(options, entries, name)
        only = argparse.Namespace(**{**vars(options), "problems": [name], "steps": steps})
        [outcomes] = by_problem(only, entries).values()
        entry = Entry.of(name, steps, outcomes)
        best = min(outcomes, key=lambda outcome: outcome.step_time_s)
        stored.write({name: entry}, {name: best.plan})
        rows.append(Row(name, entries[name].step_time_s if name in entries else entry.step_time_s, entry.step_time_s))
    print(table(rows))
    print(f"{sum(entry.cpu_s for entry in stored.read().values()):.0f} CPU seconds for all that is stored")
    return 0


def against_other(options: argparse.Namespace) -> int:
    """Two sides in turns at equal CPU time, a table for each limit; 1 where this one is worse at any."""
    sides = Side(options.against.resolve(), options.against_solver), Side(solver=options.solver)
    for root in {side.root for side in sides}:
        compile_kernels(root)
    ended = 0
    for limit_s in options.cpu_seconds:
        runs = in_turns(sides, options.problems, options.seeds, limit_s)
        outcomes: dict[tuple[Side, str], list[Outcome]] = {}
        for run, outcome in _track(by_cpu_time(runs), len(runs)):
            outcomes.setdefault((run.side, run.problem), []).append(outcome)
        rows = [Row(name, *(_step_s(outcomes[side, name]) for side in sides)) for name in options.problems]
        took_s = [mean([run.cpu_s for name in options.problems for run in outcomes[side, name]]) for side in sides]
        print(f"\nAfter {limit_s:g} s of CPU time (a whole run took {took_s[0]:.2f} s before, {took_s[1]:.2f} s now)")
        print(table(rows, "before"), flush=True)
        ended |= bool(worse(rows))
    return ended


def in_turns(sides: tuple[Side, Side], problems: Sequence[str], seeds: int, limit_s: float) -> list[Run]:
    """The runs of both sides, each problem and seed on one and then the other, the first of them in turns."""
    runs = []
    for k, (name, seed) in enumerate(product(problems, range(seeds))):
        runs += [Run(side, name, seed, cpu_s=limit_s) for side in (sides if k % 2 == 0 else sides[::-1])]
    return runs


def _step_s(outcomes: Iterable[Outcome]) -> tuple[float, ...]:
    return tuple(outcome.step_time_s for outcome in outcomes)


def _track(runs: Iterable[tuple[Run, Outcome]], total: int) -> Iterable[tuple[Run, Outcome]]:
    return track(runs, "searches", total, console=Console(stderr=True), disable=not sys.stderr.isatty())


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    options = options_of(argv)
    if options.against is not None:
        return against_other(options)
    return store(options) if options.store else against_stored(options)


if __name__ == "__main__":
    sys.exit(main())

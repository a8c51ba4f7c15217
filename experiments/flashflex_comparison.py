"""Our plans beside FlashFlex's, both judged by FlashFlex's own formulas.

    python -m experiments.flashflex_comparison                          # 30 s a search, about 11 minutes
    python -m experiments.flashflex_comparison --rows 1 --time-limit 5

For each row of `data/flashflex_rows.yaml` the portfolio solver searches three times: under the formulas of
`solvers/baselines/flashflex/pricer.py` with micro-batches of its choice; under the formulas with FlashFlex's
micro-batch rule, as in the figures it is compared with; and under our own cost model and memory, whose plan
FlashFlex's formulas then judge.
"""

import argparse
import csv
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.configurations import named_cluster, named_model
from experiments.tables.publish import publish_section
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import read_mapping
from hexiopt.solving import Budget, Pricer
from solvers.baselines.flashflex.pricer import FlashFlexPricer
from solvers.registry import make_solver

NO_PLAN = 0.0  # tokens/s where a search found none
LEFT = ("model", "its memory accepts")  # columns of words


@dataclass(frozen=True)
class Row:
    """One comparison: HexiScale's setting, a model, GB/s between machines; what others reach in tokens/s."""

    setting: int
    model: str
    inter_gb_per_s: float
    flashflex_tokens_per_s: float
    annealer_tokens_per_s: float


@dataclass(frozen=True)
class Outcome:
    """What our three searches reach in a row, in tokens/s by FlashFlex's formulas.

    `fits` and `fits_rule`: whether FlashFlex's memory formula accepts the plan of our own cost model, with
    its micro-batches and with those of FlashFlex's rule.
    """

    formulas: float
    rule: float
    own: float
    own_rule: float
    fits: bool
    fits_rule: bool


def read_rows() -> tuple[Row, ...]:
    """The rows of `data/flashflex_rows.yaml`."""
    with as_file(files("experiments").joinpath("data/flashflex_rows.yaml")) as file:
        return tuple(Row(**row) for row in read_mapping(file)["rows"])


def problem_of(row: Row) -> Problem:
    """The problem of a row: 256 sequences of 4,096 tokens, full recompute; no replicas, which have no price there."""
    return Problem(
        cluster=named_cluster(f"hexiscale_setting_{row.setting}", inter_gb_per_s=row.inter_gb_per_s),
        model=named_model(row.model),
        workload=Workload(recompute="full"),
        space=Space(replicas=False),
    )


def compare(row: Row, budget: Budget, seed: int) -> Outcome:
    """Search three times and judge the plans."""
    problem = problem_of(row)
    as_planned = FlashFlexPricer(problem)
    by_rule = FlashFlexPricer(problem, micro_batch_rule=True)

    def search(pricer: Pricer | None) -> Plan | None:
        return make_solver("portfolio").solve(problem, budget, seed=seed, pricer=pricer).plan

    own = search(None)
    return Outcome(
        formulas=_tokens_per_s(as_planned, search(as_planned)),
        rule=_tokens_per_s(by_rule, search(by_rule)),
        own=_tokens_per_s(as_planned, own),
        own_rule=_tokens_per_s(by_rule, own),
        fits=own is not None and as_planned.price(own).fits,
        fits_rule=own is not None and by_rule.price(own).fits,
    )


def _tokens_per_s(pricer: FlashFlexPricer, plan: Plan | None) -> float:
    return NO_PLAN if plan is None else pricer.price(plan).tokens_per_s


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; zero where a value is."""
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(values) else 0.0


OURS = ("ours, its formulas", "ours, its rule", "ours, our model", "the same by its rule")
HEADINGS = (
    *("setting", "model", "GB/s", "FlashFlex", "annealer", "×"),
    *(heading for ours in OURS for heading in (ours, "×")),
    "its memory accepts",
)


def lines(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The cells under `HEADINGS`: tokens/s and ratios to FlashFlex, the last line their geometric means."""
    found = []
    for row, outcome in zip(rows, outcomes, strict=True):
        cells = [str(row.setting), row.model, f"{row.inter_gb_per_s:g}", f"{row.flashflex_tokens_per_s:,.0f}"]
        for value in (row.annealer_tokens_per_s, outcome.formulas, outcome.rule, outcome.own, outcome.own_rule):
            cells += [f"{value:,.0f}" if value else "no plan", f"{value / row.flashflex_tokens_per_s:.2f}"]
        accepts = {(True, True): "yes", (True, False): "not by rule", (False, True): "by rule"}
        found.append([*cells, accepts.get((outcome.fits, outcome.fits_rule), "no")])
    cells = ["", "geometric mean", "", ""]
    for name in ("annealer", "formulas", "rule", "own", "own_rule"):
        cells += ["", f"{geometric_mean(_ratios(rows, outcomes, name)):.2f}"]
    return [*found, [*cells, ""]]


def table(found: Sequence[Sequence[str]]) -> Table:
    """The comparison for the terminal."""
    result = Table(title="tokens/s by FlashFlex's formulas; × is the ratio to FlashFlex's plan")
    for heading in HEADINGS:
        result.add_column(heading.replace(", ", ",\n"), justify="left" if heading in LEFT else "right")
    for k, cells in enumerate(found):
        if k == len(found) - 1:
            result.add_section()
        result.add_row(*cells)
    return result


def markdown(found: Sequence[Sequence[str]]) -> str:
    """The comparison for the documentation."""
    rule = ["---" if heading in LEFT else "--:" for heading in HEADINGS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADINGS, rule, *found))


def _ratios(rows: Sequence[Row], outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Ratios to FlashFlex of a field of `Outcome`, or of the annealer."""
    return [
        (row.annealer_tokens_per_s if name == "annealer" else getattr(outcome, name)) / row.flashflex_tokens_per_s
        for row, outcome in zip(rows, outcomes, strict=True)
    ]


def conditions(arguments: argparse.Namespace) -> str:
    """What the figures depend on, as stated above the table."""
    return "\n".join(
        (
            "hardware: the settings of HexiScale (arXiv 2409.01143); 3080Ti 56.9 TFLOPS 12 GB, 3090 80/24, "
            "4090 165.2/24, A800 312/80;",
            "  for FlashFlex's formulas TFLOPS of 1024⁴, GB of 1024³, 20 GB/s inside machines, 400 in A800's",
            "workload: 256 sequences of 4,096 tokens, full recompute; plans without replicated stages",
            "its rule, as in its and the annealer's figures: 8 micro-batches of ⌊32 / pipelines⌋ sequences",
            "FlashFlex: released search, corrected, 30 iterations for each of 1 to 8 pipelines; "
            "annealer: a quick one of ours, earlier",
            f"ours: solver portfolio, seed {arguments.seed}, {arguments.time_limit:g} s a search, "
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            f"command: {shlex.join(['python', '-m', 'experiments.flashflex_comparison', *sys.argv[1:]])}",
        )
    )


def write_csv(path: Path, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    """The rows with what our searches reach."""
    path.parent.mkdir(parents=True, exist_ok=True)
    row_names = [field.name for field in fields(Row)]
    names = [field.name for field in fields(Outcome)]
    header = [name if name.startswith("fits") else f"{name}_tokens_per_s" for name in names]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*row_names, *header])
        for row, outcome in zip(rows, outcomes, strict=True):
            reached = [getattr(outcome, name) for name in names]
            shown = [value if isinstance(value, bool) else round(value, 1) for value in reached]
            writer.writerow([*(getattr(row, name) for name in row_names), *shown])


def main() -> None:
    """Run the comparison of the command line."""
    rows = read_rows()
    parser = argparse.ArgumentParser(description="Our plans beside FlashFlex's, by FlashFlex's own formulas.")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a search (default 10)")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        choices=range(1, len(rows) + 1),
        metavar="ROW",
        help=f"rows 1 to {len(rows)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the searches (default 0)")
    parser.add_argument("--out", type=Path, default=Path("results/flashflex_comparison.csv"), help="csv file")
    parser.add_argument("--publish", action="store_true", help="the table into docs/results.md too")
    arguments = parser.parse_args()
    if arguments.rows:
        rows = tuple(rows[k - 1] for k in arguments.rows)
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print(conditions(arguments), markup=False)
    budget = Budget(arguments.time_limit)
    outcomes = []
    for row in rows:
        outcomes.append(compare(row, budget, arguments.seed))
        write_csv(arguments.out, rows[: len(outcomes)], outcomes)
    found = lines(rows, outcomes)
    console.print(table(found))
    if arguments.publish:
        publish_section("flashflex", markdown(found), writer="experiments.flashflex_comparison")
    console.print(str(arguments.out), markup=False)


if __name__ == "__main__":
    main()

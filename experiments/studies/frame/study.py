"""A study: the searches that it needs, and a page about their results."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jinja2
import joblib
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import hexiopt
from experiments.studies.frame import search
from experiments.studies.frame.figures import save
from experiments.studies.frame.rows import frame, points_frame
from experiments.studies.frame.search import Isolated, Measured, SearchSpec
from experiments.studies.frame.words import hardware, markdown, seconds, workloads
from hexiopt.cores import usable_cores
from hexiopt.errors import InputError, did_you_mean
from hexiopt.files.plan_file import write_text
from hexiopt.files.problem_file import problem_sha256
from hexiopt.report.style import count

DOCS = Path(hexiopt.__file__).parent.parent / "docs" / "results"
QUICK_S = 0.5  # of every search with --quick
SIZES = (16, 64, 256, 1024, 10_240)


@dataclass(frozen=True)
class Scale:
    """The scale of a study: a factor for all time limits, the number of seeds, and a selection of its rows.

    `quick` is one tiny setting with half a second per search. `only` keeps rows by label, `limits_s` sets the time
    limits of solvers, `solvers` and `sizes` (GPUs) replace those of studies that let them be chosen.
    """

    seconds: float = 1.0
    seeds: int = 5
    quick: bool = False
    sizes: tuple[int, ...] = SIZES
    solvers: tuple[str, ...] = ()
    inter_gb_per_s: float | None = None
    limits_s: Mapping[str, float] = field(default_factory=dict)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def limit_s(self, full_s: float) -> float:
        """The time limit of a search whose limit is `full_s` at full scale."""
        return self.seconds * (min(QUICK_S, full_s) if self.quick else full_s)


@dataclass(frozen=True)
class Report:
    """A part of a page: tables of texts by heading, claims computed from the rows, a figure, and explanatory notes.

    In a study with several parts, each has a `title` and a `name`, which is also its figure's file name.
    """

    tables: Mapping[str, pd.DataFrame]
    claims: Sequence[str]
    figure: Figure
    notes: str = ""
    title: str = ""
    name: str = ""


@dataclass(frozen=True)
class Study:
    """A question, the `searches` that answer it (one row each), and the `report` that makes the parts of the page.

    `always` has values of labels that `Scale.only` never drops, since the report compares with their rows.
    """

    name: str
    title: str
    doc: str
    searches: Callable[[Scale], Sequence[SearchSpec]]
    report: Callable[[pd.DataFrame, Scale], Sequence[Report]]
    always: Sequence[str] = ()

    @property
    def question(self) -> str:
        """The paragraphs of its module's docstring, without commands."""
        paragraphs = self.doc.strip().split("\n\n")
        return "\n\n".join(text for text in paragraphs if not text.strip().startswith("python -m"))

    def specs(self, scale: Scale) -> list[SearchSpec]:
        """The searches at a scale. Raises InputError for unknown labels and solvers, and where `only` leaves none."""
        found, solvers, known = [], set[str](), set[str]()
        for spec in self.searches(scale):
            values = {**spec.labels, "solver": spec.solver}
            labels = {key: str(value) for key, value in values.items() if not isinstance(value, float)}
            solvers.add(spec.solver)
            known |= labels.keys()
            asked = ((labels[key], (*own, *self.always)) for key, own in scale.only.items() if key in labels)
            if all(any(fnmatch(value, pattern) for pattern in own) for value, own in asked):
                found.append(replace(spec, time_limit_s=scale.limits_s.get(spec.solver, spec.time_limit_s)))
        for flag, names, own in (("--only", scale.only, known), ("--limits", scale.limits_s, solvers)):
            for name in names:
                if name not in own:
                    raise InputError(f"{flag}: {name!r} is not in {self.name}; {did_you_mean(name, sorted(own))}")
        if not found:
            raise InputError(f"--only: no search of {self.name} has these labels; see the columns of its CSV")
        return found

    def rows(self, scale: Scale, out: Path, console: Console, *, any_code: bool = False) -> pd.DataFrame:
        """The frame of all searches, measured now or before."""
        specs = self.specs(scale)
        return frame(specs, measured(self.name, specs, out / "searches", console, any_code=any_code))

    def run(self, scale: Scale, out: Path, command: str, console: Console, *, any_code: bool = False) -> "Outcome":
        """Run the searches that have not been measured yet, and write page, figures and CSV files in `out`."""
        specs, rows = self.specs(scale), self.rows(scale, out, console, any_code=any_code)
        folder = out / self.name
        folder.mkdir(parents=True, exist_ok=True)
        reports = self.report(rows, scale)
        pictures = [folder / f"{part.name or self.name}.png" for part in reports]
        for part, picture in zip(reports, pictures, strict=True):
            save(part.figure, picture)
        page = folder / f"{self.name}.md"
        names = [picture.name for picture in pictures]
        write_text(page, page_text(self, reports, names, conditions(specs, rows, command), command))
        table, points = folder / f"{self.name}.csv", folder / f"{self.name}_points.csv"
        write_text(table, rows.drop(columns="trajectory").to_csv(index=False))
        write_text(points, points_frame(rows).to_csv(index=False))
        failed = [f"{specs[k]}: {rows.at[k, 'reason']}" for k in rows.index[rows["status"] == "failed"]]
        return Outcome(rows, page, pictures, [table, points], failed)


@dataclass(frozen=True)
class Outcome:
    """The folder that a study has written, its rows, and the failed searches in words."""

    rows: pd.DataFrame
    page: Path
    figures: Sequence[Path]
    tables: Sequence[Path]
    failed: Sequence[str]

    def publish(self, docs: Path = DOCS) -> None:
        """Copy page and figures into the documentation."""
        docs.mkdir(parents=True, exist_ok=True)
        for path in (self.page, *self.figures):
            shutil.copyfile(path, docs / path.name)


def measured(
    name: str, specs: Sequence[SearchSpec], folder: Path, console: Console, *, any_code: bool = False
) -> dict[str, Measured]:
    """The measurement of each search by its SHA-256, from `folder` where it has one of this version of the code
    (`any_code`: of any version), else made now. Raises InputError where the folder cannot be made."""
    plans = folder / "plans"
    try:
        plans.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from None
    isolated = Isolated()
    cached = joblib.Memory(folder, verbose=0).cache(_kept, ignore=["spec", "isolated", "plan_path"])
    unique = {spec.sha256: spec for spec in specs}
    found: dict[str, Measured] = {}
    for key, spec in unique.items():
        if cached.check_call_in_cache(key, spec, isolated, plans):
            known: Measured = cached(key, spec, isolated, plans)
            if any_code or known["code"] == search.code_sha256():
                found[key] = known

    def one(key: str) -> tuple[str, Measured]:
        try:
            result, _ = cached.call(key, unique[key], isolated, search.path_of(unique[key], plans))
            return key, result
        except _FailedError as error:
            return key, error.measured

    waiting = [key for key in unique if key not in found]
    cores = usable_cores()
    longest_s = sum(unique[key].time_limit_s * unique[key].cores(cores) for key in waiting) / cores
    console.print(
        f"{name}: {count(len(waiting), 'search').replace('searchs', 'searches')} to run, {len(found)} known already; "
        f"at most about {longest_s / 60:.1f} min",
        highlight=False,
    )
    try:
        for key, result in track(
            _parallel(one, waiting, unique, cores), name, len(waiting), console=console, transient=True
        ):
            found[key] = result
            said = result["reason"] or seconds(result.get("step_time_s", float("nan")))
            if not console.is_terminal or result["status"] == "failed":
                took = f"{unique[key]}: {result['status']} after {seconds(result['runtime_s'])}"
                console.print(f"  {took}, {said}", highlight=False, markup=False, soft_wrap=True)
    finally:
        isolated.stop()
    return found


def _kept(key: str, spec: SearchSpec, isolated: Isolated, plan_path: Path) -> Measured:
    """The measurement of a search, cached by its `key`."""
    found = search.provenance() | isolated.measure(spec, plan_path)
    if found["status"] == "failed":
        raise _FailedError(found)
    return found


class _FailedError(Exception):
    """Raised for a failed search, so that it is not cached and will be run again."""

    def __init__(self, measured: Measured) -> None:
        super().__init__(measured["reason"])
        self.measured = measured


def _parallel(
    one: Callable[[str], tuple[str, Measured]], keys: Sequence[str], specs: Mapping[str, SearchSpec], cores: int
) -> Iterator[tuple[str, Measured]]:
    """Run the searches that keep most cores busy first, and as many at a time as the cores allow."""
    busy = {key: specs[key].cores(cores) for key in keys}
    for each in sorted(set(busy.values()), reverse=True):
        own = [key for key in keys if busy[key] == each]
        workers = joblib.Parallel(cores // each, backend="threading", return_as="generator_unordered")
        yield from workers(joblib.delayed(one)(key) for key in own)


def conditions(specs: Sequence[SearchSpec], rows: pd.DataFrame, command: str) -> list[str]:
    """The conditions of the rows: hardware, workload, limits, machine, and the command that repeats the searches."""
    problems = list({problem_sha256(spec.problem): spec.problem for spec in specs}.values())
    limits = rows.groupby("solver", sort=False)["time_limit_s"].unique()
    budgets = [f"{solver} {' / '.join(f'{limit:g}' for limit in sorted(own))} s" for solver, own in limits.items()]
    steps = sorted({spec.max_steps for spec in specs if spec.max_steps is not None})
    budgets += [f"but the searches end after {' or '.join(map(str, steps))} steps"] if steps else []
    code = ", ".join(dict.fromkeys(text[:8] for text in rows["code"]))
    plans = " or ".join(dict.fromkeys(problem.plans_in_words for problem in problems))
    return [
        *hardware((problem.cluster for problem in problems), problems[0].workload.precision),
        f"Workload: {workloads(problems)}; everything else is left to the search, unless a row says otherwise.",
        *([f"Bounds and gaps: of {plans}."] if (rows["bound_s"] > 0).any() else []),
        f"Time limits: {', '.join(budgets)}; seeds {', '.join(map(str, sorted(set(rows['seed']))))}.",
        f"Measured {' and '.join(sorted(set(rows['date'])))} on {'; '.join(dict.fromkeys(rows['machine']))}; code "
        f"{code}. Every plan is priced by our cost model, unless a column says otherwise.",
        f"Command: `{command}`",
    ]


def page_text(
    study: Study, reports: Sequence[Report], pictures: Sequence[str], stated: Sequence[str], command: str
) -> str:
    """The page: the question, then figure, tables and claims of each part, then the conditions."""
    parts = [
        {
            "title": report.title,
            "picture": picture,
            "tables": [(heading, markdown(table)) for heading, table in report.tables.items()],
            "claims": [claim[:1].upper() + claim[1:] for claim in report.claims],
            "notes": report.notes,
        }
        for report, picture in zip(reports, pictures, strict=True)
    ]
    return render(title=study.title, question=study.question, parts=parts, conditions=stated, command=command)


def render(**values: Any) -> str:
    """The page template, rendered with the given values."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    own = jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # Markdown, not HTML: nothing is escaped
    return own.get_template("page.md.jinja").render(**values)

"""Studies on made-up measurements: no search runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.studies import SOURCES
from experiments.studies.frame.page import Page, run
from experiments.studies.frame.search import BOUND, FOLDER
from hexiopt.study.jobs import SweepJob

Labels = dict[str, str]
_JUDGED = {
    "judged": dict.fromkeys(("formulas_tokens_per_s", "rule_tokens_per_s"), 1e6)
    | dict.fromkeys(("formulas_fit", "rule_fits"), 1.0)
}


def run_made_up(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    step_time_s: Callable[[Labels], float | None],
    *,
    quick: bool = True,
) -> Page:
    """A study whose searches have step times by their labels and seed."""

    def answer(jobs: Sequence[SweepJob], folder: Path, *_: Any, **__: Any) -> None:
        for job in jobs:
            labels = dict(pair.split("=", 1) for pair in job.overrides)
            finish(job, folder, step_time_s({**labels, "seed": f"{job.seed}", "solver": job.solver}))

    monkeypatch.setenv("QUICK", "1" if quick else "")
    monkeypatch.setenv(FOLDER, str(folder / "searches"))
    monkeypatch.setattr("experiments.studies.frame.search.run_jobs", answer)
    return run(SOURCES[name], f"python -m experiments.studies {name}")


def finish(job: SweepJob, folder: Path, step_time_s: float | None) -> None:
    """Write what a search could have measured."""
    about = {"machine": "2 cores", "date": "2026-01-01", "code": "c0de" * 16, "peak_gib": 0.5, "cpu_s": 2.0}
    if job.solver == BOUND:
        job.finish(folder, 0, "", runtime_s=1.0, status="bound", bound_s=0.5, **about)
        return
    if step_time_s is None or job.problem is None:
        job.finish(folder, 3, "nothing fits", runtime_s=1.0, status="not_found", bound_s=0.0, **about)
        return
    figures = {
        "bound_s": 0.4,
        "search_s": 1.0,
        "tokens_per_s": job.problem.workload.tokens / step_time_s,
        "mfu": 0.4 / step_time_s,
        "steps": 7,
        "first_plan_s": 0.1,
        "trajectory": [(0.1, 2 * step_time_s), (0.3, step_time_s)],
    }
    judged = _JUDGED if job.judge is not None and "flashflex" in job.judge else {}
    job.finish(folder, 0, "", step_time_s, 1.0, status="feasible", **figures, **judged, **about)


def claims_of(page: Page) -> list[str]:
    """The claims on a page, in order."""
    lines = page.text.partition("\n## Conditions")[0].splitlines()
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]

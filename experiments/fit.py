"""`hexiopt fit gpus=[3090,4090] model=...`: whether it fits, how fast, the longest context, and what owners do.

It writes the plan and those that prove its limits, which `hexiopt price` checks, and `fit.json`. `print=json` prints
that alone; `print=full` also says what the solver finds to fit on each GPU type alone, and writes `fit.csv`.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job, NoPlanError, interrupt
from experiments.app.own_files import FILE_CHOICES, shell_override
from hexiopt import Verdict, fit, verdict
from hexiopt.errors import InputError
from hexiopt.files.cluster_yaml import cluster_text
from hexiopt.report.notes import training_notes

_AT_ONCE, _SEARCH = "rules", "portfolio"


def run(job: Job) -> float:
    """Say whether the problem fits; returns the step time in seconds of a plan.

    Raises InputError, and NoPlanError where it does not fit, or less than `fit.require` states.
    """
    if job.pricer is not None and job.config.print != "full":
        raise InputError(f"pricer: {job.pricer} prices only the table of print=full; add that, or leave pricer out")
    assumed = "" if job.cards is None else job.cards.assumed
    with interrupt.caught():
        answer = _verdict(job, assumed)
    job.write_json("fit.json", answer.to_dict())
    written = ["fit.json", *_write_plans(job, answer)]
    if job.cards is not None:
        job.write("cluster.yaml", cluster_text(job.cards.data, [f"Assumed: {assumed}."] if assumed else [], {}))
        written.append("cluster.yaml")
    if not job.in_sweep:
        print(json.dumps(answer.to_dict(), indent=1) if job.config.print == "json" else _text(job, answer, written))
    if job.config.print == "full":
        _table(job)
    if answer.plan is None:
        raise NoPlanError(f"{answer.fits}: {answer.reason}")
    if answer.unmet:
        raise NoPlanError(f"fit.require: {'; '.join(answer.unmet)}")
    return answer.plan.cost.step_time_s


def _verdict(job: Job, assumed: str) -> Verdict:
    """By the solver; where the one that starts at once finds nothing that a search may find, by a search too."""
    options = {"require": job.config.fit.require, "offers": job.config.fit.offers, "assumed": assumed}
    solver = job.config.solver.name
    arguments = job.search_arguments(compiled=solver != _AT_ONCE)
    del arguments["progress"]
    if solver == _AT_ONCE and arguments["max_steps"] is None:
        del arguments["max_steps"]
    answer = verdict(job.problem, **options, **arguments)
    if answer.may_fit and solver == _AT_ONCE:
        again = job.search_arguments() | {"solver": _SEARCH, "max_steps": job.config.solver.max_steps}
        del again["progress"]
        answer = verdict(job.problem, **options, **again)
    return answer


def _write_plans(job: Job, answer: Verdict) -> list[str]:
    limits = answer.limits
    plans = {
        "plan": answer.plan,
        "context": limits.seq_len,
        "micro_batch": limits.micro_batch,
        "layers": limits.num_layers,
    }
    names = [f"{name}.json" for name in plans]
    job.drop(*names)
    for name, plan in plans.items():
        if plan is not None:
            job.write_json(f"{name}.json", plan.to_dict())
    return [f"{name}.json" for name, plan in plans.items() if plan is not None]


def _text(job: Job, answer: Verdict, written: list[str]) -> str:
    lines = [str(answer)]
    if answer.plan is not None:
        trained = not training_notes(answer.problem, answer.plan)
        steps = [f"hexiopt train {shell_override('plan', job.folder / 'plan.json')}"] if trained else []
        steps.append(f"hexiopt plan {' '.join(_as_typed(job.overrides))}  (a longer search)")
        lines += [f"{'' if number else 'next':<7}{step}" for number, step in enumerate(steps)]
    return "\n".join([*lines, f"files  {shell_override('', job.folder).lstrip('=')}: {', '.join(written)}"])


def _as_typed(overrides: Sequence[str]) -> Iterator[str]:
    """The overrides of the problem as they were typed: `own_files.py` rewrites files and names of the Hub."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group, _, rest = key.partition(".")
        if rest == "path" and group in FILE_CHOICES:
            name = value.strip("'")
            yield shell_override(group, Path(name)) if Path(name).exists() else f"{group}={name}"
        elif value != FILE_CHOICES.get(group) and group not in ("fit", "print", "hydra", "solver"):
            yield override.lstrip("+")


def _table(job: Job) -> None:
    """What the solver finds to fit, on all devices and on those of each GPU type."""
    arguments: dict[str, Any] = job.search_arguments()
    result = fit(job.problem, precision=job.config.fit.precision, pricer=job.pricer, **arguments)
    job.write("fit.csv", result.to_csv())
    written = ["fit.csv"]
    for fitting in result.fittings:
        plans = {limit.quantity: limit.plan for limit in fitting.limits} | {"micro_batch": fitting.micro_batch_plan}
        for quantity, plan in plans.items():
            if plan is not None:
                written.append(re.sub(r"[^\w.-]", "_", f"{fitting.devices}-{quantity}.json"))
                job.write_json(written[-1], plan.to_dict())
    job.show("", Text(str(result)))
    job.show_files(*written)


if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))

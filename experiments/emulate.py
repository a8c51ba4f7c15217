"""`hexiopt emulate cluster=small_mixed model=...`: trains the plans of several solvers on an emulated cluster."""

import math
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.app.cli import main
from experiments.app.common import FailedError, Job, NoPlanError, interrupt, plan_of, search, solvers_of
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_file_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.architectures import LLAMA_FAMILY
from hexiopt.problem.problem import Problem

if TYPE_CHECKING:
    from experiments.lab.emulate.bench import EmulationBench

_ROOM = 4.5  # time given to a stand-in model over the time that it takes at this machine's full speed


@dataclass(frozen=True)
class _Entry:
    """A plan with the name of its solver and its cost."""

    name: str
    plan: Plan
    cost: Cost


def run(job: Job) -> float:
    """Measure the plan of every solver; returns the least measured step time in seconds on the cluster.

    Raises InputError, NoPlanError where no solver finds a plan, FailedError.
    """
    if find_spec("torch") is None:
        raise InputError("emulate: needs torch; install hexiopt[train]")
    from experiments.lab.emulate.bench import EmulationBench
    from experiments.lab.emulate.fabric import network_hindrance
    from experiments.lab.emulate.stand_in import divisors
    from experiments.reports.emulated import Emulated, draw_emulated, emulated_csv, emulated_table
    from hexiopt.report.table import headline
    from runtime.launch.admission import check_problem, check_trainable
    from runtime.launch.meeting import TrainingFailedError

    config = job.config.emulate
    if not config.solvers and not job.config.plan:
        raise InputError("emulate.solvers: [] names no solver; name one or more, or give plan=FILE")
    plan_file = job.plan_file() if job.config.plan else None
    problem = job.problem if plan_file is None else plan_file.problem
    check_problem(problem)
    if problem.model.layers:
        raise InputError(
            f"emulate: model {problem.model.name}: layers of kinds are not made narrower; take one of "
            f"{', '.join(LLAMA_FAMILY)}, or train its plan (hexiopt train plan=...)"
        )
    entries = []
    if plan_file is not None:
        check_trainable(str(job.config.plan), plan_file)
        entries.append(_Entry("plan", plan_file.plan, PlanPricer(problem).price(plan_file.plan)))
    divisor = max(divisors(problem)) if config.divisor is None else config.divisor
    hindrance = network_hindrance(problem.cluster)
    if config.network and hindrance is not None:
        raise InputError(f"emulate.network: {hindrance}; take emulate.network=false, which leaves links as they are")
    shaped = hindrance is None if config.network is None else config.network
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = EmulationBench(Path(folder), problem, divisor, job.config.seed)
        entries += _plans(job, problem)
        try:
            dilation = _dilation(entries, bench) if config.dilation is None else config.dilation
            links = "links shaped" if shaped else f"links as they are ({hindrance or 'emulate.network=false'})"
            job.show(f"A stand-in 1/{divisor} as wide; a second of the cluster takes {dilation:g} s here; {links}.")
            for entry in entries:
                if interrupt.pressed:
                    break
                steps = bench.paced_steps(entry.plan, entry.cost, config.steps, dilation, shaped=shaped)
                rows.append(Emulated(entry.name, entry.cost.step_time_s, steps.seconds, steps.late))
                job.show(f"{entry.name}: predicted {rows[-1].predicted_s:.3f} s, measured {rows[-1].measured_s:.3f} s")
        except TrainingFailedError as error:
            raise FailedError(str(error)) from None
    if not rows:
        raise FailedError("interrupted before a plan was measured")
    for entry in entries:
        content = plan_file_to_dict(problem, entry.plan, entry.cost, {"name": entry.name})
        job.write_json(f"plan-{entry.name}.json", content)
    job.write("emulation.csv", emulated_csv(rows, dilation))
    written = ["emulation.csv"]
    if job.pictures:
        job.draw("emulation.png", lambda path: draw_emulated(rows, headline(problem), path))
        written.append("emulation.png")
    job.show("", headline(problem), "", emulated_table(rows))
    job.show_files(*written, *(f"plan-{entry.name}.json" for entry in entries))
    return min(row.measured_s for row in rows)


def _plans(job: Job, problem: Problem) -> list[_Entry]:
    """The plans of all solvers that find one that can be trained; the others are printed with the reason."""
    from hexiopt.exports.trainable import untrainable

    entries, reasons = [], []
    for solver in solvers_of(job, job.config.emulate.solvers):
        name = solver.name
        try:
            plan = plan_of(search(job, problem, solver=solver))
        except NoPlanError as none:
            reasons.append(f"{name}: {none}")
            continue
        cannot = untrainable(problem.model, problem.workload, plan)
        if cannot is None:
            entries.append(_Entry(name, plan, plan.cost))
        else:
            reasons.append(f"{name}: {cannot}")
    if not entries and not job.config.plan:
        raise NoPlanError("; ".join(reasons))
    for reason in reasons:
        job.show(f"left out: {reason}")
    return entries


def _dilation(entries: list[_Entry], bench: "EmulationBench") -> float:
    """The factor, of two digits, that slows the cluster down so that every stand-in keeps up with its plan."""
    most = max(_ROOM * bench.unpaced_s(entry.plan) / entry.cost.step_time_s for entry in entries)
    digit = 10.0 ** (math.floor(math.log10(most)) - 1)
    return float(f"{math.ceil(most / digit) * digit:.6g}")


if __name__ == "__main__":
    sys.exit(main(["emulate", *sys.argv[1:]]))

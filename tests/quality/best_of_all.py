"""The best plan of all solvers at four times the work, to which `tests/solvers/test_never_behind.py` holds the default.

python -m tests.quality.best_of_all 13 28        # drawn problems; a minute of CPU time each, of 100 GPUs many
python -m tests.quality.best_of_all --reprice    # all that are stored, at once: after a change of the cost model

Of a drawn problem (`tests/solvers/drawn.py`): every planner and every baseline that takes it, and the default where a
machine kind or a freedom is taken away (`sub_problem`), each with four times the steps that the default has in the
test. Oracles are left out, as each of their steps may take minutes. The plan is stored beside its step time, so that a
change of prices is seen; a better plan that was stored before stays, at its price of today. Plans that are repriced
bind less than those of a new search by the new prices would.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_to_dict
from hexiopt.files.problem_file import problem_sha256
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.registry import baseline, for_any_problem, make_solver, names, solver_class
from tests.golden import files
from tests.quality.runs import price_s
from tests.quality.worker import NEVER_S
from tests.solvers.drawn import drawn_problem, sub_problem

BEST = Path(__file__).with_name("best_of_all.json.gz")
STEPS, TIMES = 400, 4  # of the default in the test, and how many times as many all others have


@dataclass(frozen=True)
class Best:
    """The best plan of a drawn problem as plain data, who made it, within how many steps, and its price then."""

    solver: str
    max_steps: int
    problem_sha256: str
    step_time_s: float
    plan: dict[str, Any]


def read(path: Path = BEST) -> dict[int, Best]:
    """The stored plans by the problem's number."""
    return {int(number): Best(**data) for number, data in files.read(path).items()} if path.exists() else {}


def write(best: dict[int, Best], path: Path = BEST) -> None:
    """Store these instead of all that is stored."""
    files.write(path, {str(number): asdict(best[number]) for number in sorted(best)})


def all_solvers() -> list[str]:
    """Every planner and baseline without sequence layouts."""
    planners = [name for name in names(for_any_problem) if solver_class(name).capabilities.kind == "planner"]
    return [*planners, *names(baseline)]


def candidates(problem: Problem, number: int, max_steps: int) -> Iterator[Best]:
    """The plan of each solver that has one, and that of the default with a freedom or a machine kind less."""
    asked = [(name, name, problem) for name in all_solvers()]
    for label, solver, task in [*asked, ("portfolio, narrower", "portfolio", sub_problem(problem, number))]:
        try:
            plan = make_solver(solver).solve(task, Budget(NEVER_S, max_steps)).plan
        except InputError:
            continue
        if plan is not None:
            data = plan_to_dict(plan, problem.cluster)
            yield Best(label, max_steps, problem_sha256(problem), price_s(problem, data), data)


def reprice(best: Best, problem: Problem) -> Best:
    """The same plan at its price of today. Raises AssertionError where it breaks a rule."""
    return replace(best, problem_sha256=problem_sha256(problem), step_time_s=price_s(problem, best.plan))


def main() -> None:
    """Bring the plans of the stated problems up to date, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="*", metavar="NUMBER")
    parser.add_argument("--reprice", action="store_true", help="only price what is stored anew")
    options = parser.parse_args()
    if options.reprice:
        write({number: reprice(best, drawn_problem(number)) for number, best in read().items()})
    for number in options.numbers:
        problem, stored = drawn_problem(number), read()
        known = [reprice(stored[number], problem)] if number in stored else []
        plans = (*known, *candidates(problem, number, TIMES * STEPS))
        best = min(plans, key=lambda plan: plan.step_time_s)
        write({**stored, number: best})
        print(f"{number}: {best.step_time_s:.6g} s by {best.solver} in {best.max_steps} steps", flush=True)


if __name__ == "__main__":
    main()

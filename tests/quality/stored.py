"""What the panel's step times were when they were last stored, and the budget of each problem.

`stored.json` has the numbers; `plans.json.gz` has one of the plans of each problem, so that a change of the cost model,
after which old and new step times are no longer of one kind, is noticed and not taken for a better or worse search.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hexiopt.files.problem_file import problem_sha256
from tests.golden import files
from tests.quality.runs import Outcome, panel_problem, price_s

STORED, PLANS = (Path(__file__).with_name(name) for name in ("stored.json", "plans.json.gz"))
SAME = 1e-9  # of a price
FEW_STEPS = 200  # of a problem that has none stored


@dataclass(frozen=True)
class Entry:
    """A problem's budget in steps of the solver that was stored, the step time of each seed from 0, and the CPU seconds
    that all these runs took together."""

    max_steps: int
    problem_sha256: str
    step_time_s: tuple[float, ...]
    cpu_s: float

    @classmethod
    def of(cls, problem: str, max_steps: int, outcomes: list[Outcome]) -> "Entry":
        """What is stored of the runs of all seeds. Raises ValueError where one has no plan."""
        step_s = tuple(outcome.step_time_s for outcome in outcomes)
        if float("inf") in step_s:
            raise ValueError(f"{problem}: a seed has no plan after {max_steps} steps; give it more")
        cpu_s = round(sum(outcome.cpu_s for outcome in outcomes), 1)
        return cls(max_steps, problem_sha256(panel_problem(problem)), step_s, cpu_s)


def read() -> dict[str, Entry]:
    """The stored entries by problem; none where there is no file."""
    data = files.read(STORED) if STORED.exists() else {}
    return {name: Entry(**entry | {"step_time_s": tuple(entry["step_time_s"])}) for name, entry in data.items()}


def write(entries: dict[str, Entry], plans: dict[str, Any]) -> None:
    """Store these entries, and these plans, instead of those of the same problems."""
    merged = {name: asdict(entry) for name, entry in {**read(), **entries}.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in merged.items())
    STORED.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")
    files.write(PLANS, {**(files.read(PLANS) if PLANS.exists() else {}), **plans})


def stale(name: str, entry: Entry, plan: Any) -> str:
    """Why the step times of `entry` are no longer comparable with those of today, in words; empty where they are.

    `plan` is the stored plan of the problem, which the least of the stored step times belongs to.
    """
    problem = panel_problem(name)
    if problem_sha256(problem) != entry.problem_sha256:
        return f"{name}: the problem, or what its GPUs are calibrated to, is another one than when it was stored"
    now_s, then_s = price_s(problem, plan), min(entry.step_time_s)
    if abs(now_s - then_s) > SAME * then_s:
        return f"{name}: the stored plan was priced at {then_s:.6g} s a step, and is now at {now_s:.6g} s"
    return ""

"""A search for the page, in a process of its own: `python -m experiments.web.job FOLDER`.

The question comes as one line on stdin; what is said goes to stdout, a line of JSON each; files go into the folder. The
process ends with all that it started when stdin closes, so also where the server was killed.
"""

import json
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hexiopt as hx
from experiments.app.compile import compile_once, missing_kernels
from experiments.web.question import Question, question_from
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.errors import InputError
from hexiopt.files.cluster_yaml import cluster_text
from hexiopt.files.plan_file import write_text
from hexiopt.problem.problem import Problem
from hexiopt.report import style
from hexiopt.report.page.html import report_html
from hexiopt.report.trace import timeline_events
from hexiopt.solving import Progress
from hexiopt.solving.result import Status

FILES = ("plan.json", "report.html", "timeline.json", "plan.png", "cluster.yaml", "command.txt")
_BOUND_SHARE = 0.2  # of the seconds
_AT_ONCE_S, _NEXT_S = 2.0, 3.0  # what needs no search, an alternative
_MEMORY_BYTES, _FILE_BYTES = 32 * 2**30, 2**28  # addresses, of which numba and OR-Tools reserve more than they use
_GIB = 2**30


def main(folder: Path) -> None:
    """Answer the question on stdin."""
    for limit, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_FSIZE, _FILE_BYTES)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        question = question_from(json.loads(line))
        problem = question.problem()
        {"plan": _plan, "next": _next}[question.task](question, problem, folder)
    except InputError as error:
        say(done=True, refused=str(error))
    except MemoryError:
        say(
            done=True,
            refused=f"the search needs more than {_MEMORY_BYTES // _GIB} GiB; ask for less, or use the program",
        )


def say(**news: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(news, allow_nan=False), flush=True)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _plan(question: Question, problem: Problem, folder: Path) -> None:
    """What `hexiopt fit` says at once, then of the best plan that a search finds."""
    answer = hx.verdict(problem, time_limit_s=_AT_ONCE_S, assumed=question.cards.assumed)
    commands, drawn = question.commands, dict[str, Any]()
    if answer.plan is not None or answer.may_fit:
        solution = _search(problem, answer.plan, question.seconds)
        if solution.plan is None:
            answer = replace(answer, reason=solution.reason, proved=solution.status == Status.INFEASIBLE)
        else:
            answer = replace(answer, plan=solution.plan, reason=f"{_above(solution.gap)}; a plan is not a promise")
            _write(solution, question, folder)
            drawn["bars"] = list(_bars(solution.plan))
            drawn["files"] = [name for name in FILES if (folder / name).exists()]
            commands.append("hexiopt train plan=plan.json")
    (verdict_in_words, reason), *lines = replace(answer, cures=()).lines()
    cures = [{"text": str(cure), "form": question.form_of(cure.plan.problem)} for cure in answer.cures]
    drawn |= {"verdict": verdict_in_words, "reason": reason, "lines": lines, "cures": cures, "commands": commands}
    say(done=True, task="plan", fits=answer.plan is not None, **drawn)


def _search(problem: Problem, start: hx.PlacedPlan | None, seconds: float) -> hx.Solution:
    """The best plan from `start` on, above a bound."""
    _compile()
    bound_s, tokens = _BOUND_SHARE * seconds, problem.workload.tokens

    def hear(progress: Progress) -> bool:
        if math.isfinite(progress.best_s):
            say(progress=f"{tokens / progress.best_s:,.0f} tokens/s so far")
        return True

    solution = hx.solve(problem, time_limit_s=seconds - bound_s, progress=False, on_progress=hear, start=start)
    return solution if solution.plan is None else solution.above(hx.lower_bound(problem, bound_s))


def _compile() -> None:
    if next(missing_kernels(), None) is not None:
        say(progress="compiling once, for one to three minutes")
        compile_once()


def _above(gap: float | None) -> str:
    return "no bound is known" if gap is None or gap >= 1 else f"no plan is more than {style.percent(gap)} faster"


def _write(solution: hx.Solution, question: Question, folder: Path) -> None:
    plan = solution.plan
    assert plan is not None
    plan.save(folder / "plan.json")
    report = report_html(plan.facts, trajectory=solution.trajectory, command=question.commands[-1])
    write_text(folder / "report.html", report)
    write_text(folder / "timeline.json", json.dumps(timeline_events(plan.facts), allow_nan=False))
    plan.plot().savefig(folder / "plan.png")
    write_text(folder / "cluster.yaml", cluster_text(question.cards.data, ["The cards of the page."], {}))
    write_text(folder / "command.txt", "\n".join(question.commands) + "\n")


def _bars(plan: hx.PlacedPlan) -> Iterator[dict[str, Any]]:
    """What the fullest card of every stage holds, as shares of its limit."""
    for number in range(len(plan.pipelines)):
        for stage in plan.facts.stages(number):
            memory, limit = stage.cost.memory, stage.cost.limit_bytes
            cards = f"{len(stage.devices)} × " if len(stage.devices) > 1 else ""
            parts = [(part, getattr(memory, part)) for part in MEMORY_PARTS]
            yield {
                "name": f"{stage.name} {cards}{stage.gpus}",
                "layers": style.count(stage.num_layers, "layer"),
                "of": f"{memory.total / _GIB:.1f} of {limit / _GIB:.1f} GiB",
                "parts": [
                    {
                        "label": f"{style.MEMORY_LABELS[part]} {size / _GIB:.2f} GiB",
                        "share": size / limit,
                        "colour": style.MEMORY_COLOURS[part],
                    }
                    for part, size in parts
                    if size > 0
                ],
            }


def _next(question: Question, problem: Problem, folder: Path) -> None:
    _compile()
    say(progress="planning with other machines and links, one after another")
    limit_s = min(_NEXT_S, question.seconds)
    result = hx.what_if(problem, time_limit_s=limit_s, processes=1, bound_time_limit_s=0.5, progress=False)
    rows = [[row["alternative"], *_gain(row)] for row in result]
    say(done=True, task="table", head=["instead", "tokens/s", "gain"], rows=rows)


def _gain(row: Any) -> list[str]:
    rate, gain = row.get("tokens_per_s"), row.get("gain")
    return ["none" if rate is None else f"{rate:,.0f}", "none" if gain is None else f"{100 * gain:+.1f} %"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

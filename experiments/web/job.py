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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hexiopt as hx
from experiments.app.compile import compile_once, missing
from experiments.web.question import Question, question_from
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.errors import InputError
from hexiopt.files.cluster_yaml import cluster_text
from hexiopt.files.plan_file import write_text
from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.problem import Problem
from hexiopt.report import style
from hexiopt.report.page.html import report_html
from hexiopt.report.trace import timeline_events
from hexiopt.solving import Progress
from hexiopt.study.fitting.owners import owners_tokens_per_s

FILES = ("plan.json", "report.html", "timeline.json", "plan.png", "cluster.yaml", "command.txt")
_BOUND_SHARE = 0.2  # of the seconds
_CURE_S, _MOST_CURES, _LEAST_TOKENS = 3.0, 3, 256  # a cure is searched for as long, until its first plan
_LIMIT_S, _NEXT_S = 2.0, 3.0  # a question about limits, an alternative
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
        if next(missing(), None) is not None:
            say(progress="compiling once, for one to three minutes")
            compile_once()
        {"plan": _plan, "limits": _limits, "next": _next}[question.task](question, problem, folder)
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
    tokens = problem.workload.tokens

    def hear(progress: Progress) -> bool:
        if math.isfinite(progress.best_s):
            say(progress=f"{tokens / progress.best_s:,.0f} tokens/s so far")
        return True

    bound_s = _BOUND_SHARE * question.seconds
    solution = hx.solve(problem, time_limit_s=question.seconds - bound_s, progress=False, on_progress=hear)
    if solution.plan is None:
        cures = []
        for cure in _cures(question):
            say(progress=f"no plan; trying {cure['text']}")
            if _has_plan(cure["question"]):
                cures.append({"text": cure["text"], "form": cure["form"]})
            if len(cures) == _MOST_CURES:
                break
        say(
            done=True,
            task="plan",
            fits=False,
            verdict=_verdict(str(solution.status)),
            reason=solution.reason,
            cures=cures,
        )
        return
    solution = solution.above(hx.lower_bound(problem, bound_s))
    plan = solution.plan
    assert plan is not None
    facts, cost = plan.facts, plan.cost
    plan.save(folder / "plan.json")
    report = report_html(facts, trajectory=solution.trajectory, command=question.command)
    write_text(folder / "report.html", report)
    write_text(folder / "timeline.json", json.dumps(timeline_events(facts), allow_nan=False))
    plan.plot().savefig(folder / "plan.png")
    write_text(folder / "cluster.yaml", cluster_text(question.cluster_data, ["The cards of the page."], {}))
    write_text(folder / "command.txt", question.command + "\n")
    say(
        done=True,
        task="plan",
        fits=True,
        verdict=f"Fits: {cost.tokens_per_s:,.0f} tokens/s",
        reason=f"{style.seconds(cost.step_time_s)} a step, predicted; {_above(solution.gap)}. A plan is not a promise.",
        bars=list(_bars(plan)),
        beside=[_beside(name, cost.tokens_per_s, other) for name, other in owners_tokens_per_s(problem).items()],
        files=[name for name in FILES if (folder / name).exists()],
        command=question.command,
        train="hexiopt train plan=plan.json",
    )


def _verdict(status: str) -> str:
    return "Does not fit" if status == "infeasible" else "No plan was found"


def _above(gap: float | None) -> str:
    return "no bound is known" if gap is None or gap >= 1 else f"no plan is more than {style.percent(gap)} faster"


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


def _beside(name: str, ours: float, theirs: float) -> str:
    if math.isnan(theirs):
        return f"{name}: does not fit"
    ratio = ours / theirs
    return f"{ratio:.2f} × {name}: {theirs:,.0f} tokens/s"


def _cures(question: Question) -> Iterator[dict[str, Any]]:
    """Changes of the question under which there may be a plan, the cheapest first; as a browser's form has them."""
    trainings = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[question.training]
    for training in trainings:
        text = {"lora": "LoRA instead of all weights", "qlora": "QLoRA: frozen weights in 4 bits"}[training]
        yield _cure(question, text, training=training)
    tokens = question.seq_len // 2
    while tokens >= _LEAST_TOKENS:
        yield _cure(question, f"sequences of {tokens:,} tokens", seq_len=tokens)
        tokens //= 2
    first = dict(question.pcs[0])
    for gpu in _larger(question.pcs):
        pcs = ({**first, gpu: first.get(gpu, 0) + 1}, *question.pcs[1:])
        yield _cure(question, f"one more card: {gpu}", pcs=pcs)


def _cure(question: Question, text: str, **changes: Any) -> dict[str, Any]:
    form = changes | ({"pcs": [list(pc.items()) for pc in changes["pcs"]]} if "pcs" in changes else {})
    return {"text": text, "question": replace(question, **changes), "form": form}


def _larger(pcs: Sequence[Any]) -> list[str]:
    """Types of consumer cards with as much memory as the largest that is there, the smallest first."""
    types = catalogue()
    most = max(types[name].usable_memory_bytes for pc in pcs for name in pc)
    names = [name for name in types if name.startswith("rtx_") and types[name].usable_memory_bytes >= most]
    return sorted(names, key=lambda name: types[name].usable_memory_bytes)


def _has_plan(question: Question) -> bool:
    try:
        solution = hx.solve(
            question.problem(), time_limit_s=_CURE_S, progress=False, on_progress=lambda news: math.isinf(news.best_s)
        )
    except InputError:  # such as a card that the precision excludes
        return False
    return solution.plan is not None


def _limits(question: Question, problem: Problem, folder: Path) -> None:
    say(progress="asking for the longest context, the most layers and the largest micro-batch")
    result = hx.fit(problem, time_limit_s=min(_LIMIT_S, question.seconds), precision=0.05, progress=False)
    names = {
        "devices": "cards",
        "seq_len": "longest context",
        "micro_batch": "micro-batch",
        "num_layers": "most layers",
    }
    _table(names, list(result))


def _next(question: Question, problem: Problem, folder: Path) -> None:
    say(progress="planning with other machines and links, one after another")
    limit_s = min(_NEXT_S, question.seconds)
    result = hx.what_if(problem, time_limit_s=limit_s, processes=1, bound_time_limit_s=0.5, progress=False)
    _table({"alternative": "instead", "tokens_per_s": "tokens/s", "gain": "gain"}, list(result))


def _table(names: dict[str, str], rows: Sequence[Any]) -> None:
    body = [[_cell(key, row.get(key)) for key in names] for row in rows]
    say(done=True, task="table", head=list(names.values()), rows=body)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "gain":
        return f"{100 * value:+.1f} %"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

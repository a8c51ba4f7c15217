"""A plan's predicted step as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hexiopt.cost.cost import PipelineCost
from hexiopt.files.problem_file import problem_sha256
from hexiopt.plan.plan import Pipeline
from hexiopt.report.facts import PlanFacts
from hexiopt.report.rows import identical_pipelines
from hexiopt.report.style import place
from hexiopt.report.timeline import num_operations, pipeline_spans
from hexiopt.units import MICROSECOND

MAX_EVENTS = 200_000
# Names of Chrome's own palette.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "weights": "thread_state_runnable",
    "send_forward": "rail_response",
    "send_backward": "rail_animation",
    "gradient_sync": "thread_state_sleeping",
    "optimizer": "rail_idle",
}
_LETTERS = {"forward": "F", "backward": "B", "weights": "W", "send_forward": "→", "send_backward": "←"}

_Event = dict[str, Any]


def timeline_events(facts: PlanFacts) -> dict[str, Any]:
    """The trace in µs: one process per pipeline, one thread per replica of a stage and per link on which it sends.

    Beyond 200,000 events, one pipeline represents all equal ones; if that does not suffice, pipelines are left out, and
    a pipeline that is too long by itself has one event per replica. `otherData` says what was shortened.
    """
    plan, priced = facts.plan, facts.cost.pipelines
    shown = [(index, 1) for index in range(len(plan.pipelines))]
    if sum(_num_events(facts, index) for index, _ in shown) > MAX_EVENTS:
        groups = identical_pipelines(facts.problem, plan)
        shown = [(max(group, key=lambda index: priced[index].end_s), len(group)) for group in groups]
    shown.sort(key=lambda item: -priced[item[0]].end_s)
    events: list[_Event] = []
    free, num_shown = MAX_EVENTS, 0
    for index, num_equal in shown:
        whole = _num_events(facts, index) <= MAX_EVENTS // 2
        need = _num_events(facts, index) if whole else _num_fixed_events(facts, index)
        if events and need > free:
            break
        free -= need
        num_shown += num_equal
        events += _pipeline_events(facts, index, num_equal, whole)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "hexiopt",
            "kind": "predicted",
            "problem_sha256": problem_sha256(facts.problem),
            "step_time_s": facts.cost.step_time_s,
            "num_pipelines": len(plan.pipelines),
            "num_pipelines_shown": sum(1 for event in events if event["name"] == "process_name"),
            "num_pipelines_alike": num_shown,
            "num_pipelines_left_out": len(plan.pipelines) - num_shown,
        },
    }


def _num_fixed_events(facts: PlanFacts, index: int) -> int:
    """The number of events that do not depend on the number of micro-batches."""
    replicas = sum(len(stage.parallelism.executors) for stage in facts.plan.pipelines[index].stages)
    return 2 + 5 * replicas + 2 * len(facts.cost.pipelines[index].messages)


def _num_events(facts: PlanFacts, index: int) -> int:
    pipeline, messages = facts.plan.pipelines[index], facts.cost.pipelines[index].messages
    num_messages = pipeline.num_micro_batches * pipeline.num_chunks * len(messages)
    return _num_fixed_events(facts, index) + num_operations(facts, index) + num_messages


_Lane = tuple[int, int, str, int]  # stage, replica, and for messages also kind and receiving replica


def _lanes(pipeline: Pipeline, priced: PipelineCost) -> dict[_Lane, str]:
    """The threads of a pipeline in order, with their names without devices."""
    names = {
        (s, r): f"stage {s}" + (f".{r}" if len(stage.parallelism.executors) > 1 else "")
        for s, stage in enumerate(pipeline.stages)
        for r in range(len(stage.parallelism.executors))
    }
    lanes = {(*at, "", 0): name for at, name in names.items()}
    kinds = ("send_forward", "send_backward")
    receivers = Counter((link.backward, link.stage, link.sender) for link in priced.messages)
    for link in priced.messages:
        to = f" {link.receiver}" if receivers[link.backward, link.stage, link.sender] > 1 else ""
        kind = kinds[link.backward]
        name = f"{names[link.stage, link.sender]} sends {_LETTERS[kind]}{to}"
        lanes[link.stage, link.sender, kind, link.receiver] = name
    order = ("", *kinds)
    return dict(sorted(lanes.items(), key=lambda lane: (*lane[0][:2], order.index(lane[0][2]), lane[0][3])))


def _pipeline_events(facts: PlanFacts, index: int, num_equal: int, whole: bool) -> Iterator[_Event]:
    pipeline = facts.plan.pipelines[index]
    others = f", represents {num_equal} equal ones" if num_equal > 1 else ""
    batch = f"{pipeline.num_micro_batches} × {pipeline.micro_batch_size}"
    yield meta_event("process_name", index, 0, name=f"pipeline {index} ({batch}{others})")
    yield meta_event("process_sort_index", index, 0, sort_index=index)
    threads = {}
    for tid, (lane, name) in enumerate(_lanes(pipeline, facts.cost.pipelines[index]).items()):
        threads[lane] = tid
        if not lane[2]:
            name += f": {place(facts.problem.cluster, pipeline.stages[lane[0]].parallelism.executors[lane[1]])}"
        yield meta_event("thread_name", index, tid, name=name)
        yield meta_event("thread_sort_index", index, tid, sort_index=tid)
    number = pipeline.num_micro_batches
    for span in pipeline_spans(facts, index, whole):
        lane = span.stage, span.executor, span.kind if span.is_message else "", span.receiver
        at, time = (index, threads[lane]), (span.start_s, span.end_s)
        if span.kind in _LETTERS:
            chunk = span.chunk if pipeline.num_chunks > 1 else None
            yield operation_event(span.kind, *at, span.micro_batch, chunk, *time)
        elif span.kind == "micro_batches":
            yield _slice(f"{number} micro-batches", "forward", *at, *time, num_micro_batches=number)
        else:
            name = "gradient sync" if span.kind == "gradient_sync" else facts.last_phase
            yield _slice(name, span.kind, *at, *time)


def meta_event(kind: str, pid: int, tid: int, **args: Any) -> _Event:
    """An event that names or sorts a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def operation_event(
    kind: str, pid: int, tid: int, micro_batch: int, chunk: int | None, start_s: float, end_s: float
) -> _Event:
    """An operation or a message of a micro-batch, and of one layer range where a stage has several."""
    name = f"{_LETTERS[kind]}{micro_batch}" + ("" if chunk is None else f"·{chunk}")
    more = {} if chunk is None else {"layer_range": chunk}
    return _slice(name, kind, pid, tid, start_s, end_s, micro_batch=micro_batch, **more)


def _slice(name: str, kind: str, pid: int, tid: int, start_s: float, end_s: float, **args: int) -> _Event:
    time = {"ts": start_s / MICROSECOND, "dur": (end_s - start_s) / MICROSECOND}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, **time, "cname": _COLOURS[kind], "args": args}

"""A plan's predicted step as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing."""

from collections.abc import Iterator
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.plan import Plan
from hexiopt.problem import Problem
from hexiopt.report.rows import alike_pipelines, num_operations
from hexiopt.report.style import place
from hexiopt.simulate import simulate_pipeline
from hexiopt.units import MICROSECOND

MAX_EVENTS = 200_000
# Names of Chrome's own palette.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "send_forward": "rail_response",
    "send_backward": "rail_animation",
    "gradient_sync": "thread_state_sleeping",
    "optimizer": "rail_idle",
}
_LETTERS = {"forward": "F", "backward": "B", "send_forward": "→", "send_backward": "←"}
_LANES = (("", ""), ("send_forward", " sends →"), ("send_backward", " sends ←"))


def timeline_events(problem: Problem, plan: Plan, cost: Cost) -> dict[str, Any]:
    """The trace: a process a pipeline, a thread a stage (and one for what it sends either way), µs.

    Beyond 200,000 events one pipeline stands for those alike; pipelines that are still too many are left out,
    and a pipeline that alone is too long has one event a stage. `otherData` says so.
    """
    shown = [(index, 1) for index in range(len(plan.pipelines))]
    if sum(_num_events(plan, index) for index, _ in shown) > MAX_EVENTS:
        shown = [
            (max(group, key=lambda index: cost.pipelines[index].end_s), len(group))
            for group in alike_pipelines(problem, plan)
        ]
    shown.sort(key=lambda item: -cost.pipelines[item[0]].end_s)
    events: list[dict[str, Any]] = []
    room, num_alike = MAX_EVENTS, 0
    for index, alike in shown:
        whole = _num_events(plan, index) <= MAX_EVENTS // 2
        need = _num_events(plan, index) if whole else _num_fixed(plan, index)
        if events and need > room:
            break
        room -= need
        num_alike += alike
        events += _pipeline_events(problem, plan, cost, index, alike, whole)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "hexiopt",
            "kind": "predicted",
            "problem_sha256": problem.sha256,
            "step_time_s": cost.step_time_s,
            "num_pipelines": len(plan.pipelines),
            "num_pipelines_shown": sum(1 for event in events if event["name"] == "process_name"),
            "num_pipelines_alike": num_alike,
            "num_pipelines_left_out": len(plan.pipelines) - num_alike,
        },
    }


def _num_fixed(plan: Plan, index: int) -> int:
    """Events that do not depend on the number of micro-batches."""
    return 2 + 9 * len(plan.pipelines[index].stages)


def _num_events(plan: Plan, index: int) -> int:
    pipeline = plan.pipelines[index]
    num_messages = 2 * pipeline.num_micro_batches * (len(pipeline.stages) - 1)
    return _num_fixed(plan, index) + num_operations(pipeline) + num_messages


def _pipeline_events(
    problem: Problem, plan: Plan, cost: Cost, index: int, alike: int, whole: bool
) -> Iterator[dict[str, Any]]:
    pipeline, priced = plan.pipelines[index], cost.pipelines[index]
    count = len(pipeline.stages)
    others = f", stands for {alike} alike" if alike > 1 else ""
    batch = f"{pipeline.num_micro_batches} × {pipeline.micro_batch_size}"
    yield _meta("process_name", index, 0, name=f"pipeline {index} ({batch}{others})")
    yield _meta("process_sort_index", index, 0, sort_index=index)
    for k, stage in enumerate(pipeline.stages):
        where = place(problem.cluster, stage.all_devices())
        for lane, (kind, words) in enumerate(_LANES):
            if (kind == "send_forward" and k == count - 1) or (kind == "send_backward" and k == 0):
                continue
            tid = 3 * k + lane
            name = f"stage {k}{words}" if kind else f"stage {k}: {where}"
            yield _meta("thread_name", index, tid, name=name)
            yield _meta("thread_sort_index", index, tid, sort_index=tid)
    if whole:
        for event in simulate_pipeline(index, pipeline, priced, plan.schedule):
            lane = {"send_forward": 1, "send_backward": 2}.get(event.kind, 0)
            yield _slice(
                f"{_LETTERS[event.kind]}{event.micro_batch}",
                event.kind,
                index,
                3 * event.stage + lane,
                event.start_s,
                event.end_s,
                micro_batch=event.micro_batch,
            )
    else:
        for k, end_s in enumerate(priced.stage_end_s):
            yield _slice(
                f"{pipeline.num_micro_batches} micro-batches",
                "forward",
                index,
                3 * k,
                0.0,
                end_s,
                num_micro_batches=pipeline.num_micro_batches,
            )
    synced_s = cost.pipeline_s + cost.gradient_sync_s
    for k, end_s in enumerate(priced.stage_end_s):
        if has_gradient_sync(plan) and end_s < synced_s:
            yield _slice("gradient sync", "gradient_sync", index, 3 * k, end_s, synced_s)
        yield _slice("optimizer", "optimizer", index, 3 * k, synced_s, cost.step_time_s)


def has_gradient_sync(plan: Plan) -> bool:
    """Whether any gradient has more than one holder."""
    return len(plan.pipelines) > 1 or any(
        len(stage.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages
    )


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(name: str, kind: str, pid: int, tid: int, start_s: float, end_s: float, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": pid,
        "tid": tid,
        "ts": start_s / MICROSECOND,
        "dur": (end_s - start_s) / MICROSECOND,
        "cname": _COLOURS[kind],
        "args": args,
    }

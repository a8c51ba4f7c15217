"""A plan's predicted step as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.files.problem_file import problem_sha256
from hexiopt.plan.holders import parameter_holders
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.rows import identical_pipelines, num_operations
from hexiopt.report.style import place
from hexiopt.simulation.engine import simulate_pipeline
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


def timeline_events(problem: Problem, plan: Plan, cost: Cost) -> dict[str, Any]:
    """The trace in µs: one process per pipeline, one thread per replica of a stage and per link on which it sends.

    Beyond 200,000 events, one pipeline represents all equal ones; if that does not suffice, pipelines are left out, and
    a pipeline that is too long by itself has one event per replica. `otherData` states what was done.
    """
    quoted = [(index, 1) for index in range(len(plan.pipelines))]
    if sum(_num_events(plan, cost, index) for index, _ in quoted) > MAX_EVENTS:
        quoted = [
            (max(group, key=lambda index: cost.pipelines[index].end_s), len(group))
            for group in identical_pipelines(problem, plan)
        ]
    quoted.sort(key=lambda item: -cost.pipelines[item[0]].end_s)
    events: list[dict[str, Any]] = []
    room, num_alike, synced_s = MAX_EVENTS, 0, _synced_s(problem, plan, cost)
    for index, alike in quoted:
        whole = _num_events(plan, cost, index) <= MAX_EVENTS // 2
        need = _num_events(plan, cost, index) if whole else _num_fixed(plan, cost, index)
        if events and need > room:
            break
        room -= need
        num_alike += alike
        events += _pipeline_events(problem, plan, cost, index, alike, whole, synced_s)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "hexiopt",
            "kind": "predicted",
            "problem_sha256": problem_sha256(problem),
            "step_time_s": cost.step_time_s,
            "num_pipelines": len(plan.pipelines),
            "num_pipelines_shown": sum(1 for event in events if event["name"] == "process_name"),
            "num_pipelines_alike": num_alike,
            "num_pipelines_left_out": len(plan.pipelines) - num_alike,
        },
    }


def _num_fixed(plan: Plan, cost: Cost, index: int) -> int:
    """The number of events that do not depend on the number of micro-batches."""
    replicas = sum(len(stage.parallelism.executors) for stage in plan.pipelines[index].stages)
    return 2 + 5 * replicas + 2 * len(cost.pipelines[index].messages)


def _num_events(plan: Plan, cost: Cost, index: int) -> int:
    pipeline = plan.pipelines[index]
    num_messages = pipeline.num_micro_batches * pipeline.num_chunks * len(cost.pipelines[index].messages)
    return _num_fixed(plan, cost, index) + num_operations(pipeline) + num_messages


_Lane = tuple[int, int, str, int]  # stage, replica, and for messages also kind and receiving replica


def _lanes(pipeline: Pipeline, priced: PipelineCost) -> dict[_Lane, str]:
    """The threads of a pipeline in order, with their names without devices."""
    names = {
        (s, r): f"stage {s}" + (f".{r}" if len(stage.parallelism.executors) > 1 else "")
        for s, stage in enumerate(pipeline.stages)
        for r in range(len(stage.parallelism.executors))
    }
    lanes = {(*at, "", 0): name for at, name in names.items()}
    kinds, arrows = ("send_forward", "send_backward"), ("→", "←")
    receivers = Counter((link.backward, link.stage, link.sender) for link in priced.messages)
    for link in priced.messages:
        to = f" {link.receiver}" if receivers[link.backward, link.stage, link.sender] > 1 else ""
        name = f"{names[link.stage, link.sender]} sends {arrows[link.backward]}{to}"
        lanes[link.stage, link.sender, kinds[link.backward], link.receiver] = name
    order = ("", *kinds)
    return dict(sorted(lanes.items(), key=lambda lane: (*lane[0][:2], order.index(lane[0][2]), lane[0][3])))


def _pipeline_events(
    problem: Problem, plan: Plan, cost: Cost, index: int, alike: int, whole: bool, synced_s: float
) -> Iterator[dict[str, Any]]:
    pipeline, priced = plan.pipelines[index], cost.pipelines[index]
    others = f", represents {alike} equal ones" if alike > 1 else ""
    batch = f"{pipeline.num_micro_batches} × {pipeline.micro_batch_size}"
    yield meta_event("process_name", index, 0, name=f"pipeline {index} ({batch}{others})")
    yield meta_event("process_sort_index", index, 0, sort_index=index)
    threads = {}
    for tid, (lane, name) in enumerate(_lanes(pipeline, priced).items()):
        threads[lane] = tid
        if not lane[2]:
            name += f": {place(problem.cluster, pipeline.stages[lane[0]].parallelism.executors[lane[1]])}"
        yield meta_event("thread_name", index, tid, name=name)
        yield meta_event("thread_sort_index", index, tid, sort_index=tid)
    replicas = [tid for lane, tid in threads.items() if not lane[2]]
    if whole:
        for event in simulate_pipeline(index, pipeline, priced, plan.schedule):
            sends = event.kind.startswith("send")
            yield operation_event(
                event.kind,
                index,
                threads[event.stage, event.replica, event.kind if sends else "", event.receiver],
                event.micro_batch,
                event.chunk if pipeline.num_chunks > 1 else None,
                event.start_s,
                event.end_s,
            )
    else:
        for tid, end_s in zip(replicas, priced.executor_end_s, strict=True):
            yield _slice(
                f"{pipeline.num_micro_batches} micro-batches",
                "forward",
                index,
                tid,
                0.0,
                end_s,
                num_micro_batches=pipeline.num_micro_batches,
            )
    ending = last_phase(problem, plan)
    for tid, end_s in zip(replicas, priced.executor_end_s, strict=True):
        if end_s < synced_s:
            yield _slice("gradient sync", "gradient_sync", index, tid, end_s, synced_s)
        yield _slice(ending, "optimizer", index, tid, cost.pipeline_s + cost.gradient_sync_s, cost.step_time_s)


def _synced_s(problem: Problem, plan: Plan, cost: Cost) -> float:
    """When gradients are summed; 0 where no device waits for that."""
    return cost.pipeline_s + cost.gradient_sync_s if has_gradient_sync(problem, plan) else 0.0


def has_gradient_sync(problem: Problem, plan: Plan) -> bool:
    """Whether any gradient has more than one holder: in several pipelines, in a replicated stage or, with tied
    embeddings, in the first and the last stage."""
    return parameter_holders(plan.pipelines, problem.model).count > 0


def last_phase(problem: Problem, plan: Plan) -> str:
    """What follows the gradient synchronisation: the optimizer, and the all-gather of the weights that it sharded."""
    gathers = plan.sharding.gathers_weights and has_gradient_sync(problem, plan)
    return "optimizer and weight all-gather" if gathers else "optimizer"


def meta_event(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    """An event that names or sorts a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def operation_event(
    kind: str, pid: int, tid: int, micro_batch: int, chunk: int | None, start_s: float, end_s: float
) -> dict[str, Any]:
    """A forward, a backward or a message of a micro-batch, and of one layer range where a stage has several."""
    name = f"{_LETTERS[kind]}{micro_batch}" + ("" if chunk is None else f"·{chunk}")
    more = {} if chunk is None else {"layer_range": chunk}
    return _slice(name, kind, pid, tid, start_s, end_s, micro_batch=micro_batch, **more)


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

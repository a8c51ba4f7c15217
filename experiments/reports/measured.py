"""A measured step compared with the predicted one: in one trace, and stage by stage in a table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from hexiopt.report.facts import PlanFacts
from hexiopt.report.style import gib, milliseconds
from hexiopt.report.trace import meta_event, operation_event, timeline_events

_NOTE = "Predicted for {}, measured on these devices. F+B: per micro-batch. Busy: of the pipelines' time."


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """One operation of a rank with its start and end, in seconds of a clock shared by all ranks."""

    kind: str  # of operation: forward, backward or weights
    chunk: int
    micro_batch: int
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's operations of one step, and the rank's place in the plan."""

    pipeline: int
    stage: int
    replica: int
    device: str
    operations: tuple[MeasuredOperation, ...]
    peak_bytes: int | None = None
    """Peak bytes allocated by torch, where the rank is a GPU."""

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> "MeasuredRank":
        """The rank that an event at the end of a run describes."""
        operations = tuple(MeasuredOperation(*operation) for operation in event["operations"])
        at = (event["pipeline"], event["stage"], event["replica"], event["device"])
        return cls(*at, operations, event["peak_bytes"])

    @property
    def busy_s(self) -> float:
        """Seconds of computing."""
        return sum(operation.ended_s - operation.began_s for operation in self.operations)


def both_timelines(facts: PlanFacts, ranks: Sequence[MeasuredRank]) -> dict[str, Any]:
    """The predicted trace and below it the measured one, with a process per pipeline too, but a thread per rank."""
    predicted, pipelines = timeline_events(facts), facts.plan.pipelines
    began_s = _span_s(ranks)[0]
    events: list[dict[str, Any]] = []
    for p in sorted({rank.pipeline for rank in ranks}):
        pid = len(pipelines) + p
        events.append(meta_event("process_name", pid, 0, name=f"measured: pipeline {p}"))
        events.append(meta_event("process_sort_index", pid, 0, sort_index=pid))
        of_pipeline = sorted((r for r in ranks if r.pipeline == p), key=lambda r: (r.stage, r.replica, r.device))
        for tid, rank in enumerate(of_pipeline):
            name = f"stage {rank.stage}" + (f".{rank.replica}" if rank.replica else "")
            events.append(meta_event("thread_name", pid, tid, name=f"{name}: {rank.device}"))
            events.append(meta_event("thread_sort_index", pid, tid, sort_index=tid))
            chunked = pipelines[p].num_chunks > 1
            for operation in rank.operations:
                chunk = operation.chunk if chunked else None
                times = operation.began_s - began_s, operation.ended_s - began_s
                events.append(operation_event(operation.kind, pid, tid, operation.micro_batch, chunk, *times))
    return {
        **predicted,
        "traceEvents": [*predicted["traceEvents"], *events],
        "otherData": {**predicted["otherData"], "kind": "predicted and measured"},
    }


def _span_s(ranks: Sequence[MeasuredRank]) -> tuple[float, float]:
    """The start of the first operation of all ranks and the end of the last one."""
    return (
        min(operation.began_s for rank in ranks for operation in rank.operations),
        max(operation.ended_s for rank in ranks for operation in rank.operations),
    )


def measured_table(facts: PlanFacts, ranks: Sequence[MeasuredRank], whose: str = "the plan's GPUs") -> RenderableType:
    """Forward plus backward time of a micro-batch and busy share of each stage, or of each of its replicas, predicted
    (`whose`: for what) and measured on these devices. A TP group is represented by its slowest rank.

    Where ranks are GPUs, the peak memory of their tensors is shown too; the prediction excludes the reserve.
    """
    began_s, ended_s = _span_s(ranks)
    table = Table(box=None, pad_edge=False, caption=_NOTE.format(whose))
    table.add_column("Stage")
    table.add_column("Devices")
    for name in ("F+B ms predicted", "measured", "Busy % predicted", "measured"):
        table.add_column(name, justify="right")
    on_gpus = any(rank.peak_bytes is not None for rank in ranks)
    for name in ("GiB predicted", "measured") if on_gpus else ():
        table.add_column(name, justify="right")
    plan, cluster, cost = facts.plan, facts.problem.cluster, facts.cost
    numbers = {cluster.device_name(device): number for number, device in enumerate(plan.devices())}
    executors = [
        (p, s, None if len(stage_cost.executors) == 1 else r, executor)  # all replicas that share experts are one
        for p, priced in enumerate(cost.pipelines)
        for s, stage_cost in enumerate(priced.stages)
        for r, executor in enumerate(stage_cost.executors)
    ]
    for p, s, r, executor in executors:
        name = f"{p}·{s}" + ("" if r is None else f".{r}")
        of_stage = [rank for rank in ranks if (rank.pipeline, rank.stage) == (p, s) and r in (None, rank.replica)]
        if of_stage:
            pipeline = plan.pipelines[p]
            predicted_s = executor.forward_s + executor.backward_s
            measured_s = max(rank.busy_s for rank in of_stage) / pipeline.num_micro_batches
            whole = pipeline.num_micro_batches / cost.pipeline_s
            tensors = executor.memory.tensors
            peak = max(rank.peak_bytes or 0 for rank in of_stage)
            table.add_row(
                name,
                ", ".join(sorted((rank.device for rank in of_stage), key=numbers.__getitem__)),
                milliseconds(predicted_s),
                milliseconds(measured_s),
                f"{100 * predicted_s * whole:.0f}",
                f"{100 * statistics.fmean(rank.busy_s for rank in of_stage) / (ended_s - began_s):.0f}",
                *((gib(tensors), gib(peak)) if on_gpus else ()),
            )
    return table

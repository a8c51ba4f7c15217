"""The predicted step of a pipeline as spans of time, and the axis on which pictures of it lie.

The picture, the page and the Chrome trace draw the same spans.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hexiopt.report.facts import PlanFacts
from hexiopt.report.rows import PlanRows
from hexiopt.simulation.engine import Span

MOST_OPERATIONS = 100_000  # of a pipeline, that pictures draw one by one
_WHOLE_MICRO_BATCHES = 48  # steps up to this length are drawn without a cut
_SHOWN_MICRO_BATCHES = 14  # length drawn on either side of the cut


def num_operations(facts: PlanFacts, number: int) -> int:
    """The number of operations of one step of the pipeline `number`, counted per executor and layer range; where
    backwards are split, at most: gradients of weights are of a layer."""
    pipeline, splits = facts.plan.pipelines[number], facts.plan.schedule.splits
    stages = [(len(stage.parallelism.executors), splits * stage.num_layers) for stage in pipeline.stages]
    return pipeline.num_micro_batches * sum(count * (2 * pipeline.num_chunks + late) for count, late in stages)


def pipeline_spans(facts: PlanFacts, number: int, one_by_one: bool = True) -> Iterator[Span]:
    """The spans of the pipeline `number` in the order in which they end, then those that end the step: gradient_sync
    (with the wait for it) and optimizer.

    Unless operations are wanted `one_by_one`, each executor has one span, micro_batches, for all of its own.
    """
    ends = [
        ((number, k, e), end_s)
        for k, ends in enumerate(facts.cost.pipelines[number].replica_end_s)
        for e, end_s in enumerate(ends)
    ]
    if one_by_one:
        yield from facts.spans(number)
    else:
        yield from (Span("micro_batches", *place, 0.0, end_s) for place, end_s in ends)
    synced_s = facts.cost.pipeline_s + facts.cost.gradient_sync_s
    for place, end_s in ends:
        if facts.has_gradient_sync and end_s < synced_s:
            yield Span("gradient_sync", *place, end_s, synced_s)
        yield Span("optimizer", *place, synced_s, facts.cost.step_time_s)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps time to positions on paper: all of [0, end], or [0, cut] and [resume, end] with a gap between them."""

    cut: float
    resume: float
    end: float

    @classmethod
    def of(cls, facts: PlanFacts, rows: PlanRows) -> "TimeAxis":
        """The whole of a short step; the beginning and the end of a long one."""
        step_s = facts.cost.step_time_s
        whole = cls(step_s, step_s, step_s)
        if max(row.num_micro_batches for row in rows.pipelines) <= _WHOLE_MICRO_BATCHES:
            return whole
        window_s = 0.0
        for row in rows.pipelines:
            fill_s = sum(stage.compute_s / 3 + (stage.send_s or 0.0) for stage in row.stages)
            window_s = max(window_s, fill_s + _SHOWN_MICRO_BATCHES * max(stage.compute_s for stage in row.stages))
        tail_s = step_s - facts.cost.pipeline_s + window_s
        return whole if window_s + tail_s > 0.8 * step_s else cls(window_s, step_s - tail_s, step_s)

    @property
    def gap(self) -> float:
        """The width of the gap that stands for the omitted time."""
        return 0.018 * (self.cut + self.end - self.resume) if self.resume > self.cut else 0.0

    @property
    def width(self) -> float:
        """The length of the axis, in seconds on paper."""
        return self.cut + self.gap + self.end - self.resume

    def visible(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """(left, width) on paper of the visible parts of an interval."""
        second = self.cut + self.gap - self.resume
        halves = ((0.0, self.cut, 0.0), (self.resume, self.end, second))
        clipped = [(max(start_s, low), min(end_s, high), shift) for low, high, shift in halves]
        return [(left + shift, right - left) for left, right, shift in clipped if right > left]

    def at(self, time_s: float) -> float | None:
        """The position of a moment on paper; None if it is omitted."""
        if time_s <= self.cut:
            return time_s
        return time_s - self.resume + self.cut + self.gap if time_s >= self.resume else None

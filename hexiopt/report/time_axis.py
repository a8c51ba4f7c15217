"""The time axis of a step; that of a long step is cut."""

from dataclasses import dataclass

from hexiopt.cost.cost import Cost
from hexiopt.report.rows import PlanRows

_WHOLE_MICRO_BATCHES = 48  # steps up to this length are drawn without a cut
_SHOWN_MICRO_BATCHES = 14  # length drawn on either side of the cut


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps time to positions on paper: all of [0, end], or [0, cut] and [resume, end] with a gap between them."""

    cut: float
    resume: float
    end: float

    @property
    def gap(self) -> float:
        """The width of the gap that stands for the omitted time."""
        return 0.018 * (self.cut + self.end - self.resume) if self.resume > self.cut else 0.0

    @property
    def width(self) -> float:
        """The length of the axis, in seconds on paper."""
        return self.cut + self.gap + self.end - self.resume

    def spans(self, start: float, end: float) -> list[tuple[float, float]]:
        """(left, width) on paper of the visible parts of an interval."""
        found = []
        second = self.cut + self.gap - self.resume
        for low, high, shift in ((0.0, self.cut, 0.0), (self.resume, self.end, second)):
            left, right = max(start, low), min(end, high)
            if right > left:
                found.append((left + shift, right - left))
        return found

    def at(self, time: float) -> float | None:
        """The position of a moment on paper; None if it is omitted."""
        if time <= self.cut:
            return time
        return time - self.resume + self.cut + self.gap if time >= self.resume else None


def time_axis(rows: PlanRows, cost: Cost) -> TimeAxis:
    """The whole of a short step; the beginning and the end of a long one."""
    whole = TimeAxis(cost.step_time_s, cost.step_time_s, cost.step_time_s)
    if max(row.num_micro_batches for row in rows.pipelines) <= _WHOLE_MICRO_BATCHES:
        return whole
    window_s = 0.0
    for row in rows.pipelines:
        fill_s = sum(stage.compute_s / 3 + (stage.send_s or 0.0) for stage in row.stages)
        window_s = max(window_s, fill_s + _SHOWN_MICRO_BATCHES * max(stage.compute_s for stage in row.stages))
    tail_s = cost.step_time_s - cost.pipeline_s + window_s
    if window_s + tail_s > 0.8 * cost.step_time_s:
        return whole
    return TimeAxis(window_s, cost.step_time_s - tail_s, cost.step_time_s)

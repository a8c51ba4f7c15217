"""What a plan costs: the answer of a cost model, with enough inside to explain it."""

from dataclasses import dataclass

from hexiopt.cost.memory import Memory


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, per micro-batch. Seconds; bytes on its fullest device."""

    forward_s: float
    backward_s: float  # recompute included
    memory: Memory
    limit_bytes: float
    num_params: float  # on the fullest device

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit; negative where there is room."""
        return self.memory.total - self.limit_bytes


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One pipeline. `send_*_s[i]` is between stages i and i+1; the last two are seconds from the step's start."""

    stages: tuple[StageCost, ...]
    send_forward_s: tuple[float, ...]
    send_backward_s: tuple[float, ...]
    stage_end_s: tuple[float, ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of a plan: one step's time, its parts, and whether memory suffices.

    `step_time_s` = `pipeline_s` (the longest pipeline) + `gradient_sync_s` (what is not overlapped) +
    `optimizer_s` (with the all-gather of sharded weights). `excess_bytes` is the largest of any device.
    """

    step_time_s: float
    pipeline_s: float
    gradient_sync_s: float
    optimizer_s: float
    tokens_per_s: float
    mfu: float
    excess_bytes: float
    pipelines: tuple[PipelineCost, ...]

    @property
    def fits(self) -> bool:
        """Whether every device's memory suffices."""
        return self.excess_bytes <= 0.0

    @property
    def objective(self) -> float:
        """The step time, infinite where memory does not suffice."""
        return self.step_time_s if self.fits else float("inf")

    def binding_stage(self) -> tuple[int, int]:
        """(pipeline, stage) with the least room."""
        return max(
            ((p, s) for p, pipeline in enumerate(self.pipelines) for s in range(len(pipeline.stages))),
            key=lambda at: self.pipelines[at[0]].stages[at[1]].excess_bytes,
        )

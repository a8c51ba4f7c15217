"""What a plan costs: the answer of a cost model, with enough inside to explain it."""

from collections.abc import Iterator
from dataclasses import dataclass

from hexiopt.cost.executors.executor import ChunkTimes, ExecutorCost, MemoryUse, ParameterCopy, fullest_of
from hexiopt.cost.executors.memory import Memory
from hexiopt.plan.check import Violation, check
from hexiopt.plan.messages import Message, longest_s
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.units import GIB


@dataclass(frozen=True, slots=True)
class StageCost(MemoryUse):
    """One stage for one micro-batch: its executors, which are its replicas, or a single TP group or sequence layout.

    As a whole the stage takes the seconds of its slowest executor and the bytes of its fullest device.
    """

    executors: tuple[ExecutorCost, ...]

    @classmethod
    def of(
        cls, forward_s: float, backward_s: float, memory: Memory, limit_bytes: float, num_params: float
    ) -> "StageCost":
        """A stage of one executor with one layer range and one copy of the parameters, for one micro-batch."""
        return cls((ExecutorCost(((forward_s, backward_s),), (ParameterCopy(memory, limit_bytes, num_params),)),))

    @property
    def copies(self) -> tuple[ParameterCopy, ...]:
        """All copies of the stage's parameters, in the order in which its parallelism lists them."""
        return tuple([copy for executor in self.executors for copy in executor.copies])

    @property
    def fullest(self) -> ParameterCopy:
        """As of `MemoryUse`."""
        return fullest_of(self.copies)

    @property
    def slowest(self) -> ExecutorCost:
        """The executor whose forward and backward take longest."""
        executors = self.executors
        return executors[0] if len(executors) == 1 else max(executors, key=lambda e: e.forward_s + e.backward_s)

    @property
    def forward_s(self) -> float:
        """Forward seconds of the slowest executor."""
        return self.slowest.forward_s

    @property
    def backward_s(self) -> float:
        """Backward seconds of the slowest executor, recompute included."""
        return self.slowest.backward_s

    @property
    def chunk_s(self) -> tuple[ChunkTimes, ...]:
        """Seconds of each layer range of the slowest executor, by kind of operation [ranges][kinds]."""
        return self.slowest.chunk_s


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One pipeline: what its executors and messages take, and when its executors end.

    `message_s` [messages] is the mean of each message from its start to its end; `executor_end_s` [executors, stage by
    stage] and `end_s` are seconds from the step's start.
    """

    stages: tuple[StageCost, ...]
    messages: tuple[Message, ...]
    message_s: tuple[float, ...]
    executor_end_s: tuple[float, ...]
    end_s: float

    @property
    def replica_end_s(self) -> tuple[tuple[float, ...], ...]:
        """When each executor of each stage ends [stages][executors], in seconds from the step's start."""
        ends = iter(self.executor_end_s)
        return tuple([tuple([next(ends) for _ in stage.executors]) for stage in self.stages])

    @property
    def send_forward_s(self) -> tuple[float, ...]:
        """Seconds of the longest message from each stage to the next [stages - 1]."""
        return longest_s(self.messages, self.message_s, len(self.stages))[0]

    @property
    def send_backward_s(self) -> tuple[float, ...]:
        """Seconds of the longest message to each stage from the next [stages - 1]."""
        return longest_s(self.messages, self.message_s, len(self.stages))[1]


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of a plan: one step's time, its parts, and whether memory suffices.

    `step_time_s` = `pipeline_s` (the longest pipeline) + `gradient_sync_s` (what is not overlapped) +
    `optimizer_s` (with what the all-gather of sharded weights delays the next step). `excess_bytes` is the largest of
    any device; `mfu` is between 0 and 1.
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

    @property
    def tensor_bytes(self) -> float:
        """The most bytes of tensors on any device: its memory without communicators and reserve."""
        copies = [copy.memory for line in self.pipelines for stage in line.stages for copy in stage.copies]
        return max(memory.tensors for memory in copies)

    def binding_stage(self) -> tuple[int, int]:
        """(pipeline, stage) whose fullest device has the least memory left."""
        return max(
            ((p, s) for p, pipeline in enumerate(self.pipelines) for s in range(len(pipeline.stages))),
            key=lambda at: self.pipelines[at[0]].stages[at[1]].excess_bytes,
        )


def copy_costs(plan: Plan, cost: Cost) -> Iterator[tuple[int, int, tuple[int, ...], ParameterCopy]]:
    """(pipeline, stage, devices, their cost) of every copy of a stage's parameters, in the order of the plan."""
    for p, (pipeline, priced) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True)):
        for s, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            for devices, copy in zip(stage.parallelism.parameter_copies, stage_cost.copies, strict=True):
                yield p, s, devices, copy


def micro_batch_s(plan: Plan, cost: Cost) -> dict[int, float]:
    """By device of `plan`, seconds of its stage for one micro-batch: forward and backward of all layer ranges."""
    device_s: dict[int, float] = {}
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        for stage, stage_cost in zip(pipeline.stages, priced.stages, strict=True):
            for devices, executor in zip(stage.parallelism.executors, stage_cost.executors, strict=True):
                device_s.update(dict.fromkeys(devices, sum(map(sum, executor.chunk_s))))
    return device_s


def violations(problem: Problem, plan: Plan, cost: Cost) -> list[Violation]:
    """The rules that `plan`, priced as `cost`, breaks, memory included; empty for a valid plan that fits."""
    return check(problem, plan) or memory_violations(problem, plan, cost)


def memory_violations(problem: Problem, plan: Plan, cost: Cost) -> list[Violation]:
    """The devices whose memory a valid plan, priced as `cost`, exceeds."""
    headroom = problem.space.memory_headroom
    remark = f" beside constraints.memory_headroom={headroom:g}" if headroom else ""
    return [
        Violation(
            "memory",
            f"device {problem.cluster.device_name(devices[0])} (stage {s} of pipeline {p}) needs "
            f"{copy.memory.total / GIB:.2f} GiB of {copy.limit_bytes / GIB:.2f} GiB: "
            f"{copy.excess_bytes / GIB:.2f} GiB too much{remark}",
        )
        for p, s, devices, copy in copy_costs(plan, cost)
        if copy.excess_bytes > 0
    ]

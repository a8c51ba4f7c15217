"""What a plan costs: the answer of a cost model, with enough inside to explain it."""

from dataclasses import dataclass, replace

from hexiopt.cost.executors.memory import Memory
from hexiopt.plan.check import Violation, check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.units import GIB


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, or one replica or device of it, per micro-batch. Seconds; bytes on its fullest device.

    Of a replicated stage: the times of its slowest replica, the memory of its fullest. `chunk_s` has forward and
    backward of each layer range, where there are several.
    """

    forward_s: float
    backward_s: float  # recompute included
    memory: Memory
    limit_bytes: float
    num_params: float  # on the fullest device
    chunk_s: tuple[tuple[float, float], ...] = ()
    replicas: tuple["StageCost", ...] = ()  # where there are several
    devices: tuple["StageCost", ...] = ()  # of a sequence layout

    @classmethod
    def of_replicas(cls, replicas: tuple["StageCost", ...]) -> "StageCost":
        """The stage that `replicas` make up."""
        slowest = max(replicas, key=lambda one: one.forward_s + one.backward_s)
        fullest = max(replicas, key=lambda one: one.excess_bytes)
        return cls(
            slowest.forward_s,
            slowest.backward_s,
            fullest.memory,
            fullest.limit_bytes,
            fullest.num_params,
            slowest.chunk_s,
            replicas,
        )

    @classmethod
    def of_devices(cls, devices: tuple["StageCost", ...]) -> "StageCost":
        """The stage with a sequence layout that `devices`, which work together, make up."""
        fullest = max(devices, key=lambda one: one.excess_bytes)
        return replace(fullest, devices=devices)

    def with_times(self, forward_s: float, backward_s: float) -> "StageCost":
        """The same in other seconds; not for several replicas, which differ."""
        devices = tuple(replace(one, forward_s=forward_s, backward_s=backward_s) for one in self.devices)
        return replace(self, forward_s=forward_s, backward_s=backward_s, devices=devices)

    @property
    def copies(self) -> tuple["StageCost", ...]:
        """The cost of whatever holds a copy of the stage's parameters: see `Stage.copies`."""
        return self.devices or self.each

    @property
    def each(self) -> tuple["StageCost", ...]:
        """The cost of every replica: of an unreplicated stage, itself."""
        return self.replicas or (self,)

    @property
    def each_chunk_s(self) -> tuple[tuple[float, float], ...]:
        """Forward and backward seconds of every layer range."""
        return self.chunk_s or ((self.forward_s, self.backward_s),)

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit; negative where there is room."""
        return self.memory.total - self.limit_bytes


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds of a message from a replica of `stage` to one of the next (of the stage before, if `backward`)."""

    backward: bool
    stage: int
    sender: int
    receiver: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One pipeline. `send_*_s[i]` is the longest message between stages i and i+1.

    `stage_end_s` and `end_s` are seconds from the step's start. Where stages have replicas or several layer
    ranges, `links` has every pair of replicas that exchange messages, and `replica_end_s[s]` each replica's end.
    """

    stages: tuple[StageCost, ...]
    send_forward_s: tuple[float, ...]
    send_backward_s: tuple[float, ...]
    stage_end_s: tuple[float, ...]
    end_s: float
    links: tuple[LinkCost, ...] = ()
    replica_end_s: tuple[tuple[float, ...], ...] = ()

    @property
    def each_link(self) -> tuple[LinkCost, ...]:
        """All links; in a chain, two between neighbouring stages."""
        if self.links:
            return self.links
        ahead = (LinkCost(False, s, 0, 0, seconds) for s, seconds in enumerate(self.send_forward_s))
        back = (LinkCost(True, s, 0, 0, seconds) for s, seconds in enumerate(self.send_backward_s, start=1))
        return (*ahead, *back)

    @property
    def each_replica_end_s(self) -> tuple[tuple[float, ...], ...]:
        """When each replica of each stage ends."""
        return self.replica_end_s or tuple((end,) for end in self.stage_end_s)

    @property
    def executor_end_s(self) -> tuple[float, ...]:
        """When each replica ends, stage by stage in one row."""
        return tuple(end for ends in self.replica_end_s for end in ends) or self.stage_end_s


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


def violations(problem: Problem, plan: Plan, cost: Cost) -> list[Violation]:
    """The rules that `plan` of `cost` breaks, memory included. Empty for a valid plan that fits."""
    found = check(problem, plan)
    if found:
        return found
    for p, (pipeline, priced) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True)):
        for s, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            for devices, one in zip(stage.copies, stage_cost.copies, strict=True):
                if one.excess_bytes > 0:
                    name = problem.cluster.device_name(devices[0])
                    found.append(
                        Violation(
                            "memory",
                            f"device {name} (stage {s} of pipeline {p}) needs {one.memory.total / GIB:.2f} GiB of "
                            f"{one.limit_bytes / GIB:.2f} GiB: {one.excess_bytes / GIB:.2f} GiB too much",
                        )
                    )
    return found

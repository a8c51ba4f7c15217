"""Chains: one pipeline of stages, each of them replicas of equal samples: what FlagScale and Galvatron express.

Pipelines that are all alike fold into one whose stages have that many times as many replicas.
"""

from dataclasses import dataclass

from hexiopt.exports.formats import Refusal, stage_name
from hexiopt.exports.grid import Ranges
from hexiopt.plan.parallelism import Replica, Replicated, StageParallelism, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.space import Recompute
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A stage: the devices of each replica, all of one TP degree; its layers; a recompute policy for each or all."""

    replicas: tuple[tuple[int, ...], ...]
    layers: Ranges
    recompute: Recompute

    @property
    def tp(self) -> int:
        """TP degree of every replica."""
        return len(self.replicas[0])

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(end - first for first, end in self.layers)


@dataclass(frozen=True, slots=True)
class ReplicaChain:
    """Stages in order; all replicas of a stage together take `micro_batch_size` sequences of each micro-batch."""

    stages: tuple[ChainStage, ...]
    num_micro_batches: int
    micro_batch_size: int

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.num_micro_batches * self.micro_batch_size

    def devices(self) -> tuple[int, ...]:
        """Devices stage by stage, replica by replica."""
        return tuple(d for stage in self.stages for replica in stage.replicas for d in replica)


def chain_of(plan: Plan, refuse: Refusal) -> ReplicaChain:
    """The chain that a plan is. Raises InputError, by `refuse`, where its pipelines or replicas differ."""
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) != len(first.stages):
            said = f"pipeline {p} has {len(pipeline.stages)} stages, pipeline 0 has {len(first.stages)}"
            refuse(said, "space.uneven_structure=false")
        batch = pipeline.num_micro_batches, pipeline.micro_batch_size
        if batch != (first.num_micro_batches, first.micro_batch_size):
            said = f"pipeline {p} has {batch[0]} micro-batches of {batch[1]}, pipeline 0 has {first.num_micro_batches}"
            refuse(f"{said} of {first.micro_batch_size}", "space.uneven_batch=false space.batch_remainder=false")
        for s, stage in enumerate(pipeline.stages):
            _check(p, s, stage, first.stages[s], refuse)
    stages = tuple(
        ChainStage(
            tuple(devices for pipeline in plan.pipelines for devices in pipeline.stages[s].executors),
            own.layers,
            own.recompute,
        )
        for s, own in enumerate(first.stages)
    )
    return ReplicaChain(stages, first.num_micro_batches, first.micro_batch_size * len(plan.pipelines))


def _check(p: int, s: int, stage: Stage, first: Stage, refuse: Refusal) -> None:
    if stage.sequence:
        refuse(f"{stage_name(p, s)} has a sequence layout", "space.sequence=false")
    if len(stage.layers) > 1:
        refuse(f"{stage_name(p, s)} has several layer ranges", "workload.schedule=1f1b")
    if len({(len(replica.devices), replica.samples) for replica in stage.replicas}) > 1:
        refuse(f"{stage_name(p, s)} has replicas of unequal TP degree or samples", "space.replicas=false")
    if stage.layers != first.layers:
        refuse(f"{stage_name(p, s)} has other layers than that of pipeline 0", "space.uneven_structure=false")
    if (stage.tp, len(stage.replicas)) != (first.tp, len(first.replicas)):
        said = f"{stage_name(p, s)} has TP degree {stage.tp} and {len(stage.replicas)} replicas, that of pipeline 0"
        refuse(f"{said} has {first.tp} and {len(first.replicas)}", "space.uneven_structure=false space.replicas=false")
    if stage.policies() != first.policies():
        said = f"{stage_name(p, s)} recomputes other layers than that of pipeline 0"
        refuse(said, "space.recompute_per_stage=false")


def plan_of_chain(chain: ReplicaChain, schedule: Schedule, sharding: int) -> Plan:
    """The plan that a chain is: of as many pipelines as all stages have replicas, or of one with replicas.

    Raises InputError as the classes of a plan do.
    """
    widths = {stage.dp for stage in chain.stages}
    if len(widths) == 1:
        [width] = widths
        pipelines = tuple(
            Pipeline(
                tuple(Stage(TensorParallel(s.replicas[p]), s.layers, s.recompute) for s in chain.stages),
                chain.num_micro_batches,
                chain.micro_batch_size // width,
            )
            for p in range(width)
        )
        return Plan(pipelines, schedule, Sharding(sharding))

    def parallelism(stage: ChainStage) -> StageParallelism:
        if stage.dp == 1:
            return TensorParallel(stage.replicas[0])
        samples = chain.micro_batch_size // stage.dp
        return Replicated(tuple(Replica(devices, samples) for devices in stage.replicas))

    stages = tuple(Stage(parallelism(stage), stage.layers, stage.recompute) for stage in chain.stages)
    return Plan((Pipeline(stages, chain.num_micro_batches, chain.micro_batch_size),), schedule, Sharding(sharding))

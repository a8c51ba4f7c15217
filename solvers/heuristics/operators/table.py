"""The operators on partitions, as data.

To add one, write a function `(near, partition, rng) -> partition or None` into the file of its family, or one on one or
two pipeline groups under `on_one` or `on_two`, draw what it needs from `rng` alone, and list it below with its weight:

    @on_one
    def reverse_stages(near, pipeline_group, rng):  # the pipelines run through their devices backwards
        return (pipeline_group.with_stages(pipeline_group.stages[::-1]),)

    PARTITION_OPERATORS = (..., Operator("reverse_stages", 1, stages.reverse_stages))

It must use every device at most once and keep TP groups inside a machine, which the tests hold for every operator
listed here; the plan space and memory are the completer's concern. What it brings, `hexiopt compare` writes to
`operators.csv`.
"""

import random
from typing import TypeAlias

from hexiopt.problem.problem import Problem
from solvers.core.interleaving import may_interleave
from solvers.core.operators import Lottery, Operator, OperatorStatistics, OperatorTally
from solvers.core.partition import Partition
from solvers.heuristics.operators import exchanges, replicas, settings, stages
from solvers.heuristics.operators.neighbourhood import Neighbourhood

PartitionOperator: TypeAlias = Operator[Neighbourhood, Partition, Partition]
PARTITION_OPERATORS: tuple[PartitionOperator, ...] = (
    Operator("reorder_stages", 2, stages.reorder_stages),
    Operator("halve_tp", 1, stages.halve_tp),
    Operator("double_tp", 1, stages.double_tp),
    Operator("width_to_stages", 1, stages.width_to_stages),
    Operator("stages_to_width", 1, stages.stages_to_width),
    Operator("width_to_tp", 1, stages.width_to_tp),
    Operator("tp_to_width", 1, stages.tp_to_width),
    Operator("split_group", 1, stages.split_group),
    Operator("merge_groups", 1, exchanges.merge_groups),
    Operator("move_stage", 2, exchanges.move_stage),
    Operator("swap_stages", 1, exchanges.swap_stages),
    Operator("swap_tp_groups", 1, exchanges.swap_tp_groups),
    Operator("join_pipelines", 1, exchanges.join_pipelines),
    Operator("cut_pipeline", 1, stages.cut_pipeline),
    Operator("leave_unused", 1, exchanges.leave_unused),
    Operator("use_idle", 1, exchanges.use_idle),
    Operator("resize_micro_batch", 1, settings.resize_micro_batch),
    Operator("change_schedule_or_sharding", 1, settings.change_schedule_or_sharding),
    Operator("change_chunks", 1, settings.change_chunks, needs=may_interleave),
)
REPLICA_OPERATORS: tuple[PartitionOperator, ...] = (
    Operator("pipelines_to_replicas", 1, replicas.pipelines_to_replicas),
    Operator("replicas_to_pipelines", 1, replicas.replicas_to_pipelines),
    Operator("join_as_replica", 2, replicas.join_as_replica),
    Operator("leave_replicas", 1, replicas.leave_replicas),
    Operator("group_to_replicas", 1, replicas.group_to_replicas),
    Operator("replicas_to_group", 1, replicas.replicas_to_group),
)
_REPLICATE = 0.3  # largest share of draws that concern replicas
_DEVICES_REPLICATING = 2.0  # divided by the number of devices: that share, if it is smaller


class PartitionProposals:
    """Proposes candidates near a partition; with `replicates`, some of the draws concern replicas."""

    def __init__(self, problem: Problem, statistics: OperatorStatistics, *, replicates: bool = False) -> None:
        near = Neighbourhood(problem)
        self.plain = Lottery(PARTITION_OPERATORS, near, problem, statistics)
        self.replicas = Lottery(REPLICA_OPERATORS, near, problem, statistics)
        # In small clusters replicas often pay; in large ones pipelines do as well and are cheaper to price.
        share = min(_REPLICATE, _DEVICES_REPLICATING / len(problem.usable_devices))
        self._replicate_share = share if replicates else 0.0

    def draw(self, partition: Partition, rng: random.Random) -> tuple[OperatorTally, Partition] | None:
        """A candidate and the tally of its operator; None where a drawn operator gives none."""
        replicates = self._replicate_share and rng.random() < self._replicate_share
        return (self.replicas if replicates else self.plain).draw(partition, rng)

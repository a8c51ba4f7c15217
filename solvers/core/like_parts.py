"""A cluster that consists of several like parts: what is good for one of them, copied to all, is a start for the whole.

A part is small enough for searches that look at single GPUs and replicas. The step of the whole differs from that of a
part in the gradient sync alone, whose rings are longer.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from hexiopt.problem.problem import Problem
from solvers.core.partition import Partition, PipelineGroup

_FEWEST = 2  # machines of a part: within one, layers never cross the network


@dataclass(frozen=True)
class LikeParts:
    """The problem of one part, with its share of the batch, and the device of each part for each device of that one."""

    problem: Problem
    places: tuple[Mapping[int, int], ...]

    def copied(self, partition: Partition) -> Partition:
        """A partition of one part, copied to all."""
        return partition.with_pipeline_groups(
            copy for group in partition.pipeline_groups for copy in self._copies(group)
        )

    def _copies(self, group: PipelineGroup) -> Iterator[PipelineGroup]:
        """The group with the pipelines of all parts; one a part where it is one pipeline of replicated stages."""
        for places in [[place] for place in self.places] if group.replicated else [self.places]:
            stages = (
                tuple(tuple(place[device] for device in devices) for place in places for devices in stage)
                for stage in group.stages
            )
            yield replace(group, stages=tuple(stages))


def like_parts(problem: Problem) -> LikeParts | None:
    """The most parts into which machines, batch and the pipelines asked for divide; None where there are not two, or
    where the network is not flat."""
    cluster, space, batch = problem.cluster, problem.space, problem.workload.global_batch
    if cluster.links or cluster.groups:
        return None
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for m, usable in problem.usable_by_machine.items():
        indices = tuple(int(index) for index in cluster.index_in_machine[list(usable)])
        kinds[cluster.machines[m].kind, indices].append(m)
    counts = [len(machines) for machines in kinds.values()]
    common = gcd(*counts, batch, space.num_pipelines or 0)
    number = next((n for n in range(min(common, sum(counts) // _FEWEST), 1, -1) if common % n == 0), 1)
    if number == 1:
        return None
    # the machines of each part, alike where they stand at the same place
    parts = [[m for machines in kinds.values() for m in machines[k::number]] for k in range(number)]
    part = _problem_of(problem, parts[0], number)
    begins = part.cluster.first_device.tolist()
    places = (
        {
            here + index: int(cluster.first_device[m]) + index
            for here, m in zip(begins, machines, strict=True)
            for index in range(cluster.machines[m].num_gpus)
        }
        for machines in parts
    )
    return LikeParts(part, tuple(places))


def _problem_of(problem: Problem, machines: Sequence[int], number: int) -> Problem:
    """The problem of these machines alone, with one of `number` parts of the batch."""
    cluster, space, usable = problem.cluster, problem.space, set(problem.usable_devices)
    own = [cluster.machines[m] for m in machines]
    unused = (device for device in range(cluster.num_devices) if device not in usable)
    return problem.replace(
        cluster=cluster.replace(machines=tuple(machine.replace(spec_name=machine.name) for machine in own)),
        workload=problem.workload.replace(global_batch=problem.workload.global_batch // number),
        space=space.replace(
            exclude=tuple(cluster.device_name(d) for d in unused if int(cluster.machine_of[d]) in machines),
            num_pipelines=None if space.num_pipelines is None else space.num_pipelines // number,
            sequence=False,
        ),
    )

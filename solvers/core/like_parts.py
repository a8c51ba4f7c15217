"""A cluster that consists of several like parts: what is good for one of them, copied to all, is a start for the whole.

A part is small enough for searches that look at single GPUs and replicas. The step of the whole differs from that of a
part in the gradient sync alone, whose rings are longer.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
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
    most = min(gcd(*counts, batch, space.num_pipelines or 0), sum(counts) // _FEWEST)
    number = next((n for n in range(most, 1, -1) if not gcd(*counts, batch, space.num_pipelines or 0) % n), 1)
    if number == 1:
        return None
    # the machines of each part, those of the first in the order of the cluster
    parts = [[m for machines in kinds.values() for m in machines[k::number]] for k in range(number)]
    order = sorted(range(len(parts[0])), key=lambda at: parts[0][at])
    machines = [cluster.machines[parts[0][at]] for at in order]
    left = [m.replace(spec_name=m.name) for m in machines]
    unused = set(range(cluster.num_devices)) - set(problem.usable_devices)
    names = [cluster.device_name(device) for device in sorted(unused) if int(cluster.machine_of[device]) in parts[0]]
    part = problem.replace(
        cluster=cluster.replace(machines=tuple(left)),
        workload=problem.workload.replace(global_batch=batch // number),
        space=space.replace(
            exclude=tuple(names),
            num_pipelines=None if space.num_pipelines is None else space.num_pipelines // number,
            sequence=False,
        ),
    )
    first, own = cluster.first_device, part.cluster.first_device
    places = []
    for machines_of in parts:
        pairs = ((int(own[k]), int(first[machines_of[at]]), left[k].num_gpus) for k, at in enumerate(order))
        places.append({here + g: there + g for here, there, number_of in pairs for g in range(number_of)})
    return LikeParts(part, tuple(places))

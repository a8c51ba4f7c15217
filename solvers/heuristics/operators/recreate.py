"""An operator that removes one or two pipeline groups and rebuilds them as chains.

Their machines are distributed and ordered differently, or only their TP groups are chosen again.
"""

import random
from collections.abc import Mapping, Sequence

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.problem import Problem
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.zero import LOCKSTEP
from solvers.heuristics.chains import ChainBuilder, ChainTerms

_SAME_DEVICES = 0.6  # chance that two pipeline groups keep their devices
_SAME_WIDTH = 0.6  # chance that a pipeline group keeps its width
_SAME_ORDER = 0.4  # chance that the machines keep their order
_IDLE = 0.3  # chance that idle devices are included
_RANKS = (0, 0, 0, 1, 2)  # ranks of chains by estimate, as often as they are drawn


class Recreation:
    """Rebuilds pipeline groups of a partition."""

    def __init__(self, problem: Problem, chains: ChainBuilder, *, replicates: bool = False) -> None:
        """`replicates`: whether stages of single pipelines may get replicas."""
        self._problem, self._chains, self._replicates = problem, chains, replicates
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        most = max(map(len, problem.usable_by_machine.values()))
        self._widths = [1 << k for k in range(most.bit_length())]

    def recreate_as_chains(self, partition: Partition, rng: random.Random) -> Partition | None:
        """The partition with one or two pipeline groups rebuilt; None where that fails."""
        pipeline_groups, space = partition.pipeline_groups, self._problem.space
        if partition.sharding >= LOCKSTEP or space.num_stages is not None:
            return None
        chosen = rng.sample(range(len(pipeline_groups)), min(len(pipeline_groups), rng.choice((1, 2, 2))))
        pools = [self._pool(pipeline_groups[k]) for k in chosen]
        if rng.random() < _IDLE:
            self._take_idle(partition, pools[0])
        num_chains = rng.choice((len(chosen), len(chosen), 3 - len(chosen)))  # one may become two, two may become one
        distribution = self._distribute(pools, num_chains, rng)
        rest = [pipeline_group for k, pipeline_group in enumerate(pipeline_groups) if k not in chosen]
        widths = [self._width(pipeline_groups[chosen[min(h, len(chosen) - 1)]], rng) for h in range(len(distribution))]
        pipelines = sum(pipeline_group.width for pipeline_group in rest) + sum(widths)
        size = pipeline_groups[chosen[0]].micro_batch_size
        terms = ChainTerms(
            size,
            max(1, self._problem.workload.global_batch // pipelines // size),
            StateSharding(partition.sharding, pipelines if partition.groups == "all" else 1),
            partition.schedule.plain(),
            None if space.uneven_tp else len(pipeline_groups[0].stages[0][0]),
            self._replicates,
        )
        made = []
        for share, width in zip(distribution, widths, strict=True):
            chain = self._chains.chain(self._ordered(list(share), rng), share, width, terms, rng.choice(_RANKS))
            if chain is None:
                return None
            made.append(chain)
        return partition.with_pipeline_groups((*rest, *made))

    def _width(self, pipeline_group: PipelineGroup, rng: random.Random) -> int:
        return pipeline_group.width if rng.random() < _SAME_WIDTH else rng.choice(self._widths)

    def _pool(self, pipeline_group: PipelineGroup) -> dict[int, list[int]]:
        """The devices of a pipeline group by machine, in the order of its stages."""
        found: dict[int, list[int]] = {}
        for stage_groups in pipeline_group.stages:
            for group in stage_groups:
                found.setdefault(self._machine_of[group[0]], []).extend(group)
        return {machine: sorted(devices) for machine, devices in found.items()}

    def _take_idle(self, partition: Partition, pool: dict[int, list[int]]) -> None:
        used = partition.devices()
        for machine, own in self._problem.usable_by_machine.items():
            idle = [device for device in own if device not in used]
            if idle:
                pool[machine] = sorted(pool.get(machine, []) + idle)

    def _distribute(
        self, pools: Sequence[Mapping[int, list[int]]], num_chains: int, rng: random.Random
    ) -> list[dict[int, list[int]]]:
        """The devices of all pools, distributed over `num_chains` chains."""
        if num_chains == len(pools) and (num_chains == 1 or rng.random() < _SAME_DEVICES):
            return [dict(pool) for pool in pools]
        found: list[dict[int, list[int]]] = [{} for _ in range(num_chains)]
        machines = dict.fromkeys(machine for pool in pools for machine in pool)
        changed = rng.choice(list(machines))
        for machine in machines:
            own = sorted(device for pool in pools for device in pool.get(machine, []))
            if num_chains == 1:
                cut = len(own)
            elif num_chains == len(pools) and machine != changed:
                cut = len(pools[0].get(machine, []))
            else:
                cut = rng.choice((0, len(own) // 2, len(own)))
            for share, part in zip(found, (own[:cut], own[cut:]), strict=False):
                if part:
                    share[machine] = part
        return [share for share in found if share]

    @staticmethod
    def _ordered(machines: list[int], rng: random.Random) -> list[int]:
        """The machines in their order, reversed, shuffled, or with one of them moved."""
        if len(machines) < 2 or rng.random() < _SAME_ORDER:
            return machines
        way = rng.randrange(4)
        if way == 0:
            return machines[::-1]
        if way == 1:
            rng.shuffle(machines)
            return machines
        machines.insert(rng.randrange(len(machines)), machines.pop(rng.randrange(len(machines))))
        return machines

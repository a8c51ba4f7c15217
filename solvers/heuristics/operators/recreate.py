"""An operator that ruins one or two bundles and recreates them as chains.

Their machines are dealt and ordered another way, or just their TP groups chosen again.
"""

import random
from collections.abc import Mapping, Sequence

from hexiopt.cost.executors.memory import Shards
from hexiopt.problem.problem import Problem
from solvers.core.partition import Bundle, Structure
from solvers.core.zero import LOCKSTEP
from solvers.heuristics.chains import ChainMaker, ChainTerms

_SAME_DEAL = 0.6  # chances: that two bundles keep their devices, that a bundle keeps its width and machines their order
_SAME_WIDTH = 0.6
_SAME_ORDER = 0.4
_IDLE = 0.3  # chance that idle devices are taken in
_RANKS = (0, 0, 0, 1, 2)  # of ways through the machines, from the likely best, as often as they are taken


class Recreation:
    """Makes bundles of a partition anew."""

    def __init__(self, problem: Problem, chains: ChainMaker) -> None:
        self._problem, self._chains = problem, chains
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        most = max(map(len, problem.usable_by_machine.values()))
        self._widths = [1 << k for k in range(most.bit_length())]

    def recreate_as_chains(self, structure: Structure, rng: random.Random) -> Structure | None:
        """One or two bundles made anew; None where no plan may follow."""
        bundles, space = structure.bundles, self._problem.space
        if structure.sharding >= LOCKSTEP or space.num_stages is not None:
            return None
        chosen = rng.sample(range(len(bundles)), min(len(bundles), rng.choice((1, 2, 2))))
        pools = [self._pool(bundles[k]) for k in chosen]
        if rng.random() < _IDLE:
            self._take_idle(structure, pools[0])
        hands = rng.choice((len(chosen), len(chosen), 3 - len(chosen)))  # one may become two, and two one
        deal = self._deal(pools, hands, rng)
        rest = [bundle for k, bundle in enumerate(bundles) if k not in chosen]
        widths = [self._width(bundles[chosen[min(h, len(chosen) - 1)]], rng) for h in range(len(deal))]
        pipelines = sum(bundle.width for bundle in rest) + sum(widths)
        size = bundles[chosen[0]].micro_batch_size
        terms = ChainTerms(
            size,
            max(1, self._problem.workload.global_batch // pipelines // size),
            Shards(structure.sharding, pipelines if structure.groups == "all" else 1),
            structure.schedule.saturates_at(1, 1) is None,
            None if space.uneven_tp else len(bundles[0].stages[0][0]),
        )
        made = []
        for hand, width in zip(deal, widths, strict=True):
            chain = self._chains.chain(self._ordered(list(hand), rng), hand, width, terms, rng.choice(_RANKS))
            if chain is None:
                return None
            made.append(chain)
        return structure.with_bundles((*rest, *made))

    def _width(self, bundle: Bundle, rng: random.Random) -> int:
        return bundle.width if rng.random() < _SAME_WIDTH else rng.choice(self._widths)

    def _pool(self, bundle: Bundle) -> dict[int, list[int]]:
        """Its devices by machine, in the order of its stages."""
        found: dict[int, list[int]] = {}
        for slot in bundle.stages:
            for group in slot:
                found.setdefault(self._machine_of[group[0]], []).extend(group)
        return {machine: sorted(devices) for machine, devices in found.items()}

    def _take_idle(self, structure: Structure, pool: dict[int, list[int]]) -> None:
        used = structure.devices()
        for machine, own in self._problem.usable_by_machine.items():
            idle = [device for device in own if device not in used]
            if idle:
                pool[machine] = sorted(pool.get(machine, []) + idle)

    def _deal(
        self, pools: Sequence[Mapping[int, list[int]]], hands: int, rng: random.Random
    ) -> list[dict[int, list[int]]]:
        """The devices of all pools for so many chains."""
        if hands == len(pools) and (hands == 1 or rng.random() < _SAME_DEAL):
            return [dict(pool) for pool in pools]
        found: list[dict[int, list[int]]] = [{} for _ in range(hands)]
        machines = dict.fromkeys(machine for pool in pools for machine in pool)
        changed = rng.choice(list(machines))
        for machine in machines:
            own = sorted(device for pool in pools for device in pool.get(machine, []))
            if hands == 1:
                cut = len(own)
            elif hands == len(pools) and machine != changed:
                cut = len(pools[0].get(machine, []))
            else:
                cut = rng.choice((0, len(own) // 2, len(own)))
            for hand, part in zip(found, (own[:cut], own[cut:]), strict=False):
                if part:
                    hand[machine] = part
        return [hand for hand in found if hand]

    @staticmethod
    def _ordered(machines: list[int], rng: random.Random) -> list[int]:
        """The machines in the order they have, or with one of them elsewhere, or backwards, or in any."""
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

"""The search of Espresso (see `espresso.py`): how many stages each GPU type gets, their order, layers and devices."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from solvers.baselines.aligned import AlignedEstimates, Slots, filled, nearby
from solvers.baselines.areas import Area
from solvers.baselines.estimate import Sites
from solvers.baselines.grid import machine_classes
from solvers.baselines.renting import Worth
from solvers.completion.layers import bottleneck_counts
from solvers.core.partition import Group
from solvers.core.search import Search
from solvers.frame.starts import cut

Floats = NDArray[np.float64]

_MOST_PERMUTED = 4  # types whose orders are all tried
_FEW_STAGES = 5  # stages whose orders are all tried
_ALLOCATIONS = 150  # allocations kept of each choice of degrees, micro-batch and policy
_ARRANGEMENTS = 40  # orders of machines that are drawn
_FEW = 8  # stages between any two of which layers move


@dataclass(frozen=True, slots=True)
class Choice:
    """What is one for all stages."""

    tp: int
    dp: int
    size: int
    policy: str
    count: int  # micro-batches of a pipeline


@dataclass(frozen=True, slots=True)
class Made:
    """A whole plan: the type of each stage, its TP groups and its layers."""

    choice: Choice
    order: tuple[int, ...]
    slots: Slots
    layers: tuple[int, ...]


class Planner:
    """The search in one area. Types are numbers, slowest first."""

    def __init__(self, times: AlignedEstimates, sharding: int, worth: Worth, area: Area) -> None:
        self.times, self.sharding, self.worth = times, sharding, worth
        self.problem = problem = times.problem
        self.machines: list[list[tuple[int, ...]]] = []
        names: dict[str, int] = {}
        for m in (m for members in machine_classes(problem) for m in members if m in area):
            name = problem.cluster.machines[m].gpu.name
            if name not in names:
                names[name] = len(names)
                self.machines.append([])
            self.machines[names[name]].append(problem.usable_by_machine[m])
        if worth.prices is not None:
            for own in self.machines:
                own.sort(key=lambda devices: worth.prices[devices[0]] if worth.prices else 0.0)
        self._near = (False, True) if problem.cluster.groups or problem.cluster.links else (False,)
        self._groups: dict[int, list[list[Group]]] = {}
        self._sites: dict[tuple[int, int], Sites] = {}

    def groups(self, tp: int) -> list[list[Group]]:
        """TP groups of each type."""
        if tp not in self._groups:
            allowed = self.problem.space.allowed_tp
            self._groups[tp] = [
                [group for own in machines if tp in allowed(len(own)) for group in cut(own, tp)]
                for machines in self.machines
            ]
        return self._groups[tp]

    def most_stages(self, choice: Choice) -> list[int]:
        """Stages that each type has TP groups for."""
        return [len(own) // choice.dp for own in self.groups(choice.tp)]

    def sites(self, tp: int, kind: int) -> Sites:
        """The sites of a type's TP groups."""
        if (tp, kind) not in self._sites:
            self._sites[tp, kind] = frozenset(self.times.pricer.site(group) for group in self.groups(tp)[kind])
        return self._sites[tp, kind]

    def layer_s(self, choice: Choice, kind: int) -> float:
        """Seconds of a layer on a type."""
        return self.times.stage_s(self.sites(choice.tp, kind), 1, False, False, choice.size, choice.policy)

    def choices(self, policies: Sequence[str]) -> Iterator[Choice]:
        """All that share the global batch equally."""
        problem, batch = self.problem, self.problem.workload.global_batch
        degrees = {tp for machines in self.machines for own in machines for tp in problem.space.allowed_tp(len(own))}
        for tp in sorted(degrees):
            for dp in range(1, max(map(len, self.groups(tp))) + 1):
                if problem.space.num_pipelines not in (None, dp):
                    continue
                for size in problem.space.micro_batch_sizes(batch):
                    if batch % (dp * size) == 0:
                        for policy in policies:
                            yield Choice(tp, dp, size, policy, batch // (dp * size))

    def allocations(self, search: Search) -> list[tuple[float, Choice, tuple[int, ...]]]:
        """Stages of each type, with a bound on their worth, the least first."""
        found: list[tuple[float, Choice, tuple[int, ...]]] = []
        asked, layers = self.problem.space.num_stages, self.problem.model.num_layers
        for choice in self.choices(search.pricer.policies()):
            if not search.go_on():
                break
            most = self.most_stages(choice)
            counts = np.stack(np.meshgrid(*(np.arange(n + 1) for n in most), indexing="ij"), -1).reshape(-1, len(most))
            stages = counts.sum(axis=1)
            counts = counts[(stages == asked) if asked else (stages > 0) & (stages <= layers)]
            if not len(counts):
                continue
            layer_s = np.array([self.layer_s(choice, k) if n else np.inf for k, n in enumerate(most)])
            slowest_s = layers / (counts / layer_s).sum(axis=1)
            seconds = (choice.count - 1) * slowest_s + layers * layer_s.min()
            bounds = self._worths(choice, counts, seconds)
            for k in np.argsort(bounds, kind="stable")[:_ALLOCATIONS]:
                if bounds[k] < np.inf:
                    found.append((float(bounds[k]), choice, tuple(int(n) for n in counts[k])))
        return sorted(found, key=lambda one: one[0])

    def _worths(self, choice: Choice, counts: NDArray[np.int64], seconds: Floats) -> Floats:
        """Bounds on the worth of allocations [n, types] that take `seconds` [n] or longer."""
        if self.worth.prices is None:
            return seconds
        price = np.zeros(len(counts))
        for k, own in enumerate(self.groups(choice.tp)):
            each = [sum(self.worth.prices[d] for d in group) for group in own]
            price += np.concatenate([[0.0], np.cumsum(each)])[counts[:, k] * choice.dp]
        return np.where(seconds > self.worth.latest_s, np.inf, price * seconds)

    def orders(self, choice: Choice, allocation: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The type of each stage: by the ratio of compute to memory, types together, of a few stages any order."""
        stages = sum(allocation)
        present = [k for k, n in enumerate(allocation) if n]
        blocks = permutations(present) if len(present) <= _MOST_PERMUTED else iter((present, present[::-1]))
        found = [self._by_ratio(choice, allocation)]
        found += [tuple(k for k in order for _ in range(allocation[k])) for order in blocks]
        if stages <= _FEW_STAGES:
            found += permutations(k for k in present for _ in range(allocation[k]))
        return list(dict.fromkeys(found))

    def machine_orders(self, choice: Choice, allocation: tuple[int, ...]) -> list[tuple[int, ...]]:
        """As `orders`, but only the stages of a machine stay together: some of those orders."""
        blocks: list[tuple[int, ...]] = []
        for kind, count in enumerate(allocation):
            groups = max((len(own) for own in self.machines[kind]), default=1) // choice.tp
            size = max(1, groups // choice.dp)
            blocks += [(kind,) * min(size, count - at) for at in range(0, count, size)]
        rng, found = random.Random(len(blocks)), dict[tuple[int, ...], None]()
        for _ in range(_ARRANGEMENTS):
            rng.shuffle(blocks)
            found[tuple(kind for block in blocks for kind in block)] = None
        return list(found)

    def _by_ratio(self, choice: Choice, allocation: tuple[int, ...]) -> tuple[int, ...]:
        """First the types whose share of compute leaves them most room, as first stages hold most micro-batches."""
        left, stages, order = list(allocation), sum(allocation), list[int]()
        rate = {k: 1.0 / self.layer_s(choice, k) for k, n in enumerate(allocation) if n}
        while len(order) < stages:
            rooms = {k: self._room(choice, k, len(order), stages) for k in rate if left[k]}
            order.append(min(rooms, key=lambda k: (rate[k] / max(rooms[k], 0.5), k)))
            left[order[-1]] -= 1
        return tuple(order)

    def _room(self, choice: Choice, kind: int, position: int, stages: int) -> int:
        held = in_flight(ONE_F_ONE_B, StagePosition(position, stages, choice.count))
        ends = position == 0, position == stages - 1
        shards = choice.dp if self.sharding else 1
        return self.times.room(self.sites(choice.tp, kind), *ends, choice.size, choice.policy, held, shards)

    def layers(self, choice: Choice, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Layers per stage, the slowest as fast as memory allows, and splits close by; none where they do not fit."""
        total, stages, rooms = self.problem.model.num_layers, len(order), self.rooms(choice, order)
        if min(rooms) < 1 or sum(rooms) < total:
            return []
        seconds = []
        for s, (kind, room) in enumerate(zip(order, rooms, strict=True)):
            site, ends = self.sites(choice.tp, kind), (s == 0, s == stages - 1)
            seconds.append([self.times.stage_s(site, n, *ends, choice.size, choice.policy) for n in range(1, room + 1)])
        return nearby(bottleneck_counts(seconds, total), rooms)

    def rooms(self, choice: Choice, order: Sequence[int]) -> list[int]:
        """The most layers of each stage."""
        return [min(self.problem.model.num_layers, self._room(choice, k, s, len(order))) for s, k in enumerate(order)]

    def placements(self, choice: Choice, order: Sequence[int]) -> list[Slots]:
        """TP groups for the stages: neighbours share a stage, or a pipeline; where links differ, near ones too."""
        wanted = [[(kind, choice.tp)] for kind in order]
        found = (
            filled(self.problem, self.machines, wanted, choice.dp, along=along, near=near)
            for along, near in product((False, True), self._near)
        )
        return [slots for slots in dict.fromkeys(found) if slots is not None]

    def seconds(self, made: Made) -> float:
        """The estimate of a step."""
        return self.times.step_s(made.slots, made.layers, made.choice.policy, made.choice.count, made.choice.size)

    def judged(self, made: Made) -> float:
        """What a placement is worth."""
        return self.worth.of((d for slot in made.slots for group in slot for d in group), self.seconds(made))

    def refined(self, made: Made) -> Made:
        """The placement with layers moved while its estimate falls."""
        layers = self.times.refined(
            made.slots,
            made.layers,
            self.rooms(made.choice, made.order),
            made.choice.policy,
            made.choice.count,
            made.choice.size,
        )
        return replace(made, layers=layers)

    def near(self, made: Made) -> Iterator[Made]:
        """Placements one change away: a layer, two neighbouring stages, the policy or the micro-batch."""
        choice, order, layers = made.choice, made.order, made.layers
        rooms = self.rooms(choice, order)
        reach = len(order) if len(order) <= _FEW else 1
        for a, b in permutations(range(len(order)), 2):
            if abs(a - b) <= reach and layers[a] > 1 and layers[b] < rooms[b]:
                yield replace(made, layers=tuple(n - (s == a) + (s == b) for s, n in enumerate(layers)))
        for s in range(len(order) - 1):
            if order[s] != order[s + 1]:
                yield from self.made(choice, (*order[:s], order[s + 1], order[s], *order[s + 2 :]))
        for other in self.choices(self.times.pricer.policies()):
            alike = (other.tp, other.dp) == (choice.tp, choice.dp)
            if alike and (other.size == choice.size) != (other.policy == choice.policy):
                yield from self.made(other, order)

    def made(self, choice: Choice, order: tuple[int, ...]) -> Iterator[Made]:
        """All placements of an order, splits of layers close by last."""
        slots = self.placements(choice, order)
        for layers in self.layers(choice, order):
            for own in slots:
                yield Made(choice, order, own, layers)

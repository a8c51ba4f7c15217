"""`metis`: HexiScale's hierarchical graph partition (arXiv 2409.01143, section 4), both phases iterating.

Phase 1 partitions the GPUs into one group per pipeline. Weights are a mix of reciprocal bandwidth (fat links
fall between pipelines, where gradients travel) and bandwidth (they stay inside, for activations); the mix and
the number of groups are iterated. Phase 2 builds each pipeline: a secondary partition on true bandwidth collects
GPUs with fat links; inside each part, per machine, TP degrees are searched; parts are ordered along fat links,
exactly where they are few. Where the paper is silent: TP degrees are improved one machine at a time by the
pipeline's rate, and most iterations partition the GPUs of some pipelines of the best plan again, into as many
pipelines, one more or one fewer.
"""

import random
from dataclasses import dataclass

import numpy as np

from hexiopt.errors import InputError
from hexiopt.problem import Problem
from hexiopt.result import Result
from hexiopt.space import schedules, sharding_stages
from solvers.base import Budget, Listener, Pricer, Search
from solvers.graph import DeviceGraph, device_graph, partition
from solvers.ordering import best_order
from solvers.reason import explain
from solvers.structure import Builder, Bundle, Group, Structure

_AFRESH = 0.3  # share of iterations that partition the whole cluster anew
_OTHER_CHOICES = 0.15  # share of iterations with another micro-batch size, schedule or sharding
_LARGEST_GRAPH = 1024  # GPUs; a complete graph beyond this takes METIS longer than a search should


def compositions(count: int, allowed: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to cut `count` GPUs of one machine into TP groups: as even as degrees allow, from wide to narrow."""
    found = []
    for degree in allowed:
        parts, rest = [degree] * (count // degree), count % degree
        while rest:
            parts.append(max(t for t in allowed if t <= rest))
            rest -= parts[-1]
        if parts and sum(parts) == count and tuple(parts) not in found:
            found.append(tuple(parts))
    return found[::-1]


@dataclass(frozen=True)
class _Incumbent:
    """The best plan's partition: positions of each pipeline's GPUs, and the pipelines built from them."""

    step_time_s: float
    parts: tuple[tuple[int, ...], ...]
    structure: Structure


class HierarchicalPartition:
    """The two phases on one problem."""

    def __init__(self, search: Search, builder: Builder, rng: random.Random) -> None:
        self.search, self.builder, self.rng = search, builder, rng
        self.problem: Problem = search.problem
        self._graph = device_graph(self.problem)
        with np.errstate(divide="ignore"):
            self._reciprocal = 1.0 / self._graph.bandwidth
        np.fill_diagonal(self._reciprocal, 0.0)
        self._reciprocal /= self._reciprocal.max()
        self._direct = self._graph.bandwidth / self._graph.bandwidth.max()
        self.best: _Incumbent | None = None

    def iterate(self) -> None:
        """One pass of both phases: afresh, or on some pipelines of the best plan so far."""
        parts, kept = self._phase_one()
        size, schedule, sharding = self._choices(len(parts))
        bundles = []
        for part in parts:
            old = kept.get(part)
            if old is None:
                shards = len(parts) if sharding else 1
                old = self._pipeline(self._graph.subset(list(part)), size, schedule, shards)
            if old is None:
                return
            bundles.append(Bundle(old.stages, size))
        structure = Structure(tuple(bundles), schedule, sharding)
        if not self.builder.allowed(structure):
            return
        least = self.best.step_time_s if self.best else float("inf")
        priced = self.builder.price(structure, least)
        if isinstance(priced, tuple) and priced[1].objective < least:
            self.best = _Incumbent(priced[1].objective, parts, structure)

    def _phase_one(self) -> tuple[tuple[tuple[int, ...], ...], dict[tuple[int, ...], Bundle]]:
        """GPUs per pipeline, and the pipelines that stay as they are."""
        rng, space, best = self.rng, self.problem.space, self.best
        most = max(1, min(len(self._graph.devices) // 2, self.problem.workload.global_batch, 64))
        if best is None or rng.random() < _AFRESH:
            count = space.num_pipelines or rng.randint(1, most)
            everything = tuple(range(len(self._graph.devices)))
            return self._partition(everything, count), {}
        kept = dict(zip(best.parts, best.structure.bundles, strict=True))
        chosen = rng.sample(best.parts, min(len(best.parts), rng.choice((1, 2, 2, 3))))
        rest = tuple(part for part in best.parts if part not in chosen)
        change = 0 if space.num_pipelines else rng.choice((-1, 0, 0, 0, 1))
        union = tuple(sorted(position for part in chosen for position in part))
        count = min(max(1, len(chosen) + change), max(1, len(union) // 2))
        if space.num_pipelines:
            count = len(chosen)
        return rest + self._partition(union, count), {part: kept[part] for part in rest}

    def _partition(self, positions: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
        """METIS on some of the GPUs, edge weights mixed from reciprocal and true bandwidth."""
        mix = self.rng.choice((1.0, 1.0, 0.75, 0.5, 0.0))
        graph = self._graph.subset(list(positions))
        at = np.ix_(positions, positions)
        weights = mix * self._reciprocal[at] + (1 - mix) * self._direct[at]
        parts = partition(graph, count, weights, self.rng.randrange(1 << 30))
        return tuple(tuple(positions[i] for i in part) for part in parts)

    def _choices(self, count: int) -> tuple[int, str, int]:
        """Micro-batch size, schedule and sharding: those of the best plan, or now and then others."""
        rng, workload = self.rng, self.problem.workload
        if self.best is not None and rng.random() > _OTHER_CHOICES:
            old = self.best.structure
            return old.bundles[0].micro_batch_size, old.schedule, old.sharding
        sizes = self.problem.space.micro_batch_sizes(max(1, workload.global_batch // count))
        return rng.choice(sizes[:3]), rng.choice(schedules(workload)), rng.choice(sharding_stages(workload))

    def _pipeline(self, graph: DeviceGraph, size: int, schedule: str, shards: int) -> Bundle | None:
        """Phase 2 for the GPUs of one pipeline."""
        machine_of = self.problem.cluster.machine_of
        machines = sorted({int(machine_of[d]) for d in graph.devices})
        wanted = self.rng.randint(1, max(1, len(machines)))
        blocks: list[list[int]] = []  # GPUs of one machine in one part
        for part in partition(graph, wanted, graph.bandwidth, self.rng.randrange(1 << 30)):
            for machine in machines:
                own = [graph.devices[i] for i in part if machine_of[graph.devices[i]] == machine]
                if own:
                    blocks.append(own)
        space = self.problem.space
        choices = [
            compositions(len(own), space.allowed_tp(self.problem.cluster.machines[int(machine_of[own[0]])].num_gpus))
            for own in blocks
        ]
        network = self.problem.cluster.network
        message = 1e6 * size
        hops = [
            [message / network.pair_bandwidth(a[0], b[0]) + network.pair_latency(a[0], b[0]) if a is not b else 0.0 for b in blocks]
            for a in blocks
        ]
        order = best_order(hops)
        if self.rng.random() < 0.5:
            order.reverse()
        chosen = [self.rng.randrange(len(options)) for options in choices]
        best = self._rate(blocks, choices, chosen, order, size, schedule, shards)
        for at in order:
            for option in range(len(choices[at])):
                trial = [*chosen[:at], option, *chosen[at + 1 :]]
                rate = self._rate(blocks, choices, trial, order, size, schedule, shards)
                if rate > best:
                    best, chosen = rate, trial
        return self._bundle(blocks, choices, chosen, order, size)

    def _bundle(
        self, blocks: list[list[int]], choices: list[list[tuple[int, ...]]], chosen: list[int], order: list[int], size: int
    ) -> Bundle | None:
        stages: list[tuple[Group]] = []
        for at in order:
            start = 0
            for degree in choices[at][chosen[at]]:
                stages.append((tuple(blocks[at][start : start + degree]),))
                start += degree
        space = self.problem.space
        if space.num_stages is not None:
            stages = stages[: space.num_stages]
        return Bundle(tuple(stages), size) if len(stages) <= self.problem.model.num_layers else None

    def _rate(
        self,
        blocks: list[list[int]],
        choices: list[list[tuple[int, ...]]],
        chosen: list[int],
        order: list[int],
        size: int,
        schedule: str,
        shards: int,
    ) -> float:
        bundle = self._bundle(blocks, choices, chosen, order, size)
        if bundle is None:
            return 0.0
        return self.builder.rate(Structure((bundle,), schedule, 0), shards)


class Metis:
    """Iterates the two phases until the budget is spent, and keeps the best."""

    name = "metis"

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        listen: Listener | None = None,
    ) -> Result:
        """The best plan found within `budget`; a step is one pass of both phases. Raises InputError without pymetis."""
        require_pymetis()
        if len(problem.usable_devices) > _LARGEST_GRAPH:
            raise InputError(
                f"solver: metis: {len(problem.usable_devices)} GPUs are more than the {_LARGEST_GRAPH} of its complete "
                "graph; use solver=portfolio"
            )
        search = Search(self.name, problem, budget, seed, pricer, listen)
        builder = Builder(search)
        hierarchy = HierarchicalPartition(search, builder, random.Random(seed))
        while search.go_on():
            search.step()
            hierarchy.iterate()
        return explain(search, builder)


def require_pymetis() -> None:
    """Raises InputError that names what to install."""
    try:
        import pymetis  # noqa: F401
    except ImportError:
        raise InputError(
            "solver: metis: needs the package pymetis; install it with \"pip install -e '.[metis]'\", "
            "or choose solver=portfolio"
        ) from None

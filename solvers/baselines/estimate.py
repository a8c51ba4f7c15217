"""Quick estimates of symmetric grids: seconds of stages, messages and gradient sync, room in memory.

They rank; no answer is priced by them. Messages and gradients share interfaces as the cost model shares them, for
the slowest pipeline of a grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations
from typing import Any

from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.executors.memory import MemoryModel, Shards, longest
from hexiopt.cost.executors.routes import Hop, Load, hop
from hexiopt.cost.model import CostModel
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.schedule import largest_cycle_mean_s
from solvers.baselines.grid import Grid
from solvers.core.partition import Group
from solvers.core.search import Pricer

_BACKWARD_SHARE = 2 / 3  # of a micro-batch's seconds in a stage
_FEW_STAGES = 12  # up to which layers are shifted between any two stages
_PASSES = 5  # over all moves of a layer

Sites = frozenset[Any]  # sites of a stage's TP groups; the slowest and fullest decide


@dataclass(frozen=True, slots=True)
class Messages:
    """Per boundary of a grid, forward and backward together: seconds per byte of a message, and latency."""

    s_per_byte: tuple[float, ...]
    latency_s: tuple[float, ...]

    def seconds(self, num_bytes: float) -> list[float]:
        """Seconds of both messages of each boundary."""
        return [s * num_bytes + more for s, more in zip(self.s_per_byte, self.latency_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Rings:
    """What gradients cross, stage by stage: shared resource, seconds per byte of the stage's gradients."""

    loads: tuple[Load, ...]
    latency_s: float

    def sync_s(self, num_bytes: Sequence[float]) -> list[float]:
        """Both passes over the gradients of each stage, all stages at once."""
        total: Load = {}
        for load, size in zip(self.loads, num_bytes, strict=True):
            for r, s_per_byte in load.items():
                total[r] = total.get(r, 0.0) + s_per_byte * size
        return [2.0 * (max(total[r] for r in load) + self.latency_s) if load else 0.0 for load in self.loads]


class Estimates:
    """Estimates for one search. Keeps what repeats."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.problem: Problem = pricer.problem
        self._seconds: dict[tuple[Any, ...], float] = {}
        self._rooms: dict[tuple[Any, ...], int] = {}
        self._hops: dict[tuple[Group, Group], Hop] = {}
        self._slowest: dict[tuple[Group, ...], float] = {}
        workload = self.problem.workload
        self.sequence_bytes = float(workload.seq_len * self.problem.model.hidden_size * workload.element_bytes)

    def sites(self, grid: Grid) -> list[Sites]:
        """The sites of every stage."""
        return [frozenset(self.pricer.site(group) for group in slot) for slot in grid.stages]

    def stage_s(self, sites: Sites, num_layers: int, first: bool, last: bool, size: int, policy: str) -> float:
        """Forward and backward of a stage, on its slowest site."""
        key = (sites, num_layers, first, last, size, policy)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = max(
                sum(self.pricer.stage_s(site, num_layers, first, last, size, policy)) for site in sites
            )
        return found

    def room(self, sites: Sites, first: bool, last: bool, size: int, policy: str, held: InFlight, shards: int) -> int:
        """The most layers of a stage, on its fullest site; at least 0."""
        key = (sites, first, last, size, policy, held, shards)
        found = self._rooms.get(key)
        if found is None:
            spread = Shards(1, shards)
            rooms = (self.pricer.max_layers(site, first, last, size, policy, held, spread) for site in sites)
            found = self._rooms[key] = max(0, min(rooms))
        return found

    def room_beside(
        self,
        sites: Sites,
        first: bool,
        last: bool,
        size: int,
        block: tuple[str, int, str],
        chunks: int,
        held: InFlight,
        shards: int,
    ) -> int:
        """The most layers of a stage of `chunks` equal ranges, on its fullest site: the first ones of each range have a
        policy, so many, and the others another."""
        key = (sites, first, last, size, block, chunks, held, shards)
        found = self._rooms.get(key)
        if found is None:
            assert isinstance(self.pricer, CostModel)
            models = {id(model): (model, site) for site in sites for model in [self.pricer.memory_model(site, size)]}
            found = self._rooms[key] = min(
                chunks * _longest_range(model, site.gpu.usable_memory_bytes, first, last, block, chunks, held, shards)
                for model, site in models.values()
            )
        return found

    def messages(self, grid: Grid) -> Messages:
        """All pipelines of the grid sending at once."""
        load: Load = {}
        ways: list[list[Hop]] = []  # per boundary, all pipelines both ways
        for pipeline in zip(*grid.stages, strict=True):
            hops = [(self._hop(a, b), self._hop(b, a)) for a, b in pairwise(pipeline)]
            ways.append([way for both in hops for way in both])
            for s in range(len(pipeline)):
                own: Load = {}  # of one sender, the larger of its directions
                for way in [ahead for ahead, _ in hops[s : s + 1]] + [back for _, back in hops[s - 1 : s] if s]:
                    for resource, seconds in way.shared:
                        own[resource] = max(seconds, own.get(resource, 0.0))
                for resource, seconds in own.items():
                    load[resource] = load.get(resource, 0.0) + seconds
        rates, latencies = [], []
        for at in range(0, 2 * len(grid.stages) - 2, 2):
            ahead, back = [line[at] for line in ways], [line[at + 1] for line in ways]
            rates.append(max(_rate(way, load) for way in ahead) + max(_rate(way, load) for way in back))
            latencies.append(max(way.latency_s for way in ahead) + max(way.latency_s for way in back))
        return Messages(tuple(rates), tuple(latencies))

    def _hop(self, senders: Group, receivers: Group) -> Hop:
        found = self._hops.get((senders, receivers))
        if found is None:
            found = self._hops[senders, receivers] = hop(self.problem.cluster, senders, receivers)
        return found

    def rings(self, grid: Grid) -> "Rings":
        """The rings over the pipelines, one for every TP rank of every stage."""
        if grid.width == 1:
            return Rings(({},) * len(grid.stages), 0.0)
        cluster, network = self.problem.cluster, self.problem.cluster.network
        share = (grid.width - 1) / grid.width / grid.tp  # of a stage's parameters, over each edge of a ring
        loads: list[Load] = []
        latency_s = 0.0
        for slot in grid.stages:
            load: Load = {}
            for ring in zip(*slot, strict=True):
                order = sorted(ring)
                for a, b in zip(order, order[1:] + order[:1], strict=True):
                    latency_s = max(latency_s, network.pair_latency(a, b))
                    if cluster.machine_of[a] == cluster.machine_of[b]:
                        load[-1 - a] = load.get(-1 - a, 0.0) + share / network.pair_bandwidth(a, b)
                    else:
                        for r in network.route(a, b):
                            load[r] = load.get(r, 0.0) + share / float(network.capacity[r])
            loads.append(load)
        return Rings(tuple(loads), latency_s)

    def gradient_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes of the gradients of each stage."""
        model, width = self.problem.model, self.problem.workload.stored_gradient_bytes
        found = [float(n * model.layer_params * width) for n in layers]
        found[0] += model.embedding_params * width
        found[-1] += model.head_params * width
        return found

    def slowest_link(self, slot: tuple[Group, ...]) -> float:
        """Bytes/s of the slowest link on the rings over a stage's pipelines, nothing else on the way."""
        found = self._slowest.get(slot)
        if found is None:
            rate, network = float("inf"), self.problem.cluster.network
            for ring in zip(*slot, strict=True):
                order = sorted(ring)
                for a, b in zip(order, order[1:] + order[:1], strict=True):
                    rate = min(rate, network.pair_bandwidth(a, b))
            found = self._slowest[slot] = rate
        return found

    def optimizer_s(self, grid: Grid, shards: int) -> float:
        """The optimiser step of a mean stage on the slowest GPU type, its states sharded over `shards`."""
        params = self.problem.model.num_params / (len(grid.stages) * grid.tp * shards)
        gpus = {self.problem.cluster.gpu_of(group[0]) for slot in grid.stages for group in slot}
        return max(optimizer_compute_s(self.problem.workload, gpu, params) for gpu in gpus)


def _rate(way: Hop, load: Load) -> float:
    return max(way.port_s_per_byte, *(load[r] for r, _ in way.shared)) if way.shared else way.port_s_per_byte


def one_f_one_b_s(stage_s: Sequence[float], hop_s: Sequence[float], num_micro_batches: int) -> float:
    """About what 1F1B takes: the fill, and a beat for each further micro-batch. `hop_s` both ways together."""
    beat = largest_cycle_mean_s(stage_s, hop_s) if num_micro_batches > 1 else 0.0
    return sum(stage_s) + sum(hop_s) + (num_micro_batches - 1) * beat


def synced_s(
    pipeline_s: float, stage_s: Sequence[float], hop_s: Sequence[float], sync_s: Sequence[float], chunks: int = 1
) -> float:
    """About when all gradients are synchronised: later stages end earlier, by the backwards of the stages before."""
    drained = [s * _BACKWARD_SHARE / chunks + hop / 2 for s, hop in zip(stage_s, hop_s, strict=False)]
    return max(pipeline_s - early + s for early, s in zip(accumulate(drained, initial=0.0), sync_s, strict=True))


def shifted(
    layers: Sequence[int], rooms: Sequence[int], seconds: Callable[[Sequence[int]], float]
) -> tuple[tuple[int, ...], float]:
    """`layers` per stage after moving single layers, within `rooms`, while `seconds` falls; and the seconds.

    Between any two stages of a few, between near ones of many.
    """
    best, best_s = tuple(layers), seconds(layers)
    stages = range(len(best))
    reach = len(best) if len(best) <= _FEW_STAGES else 2
    moves = [(a, b) for a, b in permutations(stages, 2) if abs(a - b) <= reach]
    for _ in range(_PASSES):
        start_s = best_s
        for a, b in moves:
            if best[a] > 1 and best[b] < rooms[b]:
                moved = tuple(n - (s == a) + (s == b) for s, n in enumerate(best))
                moved_s = seconds(moved)
                if moved_s < best_s:
                    best, best_s = moved, moved_s
        if best_s == start_s:
            break
    return best, best_s


def _longest_range(
    model: MemoryModel,
    limit_bytes: float,
    first: bool,
    last: bool,
    block: tuple[str, int, str],
    chunks: int,
    held: InFlight,
    shards: int,
) -> int:
    """The most layers a range that fit, as `Estimates.room_beside` has them."""
    policy, leaner, other = block
    lean, rich = model.layer_activation_bytes(policy), model.layer_activation_bytes(other)
    moments = model.moments(held, first, last)

    def fits(length: int) -> bool:
        stored = min(length, leaner) * lean + max(0, length - leaner) * rich
        room = model.room(limit_bytes, length * chunks, first, last, (policy, other), Shards(1, shards))
        return all(sum(counts) * stored + ends <= room for counts, ends in moments)

    return max(0, longest(fits))

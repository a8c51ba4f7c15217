"""Quick estimates of grids: seconds of stages, messages and gradient sync, room in memory.

They rank; no answer is priced by them. Messages and gradients share interfaces as the cost model shares them, for
the slowest pipeline of a grid, and gradients are summed next to the last backward where the cost model sums them so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from hexiopt.bounds import our_model
from hexiopt.cost.executors.collectives import tree_depth
from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.cost.executors.network_load import NetworkLoad, Route
from hexiopt.cost.executors.routes import route
from hexiopt.memo import Memo
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight, in_flight
from hexiopt.schedules.schedule import largest_cycle_mean_s, positions
from hexiopt.solving import Pricer
from solvers.baselines._grids import StageGrid
from solvers.baselines._plans import RUNS_1F1B, shift_layers
from solvers.completion.layers import LayerSplitter
from solvers.core.partition import DeviceGroup
from solvers.frame.starts import cut

_BACKWARD_SHARE = 2 / 3  # of a micro-batch's seconds in a stage

Member = TypeVar("Member", int, DeviceGroup)
StageTpGroups = frozenset[Any]  # of a stage; the slowest and the fullest decide


def around(members: Iterable[Member]) -> Iterator[tuple[Member, Member]]:
    """Neighbours on a ring of `members` in ascending order: (sender, receiver)."""
    ring = sorted(members)
    return zip(ring, ring[1:] + ring[:1], strict=True)


@dataclass(frozen=True, slots=True)
class GridMessages:
    """Messages across each boundary of a grid, forward and backward together: seconds per byte, and latency."""

    s_per_byte: tuple[float, ...]
    latency_s: tuple[float, ...]

    def seconds(self, num_bytes: float) -> list[float]:
        """Seconds of both messages, for each boundary."""
        return [s * num_bytes + more for s, more in zip(self.s_per_byte, self.latency_s, strict=True)]


@dataclass(frozen=True, slots=True)
class GridRings:
    """Network resources that the gradients of each stage cross: seconds per byte of these gradients, by resource."""

    loads: tuple[NetworkLoad, ...]
    latency_s: float

    def sync_s(self, num_bytes: Sequence[float]) -> list[float]:
        """Seconds of both passes over the gradients of each stage, when all stages synchronise at once."""
        total: NetworkLoad = {}
        for load, size in zip(self.loads, num_bytes, strict=True):
            for r, s_per_byte in load.items():
                total[r] = total.get(r, 0.0) + s_per_byte * size
        return [2.0 * (max(total[r] for r in load) + self.latency_s) if load else 0.0 for load in self.loads]


class GridEstimates:
    """Estimates for the stages and grids of one search, computed once each."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.problem: Problem = pricer.problem
        workload, model = self.problem.workload, our_model(pricer, self.problem)
        self.sequence_bytes = float(workload.seq_len * workload.message_bytes(self.problem.model.hidden_size))
        self._sums_early = model is not None and model.framework.gradient_sums != "after"
        self._seconds: Memo[tuple[Any, ...], float] = Memo(lambda key: self._slowest_s(*key))
        self.max_layers: Memo[tuple[Any, ...], int] = Memo(lambda key: self._max_layers(*key))
        self._max_layers_of_blocks: Memo[tuple[Any, ...], int] = Memo(lambda key: self._fitting_of_block(*key))
        self._splitters: Memo[str, LayerSplitter] = Memo(lambda policy: LayerSplitter(pricer, (policy,), even=False))
        self._routes: Memo[tuple[DeviceGroup, DeviceGroup], Route] = Memo(
            lambda pair: route(self.problem.cluster, *pair)
        )
        self.slowest_link: Memo[tuple[DeviceGroup, ...], float] = Memo(self._slowest_link)

    # Stages.

    def tp_groups(self, grid: StageGrid) -> list[StageTpGroups]:
        """The TP groups of every stage."""
        return [frozenset(self._group(devices, grid.degree) for devices in groups) for groups in grid.stages]

    def _group(self, devices: DeviceGroup, degree: int | None) -> Any:
        group, stages = self.pricer.tp_group(devices), self.pricer.features.stages
        if degree is None:
            return group
        assert stages is not None, "only our pricer knows replicas that share experts"
        return stages.tp_groups.with_degree(group, degree)

    def stage_s(
        self, tp_groups: StageTpGroups, num_layers: int, first: bool, last: bool, size: int, policy: str
    ) -> float:
        """Seconds of forward and backward of a stage on its slowest TP group."""
        return self._seconds[tp_groups, num_layers, first, last, size, policy]

    def _slowest_s(
        self, tp_groups: StageTpGroups, num_layers: int, first: bool, last: bool, size: int, policy: str
    ) -> float:
        at = (num_layers, first, last, size, policy)
        return max(sum(self.pricer.stage_s(tp_group, *at)) for tp_group in tp_groups)

    def policies_by_speed(self, tp_groups: StageTpGroups, size: int) -> list[str]:
        """The recompute policies, that of the fastest layers first."""
        return sorted(self.pricer.policies(), key=lambda policy: self.stage_s(tp_groups, 1, False, False, size, policy))

    def linear_s(self, tp_groups: Sequence[StageTpGroups], size: int, policy: str) -> tuple[list[float], list[float]]:
        """Seconds of a layer on each stage, and what embedding and head add."""
        last = len(tp_groups) - 1
        layer_s = [self.stage_s(groups, 1, False, False, size, policy) for groups in tp_groups]
        whole_s = [self.stage_s(groups, 1, s == 0, s == last, size, policy) for s, groups in enumerate(tp_groups)]
        return layer_s, [whole - layer for whole, layer in zip(whole_s, layer_s, strict=True)]

    def _max_layers(
        self, tp_groups: StageTpGroups, first: bool, last: bool, size: int, policy: str, held: InFlight, shards: int
    ) -> int:
        """The most layers that fit on the fullest TP group of a stage; at least 0."""
        at = (first, last, size, policy, held, StateSharding(1, shards))
        return max(0, min(self.pricer.max_layers(tp_group, *at) for tp_group in tp_groups))

    def max_layers_by_stage(
        self,
        tp_groups: Sequence[StageTpGroups],
        size: int,
        policy: str,
        num_micro_batches: int,
        shards: int,
        chunks: int = 1,
        block: int | None = None,
    ) -> list[int]:
        """The most layers that fit on each stage under 1F1B, in `chunks` equal ranges. With `block`, only so many first
        layers of each range have `policy`, and the others recompute nothing."""
        most = []
        for groups, at in zip(tp_groups, positions(len(tp_groups), num_micro_batches, chunks), strict=True):
            key, held = (groups, at.first, at.last, size), in_flight(RUNS_1F1B[-1], at)
            if block is None:
                most.append(self.max_layers[*key, policy, held, shards])
            else:
                most.append(self._max_layers_of_blocks[*key, (policy, block, "none"), chunks, held, shards])
        return most

    def _fitting_of_block(
        self,
        tp_groups: StageTpGroups,
        first: bool,
        last: bool,
        size: int,
        block: tuple[str, int, str],
        chunks: int,
        held: InFlight,
        shards: int,
    ) -> int:
        stages = self.pricer.features.stages
        assert stages is not None, "asked for plans of our own pricer only"
        models = {
            id(model): (model, tp_group) for tp_group in tp_groups for model in [stages.memory_model(tp_group, size)]
        }
        return min(
            chunks * _longest_range(model, tp_group.gpu.usable_memory_bytes, first, last, block, chunks, held, shards)
            for model, tp_group in models.values()
        )

    def layer_times_s(
        self, tp_groups: Sequence[StageTpGroups], size: int, policy: str, num_micro_batches: int, shards: int
    ) -> list[list[float]]:
        """The seconds of 1, 2, ... layers on each stage under 1F1B, as many as fit (`completion/layers.py`)."""
        splitter, spread, tables = self._splitters[policy], StateSharding(1, shards), []
        for groups, at in zip(tp_groups, positions(len(tp_groups), num_micro_batches), strict=True):
            held = in_flight(RUNS_1F1B[-1], at)
            tables.append(splitter.options[groups, at.first, at.last, size, held, spread].times)
        return tables

    # Grids.

    def messages(self, grid: StageGrid) -> GridMessages:
        """The messages of a grid whose pipelines all send at once."""
        load: NetworkLoad = {}
        ways: list[list[Route]] = []  # per boundary, all pipelines both ways
        for pipeline in zip(*grid.stages, strict=True):
            routes = [(self._routes[a, b], self._routes[b, a]) for a, b in pairwise(pipeline)]
            ways.append([way for both in routes for way in both])
            for s in range(len(pipeline)):
                sent: NetworkLoad = {}  # of one sender, the larger of its directions
                for way in [ahead for ahead, _ in routes[s : s + 1]] + [back for _, back in routes[s - 1 : s] if s]:
                    for resource, seconds in way.shared:
                        sent[resource] = max(seconds, sent.get(resource, 0.0))
                for resource, seconds in sent.items():
                    load[resource] = load.get(resource, 0.0) + seconds
        rates, latencies = [], []
        for at in range(0, 2 * len(grid.stages) - 2, 2):
            ahead, back = [line[at] for line in ways], [line[at + 1] for line in ways]
            rates.append(max(_rate(way, load) for way in ahead) + max(_rate(way, load) for way in back))
            latencies.append(max(way.latency_s for way in ahead) + max(way.latency_s for way in back))
        return GridMessages(tuple(rates), tuple(latencies))

    def rings(self, grid: StageGrid) -> GridRings:
        """The gradient rings of a grid: one over its pipelines for every rank of every stage; where replicas share
        experts, that of these, and one over all replicas for every TP rank."""
        network, loads, latency_s = self.problem.cluster.network, list[NetworkLoad](), 0.0
        shared = self._share_of_experts if grid.replicas > 1 else 1.0
        for groups in grid.stages:
            families = [(shared, groups)]
            if grid.degree is not None and grid.replicas > 1:
                families.append((1.0 - shared, tuple(copy for devices in groups for copy in cut(devices, grid.degree))))
            load: NetworkLoad = {}
            for part, copies in families:
                if len(copies) == 1:
                    continue
                share = part * (len(copies) - 1) / len(copies) / len(copies[0])  # of a stage's parameters, over an edge
                for ring in zip(*copies, strict=True):
                    for a, b in around(ring):
                        latency_s = max(latency_s, network.pair_latency(a, b))
                        self._add_edge(load, a, b, share)
            loads.append(load)
        return GridRings(tuple(loads), latency_s)

    def _add_edge(self, load: NetworkLoad, a: int, b: int, share: float) -> None:
        """Add to `load` the seconds a byte of what device a sends to device b, `share` of it."""
        cluster, network = self.problem.cluster, self.problem.cluster.network
        if cluster.machine_of[a] == cluster.machine_of[b]:
            load[-1 - a] = load.get(-1 - a, 0.0) + share / network.pair_bandwidth(a, b)
            return
        for r in network.route(a, b):
            load[r] = load.get(r, 0.0) + share / float(network.capacity[r])

    @cached_property
    def _share_of_experts(self) -> float:
        """The share of experts in the parameters of the mean layer."""
        model, trained = self.problem.model, self.problem.parameters
        weights = model.weight_of_kinds
        rows = [row for row in trained.trained_groups if row.experts and row.holder == "layer"]
        return sum(row.params * weights[row.kind] for row in rows) / trained.layer_params

    def gradient_bytes(self, layers: Sequence[int]) -> list[float]:
        """Bytes of the gradients of each stage."""
        trained, width = self.problem.parameters, self.problem.workload.states.gradient
        num_bytes = [float(n * trained.layer_params * width) for n in layers]
        num_bytes[0] += trained.params_of("first", "ends") * width
        num_bytes[-1] += trained.last_params * width
        return num_bytes

    def exposed_s(
        self, sync_s: Sequence[float], backward_s: Sequence[float], layers: Sequence[int], sharding: int
    ) -> list[float]:
        """The seconds of `sync_s`, both passes over the gradients of each stage, that come after the last backward of
        the stage, which takes `backward_s`.

        Sums run next to it, but for those of its last part: a layer, or the embedding. With ZeRO-1 the second pass
        gathers weights, after the optimiser.
        """
        if not self._sums_early:
            return list(sync_s)
        trained, width = self.problem.parameters, self.problem.workload.states.gradient
        last_bytes = [float(trained.layer_params * width)] * len(layers)
        last_bytes[0] = max(last_bytes[0], float(trained.params_of("first", "ends") * width))
        sums = 1 / 2 if sharding else 1.0  # of the seconds
        return [
            whole_s - sums * whole_s + max(sums * whole_s - beside_s, sums * whole_s * last / every)
            for whole_s, beside_s, last, every in zip(
                sync_s, backward_s, last_bytes, self.gradient_bytes(layers), strict=True
            )
        ]

    def synced_s(
        self,
        pipeline_s: float,
        stage_s: Sequence[float],
        message_s: Sequence[float],
        sync_s: Sequence[float],
        layers: Sequence[int],
        sharding: int,
        chunks: int = 1,
    ) -> float:
        """Approximate time by which all gradients are synchronised; `sync_s` as in `exposed_s`.

        A stage starts earlier than the first one by the backward passes of the stages before it.
        """
        backward_s = [seconds * _BACKWARD_SHARE / chunks for seconds in stage_s]
        exposed_s = self.exposed_s(sync_s, backward_s, layers, sharding)
        drained = [own_s + route / 2 for own_s, route in zip(backward_s, message_s, strict=False)]
        return max(pipeline_s - early + s for early, s in zip(accumulate(drained, initial=0.0), exposed_s, strict=True))

    def _slowest_link(self, stage_groups: tuple[DeviceGroup, ...]) -> float:
        """Bytes/s of the slowest link on the rings over a stage's pipelines, with no other traffic."""
        rate = self.problem.cluster.network.pair_bandwidth
        return min(rate(a, b) for ring in zip(*stage_groups, strict=True) for a, b in around(ring))

    def optimizer_s(self, grid: StageGrid, shards: int) -> float:
        """The optimiser step of a mean stage on the slowest GPU type, its states sharded over `shards`."""
        params = self.problem.parameters.num_trained_params / (len(grid.stages) * grid.tp * shards)
        gpus = {self.problem.cluster.gpu_of(group[0]) for stage_groups in grid.stages for group in stage_groups}
        return max(optimizer_compute_s(self.problem.workload, gpu, params) for gpu in gpus)

    # Pipelines of a grid, whose TP groups may be of any degree and type.

    def step_s(
        self, grid: StageGrid, layers: Sequence[int], policy: str, batches: Sequence[int], size: int, sharding: int
    ) -> float:
        """Seconds of a step whose pipelines have `batches` micro-batches: 1F1B of those with equally many, each stage
        as slow as its slowest replica among them, then the rest of the gradients' sums."""
        message_s = self.messages(grid).seconds(size * self.sequence_bytes)
        longest: tuple[float, list[float]] = (0.0, [])
        for count in set(batches):
            alike = grid.of([k for k, each in enumerate(batches) if each == count])
            stage_s = self.stages_s(alike, policy, size)(layers)
            longest = max(longest, (one_f_one_b_s(stage_s, message_s, count), stage_s))
        sync_s = [self.gradients_s(grid, layers)] * len(grid.stages)
        pipeline_s, stage_s = longest
        return self.synced_s(pipeline_s, stage_s, message_s, sync_s, layers, sharding)

    def refine(
        self,
        grid: StageGrid,
        layers: tuple[int, ...],
        max_layers: Sequence[int],
        policy: str,
        batches: int,
        size: int,
    ) -> tuple[int, ...]:
        """`layers` after moving single ones, within `max_layers`, while the pipelines get faster."""
        message_s = self.messages(grid).seconds(size * self.sequence_bytes)
        stages_s = self.stages_s(grid, policy, size)
        return shift_layers(layers, max_layers, lambda split: one_f_one_b_s(stages_s(split), message_s, batches))[0]

    def stages_s(self, grid: StageGrid, policy: str, size: int) -> Callable[[Sequence[int]], list[float]]:
        """Seconds of each stage, as slow as its slowest replica, given the layers of all."""
        tp_groups, last = self.tp_groups(grid), len(grid.stages) - 1

        def seconds(layers: Sequence[int]) -> list[float]:
            return [self.stage_s(tp_groups[s], n, s == 0, s == last, size, policy) for s, n in enumerate(layers)]

        return seconds

    def gradients_s(self, grid: StageGrid, layers: Sequence[int]) -> float:
        """Seconds of both passes over the gradients, when all stages sum at once: a ring over the replicas of each
        stage.

        A slice of a layer goes round between the ranks that hold it, as activations go between unequal TP groups.
        """
        width = grid.width
        if width == 1:
            return 0.0
        load, port_s, latency_s = NetworkLoad(), 0.0, 0.0
        for stage_groups, num_bytes in zip(grid.stages, self.gradient_bytes(layers), strict=True):
            moved = num_bytes * (width - 1) / width
            for sender, receiver in around(stage_groups):
                way = self._routes[sender, receiver]
                port_s = max(port_s, way.port_s_per_byte * moved)
                latency_s = max(latency_s, way.latency_s)
                for resource, s_per_byte in way.shared:
                    load[resource] = load.get(resource, 0.0) + s_per_byte * moved
        return 2.0 * (max(port_s, *load.values(), 0.0) + latency_s * tree_depth(width))


def _rate(way: Route, load: NetworkLoad) -> float:
    return max(way.port_s_per_byte, *(load[r] for r, _ in way.shared)) if way.shared else way.port_s_per_byte


def one_f_one_b_s(stage_s: Sequence[float], message_s: Sequence[float], num_micro_batches: int) -> float:
    """Approximate seconds of 1F1B: the fill, and one period for each further micro-batch.

    `message_s` holds both directions of each boundary together.
    """
    period_s = largest_cycle_mean_s(stage_s, message_s) if num_micro_batches > 1 else 0.0
    return sum(stage_s) + sum(message_s) + (num_micro_batches - 1) * period_s


def sharded_s(
    zero: int, forward_s: float, backward_s: float, gather_s: float, scatter_s: float, num_layers: int
) -> float:
    """Approximate seconds of a micro-batch next to whose passes weights are gathered (ZeRO-3) and gradients scattered
    (from ZeRO-2 on), both in so many seconds for all layers.

    The longer of compute and communication counts; of a layer, both gathers and the scatter are exposed.
    """
    if zero == 3:
        pass_s = max(forward_s, gather_s) + max(backward_s, gather_s + scatter_s)
        return pass_s + (2 * gather_s + scatter_s) / num_layers
    if zero == 2:
        return forward_s + max(backward_s, scatter_s) + scatter_s / num_layers
    return forward_s + backward_s


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
    """The most layers that fit in each range; see `GridEstimates.max_layers_by_stage`."""
    policy, leaner, other = block
    smaller, faster = model.layer_activation_bytes(policy), model.layer_activation_bytes(other)
    moments = model.moments(held, first, last)

    def fits(length: int) -> bool:
        stored = min(length, leaner) * smaller + max(0, length - leaner) * faster
        room = model.free_bytes(limit_bytes, length * chunks, first, last, (policy, other), StateSharding(1, shards))
        return all(sum(counts) * stored + ends <= room for counts, ends in moments)

    return max(0, _largest_fitting(fits))


def _largest_fitting(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, if all smaller ones do; -1 if not even 0 fits."""
    low, high = -1, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

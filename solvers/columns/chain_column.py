"""Columns of the master program: chains of whole machines, with the rate, the fill and the sync of their pipelines."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.plan.holders import slices
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule
from solvers.columns.machine_kinds import MachineKinds
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DeviceGroup, DoesNotFit, PipelineGroup
from solvers.heuristics.chains import ChainBuilder, ChainTerms

_BACKWARD = 0.6  # share of the backward passes in filling and draining a pipeline, about

_STEP = 1.2  # between the drains that are told apart


@dataclass(frozen=True, slots=True, order=True)
class ChainRecipe:
    """`width` pipelines side by side through whole machines.

    `order`: (kind, number of machines) from the first stage to the last. `degrees`: the TP degree in the machines of
    each kind, or, if empty, the `rank`-th way of the chain builder's dynamic program.
    """

    order: tuple[tuple[int, int], ...]
    width: int
    micro_batch_size: int
    degrees: tuple[int, ...] = ()
    rank: int = 0

    def counts(self, num_kinds: int) -> tuple[int, ...]:
        """Machines of each kind."""
        found = [0] * num_kinds
        for kind, count in self.order:
            found[kind] += count
        return tuple(found)


@dataclass(frozen=True, slots=True, order=True)
class Sharing:
    """What the sync of chains that are used together depends on: by layer, how many rings share its all-reduce, which
    are the fewest that any chain makes; and how long before a pipeline's end its last layer is ready at the latest."""

    rings: tuple[int, ...]
    drain_s: float


Load = tuple[tuple[int, int, tuple[float, ...]], ...]  # begin and end of layers, and seconds a layer by rings


def shared(columns: Iterable["ChainColumn"]) -> Sharing:
    """What chains share that are used together."""
    chosen = list(dict.fromkeys(columns))
    rings = tuple(map(min, zip(*(column.rings for column in chosen), strict=True)))
    drain_s = min(column.drain_s for column in chosen)
    return Sharing(rings, _STEP ** math.floor(math.log(drain_s, _STEP)) if drain_s > 0.0 else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class ChainColumn:
    """A chain, and what its pipelines do on a network of their own.

    In T seconds before gradient sync they process (T − `fill_s`) · `rate` sequences. `rings` has, for each layer, how
    many rings an all-reduce can make at most: as many as interfaces join a machine to its holders there
    (`hexiopt/cost/rings.py`). `loads` says what gradients (and weights, in ZeRO-1) take at interfaces and uplinks: for
    the layers behind each, seconds a layer when 1, 2, … rings share its all-reduce, which are what a ring over many
    holders sends (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009) over bytes/s.
    """

    recipe: ChainRecipe
    counts: tuple[int, ...]  # machines by kind
    num_stages: int
    tp_degrees: frozenset[int]
    rate: float  # sequences/s of all its pipelines
    fill_s: float
    rings: tuple[int, ...]
    loads: tuple[Load, ...]

    @property
    def drain_s(self) -> float:
        """About how long before its first stage its last one ends."""
        return _BACKWARD * self.fill_s

    @property
    def alone(self) -> "Sharing":
        """What it shares with copies of its own."""
        return Sharing(self.rings, self.drain_s)

    def sync_s(self, sharing: "Sharing") -> float:
        """What the sync takes after the pipelines' ends; infinite where it keeps the others from `sharing`."""
        if self.drain_s < sharing.drain_s or any(map(operator.lt, self.rings, sharing.rings)):
            return math.inf
        num_layers = len(self.rings)
        return max(
            0.0,
            *(
                sum(
                    seconds[min(rings, len(seconds)) - 1]
                    for begin, end, seconds in load
                    for rings in sharing.rings[begin:end]
                )
                - load[0][0] / num_layers * sharing.drain_s
                for load in self.loads
            ),
        )

    @property
    def samples(self) -> int:
        """Sequences of a micro-batch in each of its pipelines."""
        return self.recipe.width * self.recipe.micro_batch_size


class ColumnPool:
    """The columns made so far for one ZeRO stage, under the assumption that `num_pipelines` share states and batch."""

    def __init__(self, completer: PlanCompleter, kinds: MachineKinds, zero_stage: int, num_pipelines: int) -> None:
        self._completer, self._kinds = completer, kinds
        problem = completer.problem
        self._problem, self._chains = problem, ChainBuilder(completer.pricer, completer.splitters)
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        self._network = problem.cluster.network
        self.zero_stage, self.num_pipelines = zero_stage, max(1, num_pipelines)
        self.shards = StateSharding(zero_stage, self.num_pipelines)
        self._sequences = max(1, problem.workload.global_batch // self.num_pipelines)  # of a pipeline, about
        model, sent_bytes = problem.model, passed_bytes(problem, zero_stage)
        self._layer_bytes = model.layer_params * sent_bytes
        self._first_bytes, self._last_bytes = (n * sent_bytes for n in (model.embedding_params, model.head_params))
        self._known: dict[ChainRecipe, ChainColumn | None] = {}
        self.columns: list[ChainColumn] = []

    def __contains__(self, recipe: ChainRecipe) -> bool:
        return recipe in self._known

    def make(self, recipe: ChainRecipe) -> ChainColumn | None:
        """The column of a recipe; None where no layers find a place, a machine stays idle, or the plan space forbids
        its pipelines."""
        if recipe not in self._known:
            column = self._known[recipe] = self._make(recipe)
            if column is not None:
                self.columns.append(column)
        return self._known[recipe]

    def pipeline_group(self, recipe: ChainRecipe, machines: Sequence[int]) -> PipelineGroup | None:
        """The pipelines of a recipe on `machines`, which are those of its kinds in its order."""
        if recipe.degrees:
            return self._plain(recipe, machines)
        size = recipe.micro_batch_size
        terms = ChainTerms(size, max(1, self._sequences // size), self.shards)
        return self._chains.chain(machines, self._kinds.devices, recipe.width, terms, recipe.rank)

    def _plain(self, recipe: ChainRecipe, machines: Sequence[int]) -> PipelineGroup | None:
        """One TP degree in the machines of a kind; machines with fewer devices than pipelines make stages together."""
        stages: list[tuple[DeviceGroup, ...]] = []
        waiting: list[DeviceGroup] = []
        for machine in machines:
            own, tp = self._kinds.devices[machine], recipe.degrees[self._kinds.kind_of[machine]]
            share = len(own) // recipe.width
            for at in range(0, share - tp + 1, tp):
                stages.append(tuple(own[k * share + at : k * share + at + tp] for k in range(recipe.width)))
            if not share:
                waiting += [(device,) for device in own]
            while len(waiting) >= recipe.width:
                stages.append(tuple(waiting[: recipe.width]))
                del waiting[: recipe.width]
        return PipelineGroup(tuple(stages), recipe.micro_batch_size) if stages else None

    def _make(self, recipe: ChainRecipe) -> ChainColumn | None:
        taken, machines = [0] * len(self._kinds), list[int]()
        for kind, count in recipe.order:
            machines += self._kinds.machines[kind][taken[kind] : taken[kind] + count]
            taken[kind] += count
        group, space = self.pipeline_group(recipe, machines), self._problem.space
        if group is None or len(group.stages) > self._problem.model.num_layers:
            return None
        if space.num_stages not in (None, len(group.stages)):
            return None
        degrees = frozenset(len(own) for slot in group.stages for own in slot)
        if not space.uneven_tp and len(degrees) > 1:
            return None
        schedule = default_schedule(self._problem.workload)
        made = self._completer.pipelines_alone(group, schedule, self.shards, self._sequences)
        if isinstance(made, DoesNotFit):
            return None
        if {self._machine_of[own[0]] for slot in group.stages for own in slot} != set(machines):
            return None
        return ChainColumn(
            recipe,
            tuple(taken),
            len(group.stages),
            degrees,
            sum(recipe.micro_batch_size / pipeline.rate.period_s for pipeline in made),
            max(pipeline.rate.fill_s for pipeline in made),
            *self._loads(group, [num_layers for num_layers, _ in made[0].split]),
        )

    def _loads(self, group: PipelineGroup, layers_of: Sequence[int]) -> tuple[tuple[int, ...], tuple[Load, ...]]:
        """`ChainColumn.rings` and its `loads`, of pipelines with so many layers in their stages."""
        machine_of, interface = self._machine_of, self._network.transmit_interface
        rings: list[int] = []
        loads: dict[tuple[int, bool], list[tuple[int, int, tuple[float, ...]]]] = defaultdict(list)
        behind: dict[int, list[tuple[int, int, tuple[float, ...]]]] = defaultdict(list)
        for s, (num_layers, slot) in enumerate(zip(layers_of, group.stages, strict=True)):
            sent = self._layer_bytes
            sent += ((s == 0) * self._first_bytes + (s + 1 == len(layers_of)) * self._last_bytes) / num_layers
            begin, end = len(rings), len(rings) + num_layers
            holders = []  # of each slice in each machine: its width, and its holders
            widths, ranks = slices(tuple(map(len, slot)))
            for width, ranks_of in zip(widths, ranks.tolist(), strict=True):
                here: dict[int, list[int]] = defaultdict(list)
                for devices, r in zip(slot, ranks_of, strict=True):
                    here[machine_of[devices[r]]].append(devices[r])
                holders += [(width, sorted(own)) for own in here.values()]
            ports = [list(dict.fromkeys(map(interface, own))) for _, own in holders]
            most = min(map(len, ports))
            rings += [most] * num_layers
            seconds: dict[tuple[int, bool], list[float]] = defaultdict(lambda most=most: [0.0] * most)
            for (width, own), at in zip(holders, ports, strict=True):
                each_s = width * sent / self._kinds.interface_bytes_per_s(machine_of[own[0]])
                for count in range(1, most + 1):
                    # One ring alone comes in at the first holder and goes out at the last.
                    for sends, used in ((False, at[:count]), (True, at[:count] if count > 1 else [interface(own[-1])])):
                        for port in used:
                            seconds[port, sends][count - 1] += each_s / count
            for port, own_s in seconds.items():
                loads[port].append((begin, end, tuple(own_s)))
            for u, uplink in enumerate(self._kinds.uplinks):
                if any(machine_of[devices[0]] in uplink.machines for devices in slot):
                    behind[u].append((begin, end, (sent / uplink.bytes_per_s,)))
        return tuple(rings), tuple(sorted({tuple(load) for load in (*loads.values(), *behind.values())}))


def passed_bytes(problem: Problem, zero_stage: int) -> int:
    """What a ring over many holders sends of each parameter, from each machine: gradients twice, or once and the
    weights once."""
    workload = problem.workload
    return workload.stored_gradient_bytes + (
        workload.element_bytes if zero_stage == 1 else workload.stored_gradient_bytes
    )

"""Makes columns: the layers that the stages of a chain get, what its pipelines take, and what they have to sync."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.plan.holders import slices
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.machine_kinds import MachineKinds, Uplink
from solvers.columns.sync import ChainSync, Load, SharedSync
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DeviceGroup, DoesNotFit, PipelineGroup
from solvers.core.zero import passed_bytes
from solvers.heuristics.chains import ChainBuilder, ChainTerms

_TIGHT = 16  # pipelines; among more, messages of others delay layers without slack for them
_BACKWARD = 0.6  # share of the backward passes in filling and draining a pipeline, about


class ColumnPool:
    """The columns made so far for one ZeRO stage, under the assumption that `num_pipelines` share states and batch."""

    def __init__(self, completer: PlanCompleter, kinds: MachineKinds, zero_stage: int, num_pipelines: int) -> None:
        self._completer, self._kinds = completer, kinds
        problem = completer.problem
        self._problem, self._chains = problem, ChainBuilder(completer.pricer, completer.splitters)
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        self.num_pipelines = max(1, num_pipelines)
        self.shards = StateSharding(zero_stage, self.num_pipelines)
        self._sequences = max(1, problem.workload.global_batch // self.num_pipelines)  # of a pipeline, about
        self._tight = self.num_pipelines <= _TIGHT
        self._sync = SyncLoads(problem, kinds, zero_stage)
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

    def recipe_of(self, group: PipelineGroup) -> ChainRecipe | None:
        """The recipe that gives the pipelines of `group`, with one TP degree in the machines of a kind; None where none
        does."""
        first = {self._machine_of[own[0]]: len(own) for slot in reversed(group.stages) for own in slot}
        machines = list(dict.fromkeys(self._machine_of[own[0]] for slot in group.stages for own in slot))
        kinds = [self._kinds.kind_of[machine] for machine in machines]
        degree = {kind: first[machine] for kind, machine in zip(kinds, machines, strict=True)}
        order = tuple((kind, len(list(run))) for kind, run in groupby(kinds))
        degrees = tuple(degree.get(kind, 1) for kind in range(len(self._kinds)))
        recipe = ChainRecipe(order, group.width, group.micro_batch_size, degrees)
        made = None if group.replicated else self._plain(recipe, machines)
        return recipe if made is not None and _placed(made) == _placed(group) else None

    def pipeline_group(self, recipe: ChainRecipe, machines: Sequence[int]) -> PipelineGroup | None:
        """The pipelines of a recipe on `machines`, which are those of its kinds in its order."""
        if recipe.degrees:
            return self._plain(recipe, machines)
        size = recipe.micro_batch_size
        schedule = default_schedule(self._problem.workload).plain()
        terms = ChainTerms(size, max(1, self._sequences // size), self.shards, schedule)
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
        if not space.uneven_tp and len({len(own) for slot in group.stages for own in slot}) > 1:
            return None
        schedule = default_schedule(self._problem.workload)
        made = self._completer.pipelines_alone(group, schedule, self.shards, self._sequences, tight=self._tight)
        if isinstance(made, DoesNotFit):
            return None
        if {self._machine_of[own[0]] for slot in group.stages for own in slot} != set(machines):
            return None
        fill_s = max(pipeline.rate.fill_s for pipeline in made)
        return ChainColumn(
            recipe,
            tuple(taken),
            sum(recipe.micro_batch_size / pipeline.rate.period_s for pipeline in made),
            fill_s,
            self._sync.of(group, [num_layers for num_layers, _ in made[0].split], _BACKWARD * fill_s),
        )


def _placed(group: PipelineGroup) -> list[set[frozenset[int]]]:
    """The TP groups of each stage, whichever order they and their devices have."""
    return [set(map(frozenset, slot)) for slot in group.stages]


class SyncLoads:
    """Makes the `ChainSync` of chains of a problem, in one ZeRO stage."""

    def __init__(self, problem: Problem, kinds: MachineKinds, zero_stage: int) -> None:
        model, workload = problem.model, problem.workload
        self._kinds, self._machine_of = kinds, problem.cluster.machine_of.tolist()
        network = problem.cluster.network
        self._interface, self._inside_bytes_per_s = network.transmit_interface, network.pair_bandwidth
        sent_bytes = passed_bytes(problem, zero_stage)
        self._layer_bytes = float(model.layer_params * sent_bytes)
        self._first_bytes, self._last_bytes = (n * sent_bytes for n in (model.embedding_params, model.head_params))
        self._message_bytes = workload.seq_len * model.hidden_size * workload.element_bytes

    def of(self, group: PipelineGroup, layers_of: Sequence[int], drain_s: float) -> ChainSync:
        """Of pipelines with so many layers in their stages, the last of which ends `drain_s` before the first."""
        rings: list[int] = []
        loads: dict[tuple[int, bool], list[tuple[int, int, tuple[float, ...]]]] = defaultdict(list)
        inner: set[Load] = set()
        for s, num_layers in enumerate(layers_of):
            ends_bytes = (s == 0) * self._first_bytes + (s + 1 == len(layers_of)) * self._last_bytes
            most, found, between = self._stage(group.stages[s], self._layer_bytes + ends_bytes / num_layers)
            span = len(rings), len(rings) + num_layers
            for port, seconds in found.items():
                loads[port].append((*span, tuple(seconds)))
            inner |= {((*span, (each_s,)),) for each_s in between}
            rings += [most] * num_layers
        ends = [0, *accumulate(layers_of)]
        uplinks = [self._uplink(group, ends, uplink) for uplink in self._kinds.uplinks]
        inside, outside, sequence_s = zip(*uplinks, strict=True) if uplinks else ((), (), ())
        return ChainSync(
            SharedSync(tuple(rings), drain_s, inside, outside),
            tuple(sorted(set(map(tuple, loads.values())))),
            tuple(sorted(inner)),
            tuple(self._layer_bytes / uplink.bytes_per_s for uplink in self._kinds.uplinks),
            sequence_s,
        )

    def _stage(
        self, slot: tuple[tuple[int, ...], ...], layer_bytes: float
    ) -> tuple[int, Mapping[tuple[int, bool], list[float]], set[float]]:
        """The most rings of a stage's layers; by interface, receiving or sending, seconds a layer by rings; and seconds
        a layer of devices that send to others in their machine."""
        holders = []  # of each slice in each machine: its share of a layer, and who holds it
        widths, ranks = slices(tuple(map(len, slot)))
        for width, ranks_of in zip(widths, ranks.tolist(), strict=True):
            here: dict[int, list[int]] = defaultdict(list)
            for devices, rank in zip(slot, ranks_of, strict=True):
                here[self._machine_of[devices[rank]]].append(devices[rank])
            holders += [(width, sorted(own)) for own in here.values()]
        ports = [list(dict.fromkeys(map(self._interface, own))) for _, own in holders]
        most = min(map(len, ports))
        found: dict[tuple[int, bool], list[float]] = {}
        inner: dict[int, float] = defaultdict(float)
        for (width, own), at in zip(holders, ports, strict=True):
            each_s = width * layer_bytes / self._kinds.interface_bytes_per_s(self._machine_of[own[0]])
            for rings in range(1, most + 1):
                # One ring alone comes in at the first holder and goes out at the last.
                out = at[:rings] if rings > 1 else [self._interface(own[-1])]
                for sends, used in ((False, at[:rings]), (True, out)):
                    for port in used:
                        found.setdefault((port, sends), [0.0] * most)[rings - 1] += each_s / rings
            for sender, receiver in pairwise(own):
                inner[sender] += width * layer_bytes / self._inside_bytes_per_s(sender, receiver)
        return most, found, set(inner.values())

    def _uplink(self, group: PipelineGroup, ends: Sequence[int], uplink: Uplink) -> tuple[int, int, float]:
        """The layers held behind an uplink, those held elsewhere, and its seconds a sequence."""
        inside = outside = 0
        here = [[self._machine_of[own[0]] in uplink.machines for own in slot] for slot in group.stages]
        for (begin, end), behind in zip(pairwise(ends), here, strict=True):
            layers = (1 << end) - (1 << begin)
            inside |= layers if any(behind) else 0
            outside |= 0 if all(behind) else layers
        crossings = sum(a != b for before, after in pairwise(here) for a, b in zip(before, after, strict=True))
        return inside, outside, crossings / len(here[0]) * self._message_bytes / uplink.bytes_per_s

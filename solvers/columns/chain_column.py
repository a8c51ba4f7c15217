"""Columns of the master program: chains of whole machines, with the rate, the fill and the sync of their pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.space import default_schedule
from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.sync import ChainSync, SyncLoads
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DeviceGroup, DoesNotFit, PipelineGroup
from solvers.heuristics.chains import ChainBuilder, ChainTerms

_BACKWARD = 0.6  # share of the backward passes in filling and draining a pipeline, about


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


@dataclass(frozen=True, slots=True, eq=False)
class ChainColumn:
    """A chain, and what its pipelines do on a network of their own.

    In T seconds before gradient sync they process (T − `fill_s`) · `rate` sequences.
    """

    recipe: ChainRecipe
    counts: tuple[int, ...]  # machines by kind
    rate: float  # sequences/s of all its pipelines
    fill_s: float
    sync: ChainSync

    @property
    def samples(self) -> int:
        """Sequences of a micro-batch in each of its pipelines."""
        return self.recipe.width * self.recipe.micro_batch_size


def _placed(group: PipelineGroup) -> list[set[frozenset[int]]]:
    """The TP groups of each stage, whichever order they and their devices have."""
    return [set(map(frozenset, slot)) for slot in group.stages]


class ColumnPool:
    """The columns made so far for one ZeRO stage, under the assumption that `num_pipelines` share states and batch."""

    def __init__(self, completer: PlanCompleter, kinds: MachineKinds, zero_stage: int, num_pipelines: int) -> None:
        self._completer, self._kinds = completer, kinds
        problem = completer.problem
        self._problem, self._chains = problem, ChainBuilder(completer.pricer, completer.splitters)
        self._machine_of: list[int] = problem.cluster.machine_of.tolist()
        self.zero_stage, self.num_pipelines = zero_stage, max(1, num_pipelines)
        self.shards = StateSharding(zero_stage, self.num_pipelines)
        self._sequences = max(1, problem.workload.global_batch // self.num_pipelines)  # of a pipeline, about
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
        if not space.uneven_tp and len({len(own) for slot in group.stages for own in slot}) > 1:
            return None
        schedule = default_schedule(self._problem.workload)
        made = self._completer.pipelines_alone(group, schedule, self.shards, self._sequences)
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

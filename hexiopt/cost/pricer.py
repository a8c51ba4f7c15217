"""The exact price of a plan, phase by phase: context, place, lockstep, network, rings, extra communicators, step.

What depends on a single pipeline is memoised: after a change to one pipeline only it and the coupling between pipelines
are priced again.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from hexiopt.cost.cells import with_degrees
from hexiopt.cost.context import PipelineContext, plan_context
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors.limits import MemoryLimits
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.sequence.context_parallel import ContextParallel
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.extra_communicators import add_communicators, communicator_bytes
from hexiopt.cost.lockstep import apply_lockstep
from hexiopt.cost.place import PlacedPipeline, place
from hexiopt.cost.rings import GradientRings, gradient_rings
from hexiopt.cost.sharing import FairShares, NetworkModel, StageOrders
from hexiopt.cost.step import step_cost
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers.frameworks import Framework
from hexiopt.plan.holdings import sharding_groups
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.schedule import Schedule
from hexiopt.simulation.engine import Span

_MEMO_SIZE = 50_000  # pipelines


@dataclass(frozen=True, slots=True)
class PricerFeatures:
    """What a pricer declares of itself: abilities beyond those of every pricer. The defaults promise nothing, and no
    value here makes our proofs hold for it (`hexiopt.bounds.our_model`).

    `stages`: our model of single stages, if the pricer takes seconds, bytes and routes of stages from it, so that
    searches may ask it for recompute policies layer by layer, and share the network among messages.
    `replicas`: whether stages of several TP groups have a price. `sends_occupy_stages`: whether a stage cannot compute
    while it sends to the next. `bound_s`: a lower bound in seconds on the step time of every plan of its
    problem, 0 where none is known. Raises InputError for a bound that is negative or not finite.
    """

    stages: StageModel | None = None
    replicas: bool = False
    sends_occupy_stages: bool = False
    bound_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.bound_s < math.inf:
            raise InputError(f"pricer: bound_s: {self.bound_s!r} is no lower bound; state seconds from 0 on")


class PlanPricer:
    """Prices plans of one problem; the `hexiopt.solving.Pricer` that solvers ask.

    `stages` prices single stages; `network` says when pipelines that share the network end; `context` is how a run
    divided each sequence, if it did. Raises InputError for a model that is not priced.
    """

    def __init__(
        self,
        problem: Problem,
        framework: Framework | None = None,
        network: NetworkModel | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        self.problem = problem
        self.stages = StageModel(problem, framework, context)
        self.framework = self.stages.framework
        self.network: NetworkModel = network or FairShares()
        self._placed = Memo(self._place, _MEMO_SIZE)
        self._rings: tuple[tuple[tuple[Stage, ...], ...], Sharding, GradientRings] | None = None
        # The stage model answers what searches ask any pricer about stages.
        self.tp_group, self.message_s = self.stages.tp_groups.of, self.stages.routes.message_s
        self._limits = MemoryLimits(self.stages)

    @property
    def features(self) -> PricerFeatures:
        """As of `Pricer`."""
        return PricerFeatures(stages=self.stages, replicas=True)

    def policies(self) -> tuple[str, ...]:
        """The recompute policies that the workload allows."""
        return recompute_policies(self.problem.workload)

    def max_layers(
        self,
        tp_group: TpGroup,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """As of `Pricer`."""
        return self._limits.max_layers(tp_group, first, last, micro_batch_size, policy, held, shards)

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The exact cost of `plan`; `pipelines` [pipelines] are the costs of its pipelines if already priced.

        Raises InputError for what the format allows but is not priced yet, and for layers that the model does not have.
        """
        plan = self.with_degrees(plan)
        groups = sharding_groups(plan, self.problem.cluster)
        rings = self._rings_in(plan, groups)
        pipelines = pipelines or self.network(self._place_in_groups(plan, groups))
        priced = add_communicators(pipelines, communicator_bytes(plan, rings, self.problem))
        return step_cost(plan.sharding.stage, priced, rings, self.problem, self.framework)

    def pipelines(self, plan: Plan) -> tuple[PipelineCost, ...]:
        """The costs of the pipelines of `plan`, which share the network [pipelines]. Raises InputError as `price`."""
        return self.network(self.place_pipelines(plan))

    def place_pipelines(self, plan: Plan) -> Sequence[PlacedPipeline]:
        """The pipelines of `plan` on their devices, before they share the network. Raises InputError as `price`."""
        plan = self.with_degrees(plan)
        return self._place_in_groups(plan, sharding_groups(plan, self.problem.cluster))

    def with_degrees(self, plan: Plan) -> Plan:
        """`plan` with all that a price decides: how many replicas share experts (`cells.py`)."""
        return with_degrees(plan, self.stages)

    def spans(self, plan: Plan, cost: Cost, number: int) -> Iterator[Span]:
        """The operations and messages of pipeline `number` of `plan`, whose price is `cost`, in the order in which they
        end. Raises InputError as `price`."""
        return self.network.spans(number, self.place_pipelines(plan), cost.pipelines)

    def orders(self, plan: Plan) -> list[StageOrders]:
        """What the executors of each stage of `plan` run, in the order in which they are priced [pipelines][stages].
        Raises as `price`."""
        return self.network.orders(self.place_pipelines(plan))

    def rings(self, plan: Plan) -> GradientRings:
        """The gradient rings of `plan`, inside its sharding groups and between them; remembered for the last plan.

        Raises InputError where its pipelines do not hold the same layers.
        """
        plan = self.with_degrees(plan)
        return self._rings_in(plan, sharding_groups(plan, self.problem.cluster))

    def _place_in_groups(self, plan: Plan, groups: Sequence[int] | None) -> Sequence[PlacedPipeline]:
        contexts = plan_context(plan, groups, self.stages)
        if plan.schedule.splits:
            every = communicator_bytes(plan, self._rings_in(plan, groups), self.problem)
            contexts = [at._replace(communicators=row) for at, row in zip(contexts, every, strict=True)]
        placed = [self._placed[line, plan.schedule, at] for line, at in zip(plan.pipelines, contexts, strict=True)]
        if plan.sharding.stage < 2:
            return placed
        return apply_lockstep(plan, placed, self._rings_in(plan, groups), self.problem.workload, self.framework)

    def _place(self, key: tuple[Pipeline, Schedule, PipelineContext]) -> PlacedPipeline:
        return place(*key, self.stages)

    def _rings_in(self, plan: Plan, groups: Sequence[int] | None) -> GradientRings:
        stages = tuple([pipeline.stages for pipeline in plan.pipelines])
        if self._rings is None or self._rings[:2] != (stages, plan.sharding):
            problem = self.problem
            trained, exchange = problem.parameters.trained_groups, problem.workload.sums_quantized
            rings = gradient_rings(plan, groups, trained, problem.cluster, exchange=exchange)
            self._rings = stages, plan.sharding, rings
        return self._rings[2]

    def with_network(self, network: NetworkModel) -> "PlanPricer":
        """The same pricer over another network model; both share what they remember of stages and pipelines."""
        other = copy(self)
        other.network = network
        return other

    def forget_plans(self) -> None:
        """Free the memory of remembered pipelines and plans; layers, routes and memory models stay."""
        self._placed.clear()
        self.network.forget()
        self.stages.forget_stages()
        self._rings = None

    def stage_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """As of `Pricer`: with one policy for all layers."""
        return self.stages.stage_s(tp_group, num_layers, first, last, micro_batch_size, (policy,))

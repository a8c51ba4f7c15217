"""The exact price of a plan, phase by phase: context, place, lockstep, network, rings, step.

Results that depend on a single pipeline are memoised, so after a change to one pipeline only that pipeline and the
coupling between pipelines are priced again.
"""

from collections.abc import Sequence
from copy import copy

from hexiopt.calibration.frameworks import Framework
from hexiopt.cost.context import PipelineContext, plan_context
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import StageModel, TpGroup
from hexiopt.cost.lockstep import in_lockstep
from hexiopt.cost.pipelines import NetworkModel, StaticShares
from hexiopt.cost.place import PlacedPipeline, place
from hexiopt.cost.rings import GradientRings, gradient_rings
from hexiopt.cost.step import step_cost
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import TokenLayout
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.schedule import Schedule

_KEPT = 50_000  # pipelines


class PlanPricer:
    """Prices plans of one problem. Implements what solvers ask of a pricer (`hexiopt.solving.Pricer`).

    `stages` prices what one stage takes and holds; `network` says when pipelines end that share the network.
    """

    sends_occupy_stages = False

    def __init__(
        self, problem: Problem, framework: Framework | None = None, network: NetworkModel | None = None
    ) -> None:
        self.problem = problem
        self.stages = StageModel(problem, framework)
        self.framework = self.stages.framework
        self.network: NetworkModel = network or StaticShares()
        self._placed = Memo(self._place, _KEPT)
        self._rings: tuple[tuple[tuple[Stage, ...], ...], Sharding, GradientRings] | None = None

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        """The exact cost of `plan`; `pipelines` are its pipelines if already priced.

        Raises InputError for what the format allows but is not priced yet, and for layers that the model does not have.
        """
        priced = pipelines or self.pipelines(plan)
        return step_cost(plan.sharding.stage, priced, self.rings(plan), self.problem, self.framework)

    def pipelines(self, plan: Plan) -> tuple[PipelineCost, ...]:
        """The cost of each pipeline of `plan`, sharing the network with the others. Raises as `price`."""
        return self.network(self.placed(plan))

    def placed(self, plan: Plan) -> Sequence[PlacedPipeline]:
        """Each pipeline of `plan` on its devices, before they share the network. Raises as `price`."""
        contexts = plan_context(plan, self.problem, self.stages)
        placed = [self._placed[own, plan.schedule, at] for own, at in zip(plan.pipelines, contexts, strict=True)]
        if plan.sharding.stage < 2:
            return placed
        return in_lockstep(plan, placed, [at.contention for at in contexts], self.rings(plan), self.stages)

    def _place(self, key: tuple[Pipeline, Schedule, PipelineContext]) -> PlacedPipeline:
        return place(*key, self.stages)

    def rings(self, plan: Plan) -> GradientRings:
        """The gradient rings of `plan`, inside its sharding groups and between them; kept for the last plan."""
        stages = tuple([pipeline.stages for pipeline in plan.pipelines])
        if self._rings is None or self._rings[:2] != (stages, plan.sharding):
            self._rings = stages, plan.sharding, gradient_rings(plan, self.problem.model, self.problem.cluster)
        return self._rings[2]

    def with_network(self, network: NetworkModel) -> "PlanPricer":
        """The same pricer over another network model; what is known of stages and pipelines they share."""
        other = copy(self)
        other.network = network
        return other

    def forget_plans(self) -> None:
        """Give back what is remembered of pipelines and plans; layers, routes and memory models stay."""
        self._placed.clear()
        self.network.forget()
        self.stages.forget_stages()
        self._rings = None

    # ---------------------------------------------------------------- what searches ask of any pricer

    def tp_group(self, devices: tuple[int, ...]) -> TpGroup:
        """As of `Pricer`."""
        return self.stages.tp_group(devices)

    def stage_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, micro_batch_size: int, policy: str
    ) -> tuple[float, float]:
        """As of `Pricer`."""
        return self.stages.stage_s(tp_group, num_layers, first, last, micro_batch_size, (policy,))

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
        return self.stages.max_layers(tp_group, first, last, micro_batch_size, policy, held, shards)

    def message_s(self, senders: TokenLayout, receivers: TokenLayout, micro_batch_size: int) -> float:
        """As of `Pricer`."""
        return self.stages.message_s(senders, receivers, micro_batch_size)

    def policies(self) -> tuple[str, ...]:
        """As of `Pricer`."""
        return self.stages.policies()

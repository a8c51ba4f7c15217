"""What a step's operations and messages are expected to take: of several orders in which ranks could communicate, the
one in which messages come while ranks compute depends on it. Nothing else does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hexiopt.cost.cost import PipelineCost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import StageOrders
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.operation import Operation, OperationKind
from hexiopt.schedules.schedule import Schedule, operations
from runtime.mapping.layout import Layout, PipelineLayout
from runtime.mapping.lowering import StepShape

ChunkSeconds = tuple[tuple[float, ...], ...]  # of each layer range, by kinds of operations
MessageSeconds = tuple[tuple[float, float], ...]  # of each stage: ahead, and back


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the layer ranges of each stage for a micro-batch, and of a message from it to the next stage and to
    the one before [pipelines][stages].

    Where backwards are split, `orders` has what each stage runs [pipelines][stages]: as the plan is priced.
    """

    chunk_s: tuple[tuple[ChunkSeconds, ...], ...]
    message_s: tuple[MessageSeconds, ...]
    orders: tuple[StageOrders, ...] = ()

    @staticmethod
    def even(layout: Layout, schedule: Schedule) -> "StepTimes":
        """Of balanced pipelines, which take equally long. Where backwards are split, nothing is put off beyond the next
        message: what a backward leaves is computed at once, so that memory is that of whole ones."""
        shapes = [
            StepShape.even(schedule, len(line.stages), line.num_micro_batches, line.num_chunks) for line in layout.lines
        ]
        orders: tuple[StageOrders, ...] = ()
        if schedule.splits:
            orders = tuple(_at_once(line, schedule) for line in layout.lines)
        return StepTimes(tuple(shape.chunk_s for shape in shapes), tuple(shape.message_s for shape in shapes), orders)

    @staticmethod
    def of_plan(problem: Problem, plan: Plan) -> "StepTimes | None":
        """As the cost model has them; None of a plan that it cannot price."""
        pricer = PlanPricer(problem)
        try:
            cost = pricer.price(plan)
        except InputError:
            return None
        return StepTimes(
            tuple(tuple(stage.executors[0].chunk_s for stage in pipeline.stages) for pipeline in cost.pipelines),
            tuple(map(_message_s, cost.pipelines)),
            tuple(pricer.orders(plan)) if plan.schedule.splits else (),
        )

    def to_data(self) -> dict[str, Any]:
        """As plain data, which goes through JSON."""
        orders = [[[(kind.name, *at) for kind, *at in order] for order in stages] for stages in self.orders]
        return {"chunk_s": self.chunk_s, "message_s": self.message_s, "orders": orders}

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> "StepTimes":
        """Those of what `to_data` made."""
        orders = tuple(
            tuple(tuple(Operation(OperationKind[kind], *at) for kind, *at in order) for order in stages)
            for stages in data["orders"]
        )
        return StepTimes(_tuples(data["chunk_s"]), _tuples(data["message_s"]), orders)


def _tuples(data: Any) -> Any:
    return tuple(map(_tuples, data)) if isinstance(data, list | tuple) else data


def _message_s(pipeline: PipelineCost) -> MessageSeconds:
    """The longest message from each stage ahead, and back: a slow link may be one of many."""
    timed = list(zip(pipeline.messages, pipeline.message_s, strict=True))

    def longest_s(stage: int, back: bool) -> float:
        return max((s for message, s in timed if (message.stage, message.backward) == (stage, back)), default=0.0)

    return tuple((longest_s(stage, False), longest_s(stage, True)) for stage in range(len(pipeline.stages)))


def _at_once(line: PipelineLayout, schedule: Schedule) -> StageOrders:
    """Orders of a pipeline's stages in which the gradients of weights follow each backward."""
    orders = []
    for stage, at in zip(line.stages, line.positions(), strict=True):
        order: list[Operation] = []
        for operation in operations(schedule, at):
            first, end = stage[0].chunks[operation.chunk].layers
            is_split = operation.kind is OperationKind.BACKWARD and stage[0].sequence is None
            order += [operation, *[operation._replace(kind=OperationKind.WEIGHTS)] * (is_split * (end - first))]
        orders.append(tuple(order))
    return tuple(orders)

"""What a step's operations and messages are expected to take: of several orders in which ranks could communicate, the
one in which messages come while ranks compute depends on it. Nothing else does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from runtime.mapping.layout import Layout
from runtime.mapping.lowering import StepShape

ChunkSeconds = tuple[tuple[float, ...], ...]  # of each layer range, by kinds of operations


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the layer ranges of each stage for a micro-batch [pipelines][stages], and of a message [pipelines]."""

    chunk_s: tuple[tuple[ChunkSeconds, ...], ...]
    message_s: tuple[float, ...]

    @staticmethod
    def even(layout: Layout, schedule: Schedule) -> "StepTimes":
        """Of balanced pipelines, which take equally long."""
        shapes = [
            StepShape.even(schedule, len(line.stages), line.num_micro_batches, line.num_chunks) for line in layout.lines
        ]
        return StepTimes(tuple(shape.chunk_s for shape in shapes), tuple(shape.message_s for shape in shapes))

    @staticmethod
    def of_ranks(layout: Layout, chunk_s: Mapping[int, ChunkSeconds]) -> "StepTimes":
        """Where the seconds of every rank are known. Messages are taken to be short."""
        found = tuple(tuple(chunk_s[stage[0].ranks[0]] for stage in line.stages) for line in layout.lines)
        return StepTimes(found, tuple(min(one for one, _ in stages[0]) / 2 for stages in found))

    @staticmethod
    def priced(problem: Problem, plan: Plan) -> "StepTimes | None":
        """As the cost model has them; None of a plan that it cannot price."""
        try:
            cost = PlanPricer(problem).price(plan)
        except InputError:
            return None
        return StepTimes(
            tuple(tuple(stage.executors[0].chunk_s for stage in one.stages) for one in cost.pipelines),
            tuple(sum(one.message_s) / max(1, len(one.message_s)) for one in cost.pipelines),
        )

    def numbers(self) -> list[float]:
        """All of them, in a row."""
        return [
            *(s for stages in self.chunk_s for chunks in stages for pair in chunks for s in pair),
            *self.message_s,
        ]

    def replaced(self, numbers: Sequence[float]) -> "StepTimes":
        """Others, in a row, of the same plan."""
        left: Iterator[float] = iter(numbers)
        chunk_s = tuple(
            tuple(tuple((next(left), next(left)) for _ in chunks) for chunks in stages) for stages in self.chunk_s
        )
        return StepTimes(chunk_s, tuple(left))

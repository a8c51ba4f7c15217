"""The parts of the step time, rounded so that the figures shown add up to the step time shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from hexiopt.cost.breakdown import breakdown
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.style import INK, MEMORY_COLOURS, OPTIMIZER_COLOUR, SYNC_COLOUR, mix, seconds_scale

# Compute and recompute in blues, waiting and collectives in warm colours, the end of the step as in the timeline.
_COLOURS = {
    "compute": "#4477AA",
    "recompute": "#6FB7DD",
    "TP collectives": MEMORY_COLOURS["logits"],
    "sequence collectives and waiting": MEMORY_COLOURS["activations"],
    "gathers, scatters and slower holders": MEMORY_COLOURS["buffers"],
    "messages": "#CCAA44",
    "bubble": MEMORY_COLOURS["reserve"],
    "gradient sync": SYNC_COLOUR,
    "optimizer": OPTIMIZER_COLOUR,
    "weight all-gather": mix(SYNC_COLOUR, OPTIMIZER_COLOUR, 0.5),
}


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part of a step: its duration and percentage as text, and its share from 0 to 1."""

    name: str
    duration: str
    percent: str
    share: float

    @property
    def colour(self) -> str:
        """The colour of the part in every report, as #RRGGBB."""
        return _COLOURS.get(self.name, INK)


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a step on the executor that ends last; `executor` names it, as in "stage 2 of pipeline 0"."""

    executor: str
    parts: tuple[StepPart, ...]


def step_parts(problem: Problem, plan: Plan, cost: Cost) -> StepParts:
    """The breakdown of `cost`, the price of `plan`, without the parts that round to nothing.

    Durations have the unit and the digits that `style.seconds` gives the step time, and are rounded so that they sum to
    it; percentages are rounded so that they sum to 100.0.
    """
    spent = breakdown(PlanPricer(problem), plan, cost)
    unit_s, decimals, unit = seconds_scale(cost.step_time_s)
    steps = 10**decimals
    durations = _rounded_to_sum([value for _, value in spent.parts], round(cost.step_time_s / unit_s * steps))
    shown = [
        (name, value, duration) for (name, value), duration in zip(spent.parts, durations, strict=True) if duration
    ]
    permille = _rounded_to_sum([value for _, value, _ in shown], 1000)
    several = len(plan.pipelines[spent.pipeline].stages[spent.stage].parallelism.executors) > 1
    replica = f"replica {spent.executor} of " if several else ""
    return StepParts(
        f"{replica}stage {spent.stage} of pipeline {spent.pipeline}",
        tuple(
            StepPart(name, f"{duration / steps:,.{decimals}f} {unit}", f"{share / 10:.1f}%", value / cost.step_time_s)
            for (name, value, duration), share in zip(shown, permille, strict=True)
        ),
    )


def _rounded_to_sum(values: Sequence[float], total: int) -> list[int]:
    """`values` scaled to whole numbers that sum to `total`; the largest remainders are rounded up."""
    scale = total / sum(values)
    exact = [max(0.0, value * scale) for value in values]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(values)), key=lambda k: whole[k] - exact[k])
    for k in by_remainder[: total - sum(whole)]:
        whole[k] += 1
    return whole

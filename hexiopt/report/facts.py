"""Facts about a plan and its price, each computed once; tables, texts, pages and pictures put them into words."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from hexiopt.bounds import our_model
from hexiopt.cost.breakdown import Breakdown, breakdown
from hexiopt.cost.cost import Cost, StageCost
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.holdings import Holdings
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_groups
from hexiopt.problem.workload import JOINED
from hexiopt.report import style
from hexiopt.simulation.engine import Span
from hexiopt.solving import Pricer

FULL_MEMORY = 0.95
"""Share of the limit above which memory counts as binding."""

_TIE = 1e-3  # stages within this share of the slowest stage's time are slowest too

# Compute and recompute in blues, waiting and collectives in warm colours, the end of the step as in the timeline.
_PART_COLOURS = {
    "compute": "#4477AA",
    "recompute": "#6FB7DD",
    "TP collectives": style.MEMORY_COLOURS["logits"],
    "all-to-alls of experts": style.MEMORY_COLOURS["activations"],
    "sequence collectives and waiting": style.MEMORY_COLOURS["activations"],
    "gathers, scatters and slower holders": style.MEMORY_COLOURS["buffers"],
    "messages": "#CCAA44",
    "bubble": style.MEMORY_COLOURS["reserve"],
    "gradient sync": style.SYNC_COLOUR,
    "optimizer": style.OPTIMIZER_COLOUR,
    "weight all-gather": style.mix(style.SYNC_COLOUR, style.OPTIMIZER_COLOUR, 0.5),
}

MemoryUse = StageCost | ExecutorCost


def is_full(use: MemoryUse) -> bool:
    """Whether memory counts as binding on the fullest device."""
    return use.memory.total > FULL_MEMORY * use.limit_bytes


def memory_of_limit(use: MemoryUse) -> str:
    """The memory of the fullest device and its limit: `23.0 of 23.1 GiB`."""
    return f"{style.gib(use.memory.total)} of {style.gib(use.limit_bytes)} GiB"


def margin(excess_bytes: float) -> str:
    """`0.1 GiB free`, or `0.1 GiB too much`."""
    return f"{style.gib(abs(excess_bytes))} GiB {'free' if excess_bytes <= 0 else 'too much'}"


def largest_parts(use: MemoryUse, most: int) -> str:
    """The largest parts of the memory of the fullest device, at most `most`, in GiB: `activations 8.2, logits 1.0`."""
    parts = sorted(MEMORY_PARTS, key=lambda part: -getattr(use.memory, part))[:most]
    return ", ".join(f"{style.MEMORY_LABELS[part]} {style.gib(getattr(use.memory, part))}" for part in parts)


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage with its price: seconds per micro-batch, and bytes on its fullest device.

    `busy` is the share of the step in which it computes; `send_s` the seconds of its messages to the next stage and
    back, None for the last stage; `binds` what limits the plan there, in words.
    """

    cluster: Cluster
    pipeline: int
    number: int
    stage: Stage
    cost: StageCost
    busy: float
    send_s: float | None
    binds: tuple[str, ...]

    @property
    def name(self) -> str:
        """`2·1`: the numbers of its pipeline and of the stage."""
        return f"{self.pipeline}·{self.number}"

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices, executor by executor."""
        return self.stage.devices

    @property
    def num_layers(self) -> int:
        """The number of layers that it holds."""
        return self.stage.num_layers

    @property
    def place(self) -> str:
        """Its devices and their types, `b:0-3 (rtx_3090)`."""
        return style.place(self.cluster, self.devices)

    def where(self, most: int) -> str:
        """Its devices as ranges, at most `most` ranges."""
        return style.join_names(style.device_ranges(self.cluster, self.devices), most)

    @property
    def gpus(self) -> str:
        """The types of its devices."""
        return style.gpu_names(self.cluster, self.devices)

    @property
    def is_sequence(self) -> bool:
        """Whether it has a sequence layout."""
        return isinstance(self.stage.parallelism, SequenceParallel)

    @property
    def degrees(self) -> str:
        """Its TP degrees, or its sequence layout: `4`, `seq 4+3`."""
        return self.stage.parallelism.degrees

    @property
    def parallelism(self) -> str:
        """`TP 4`, or the sequence layout."""
        return self.degrees if self.is_sequence else f"TP {self.degrees}"

    @property
    def kind(self) -> str:
        """The number and types of its devices, or its sequence layout and types."""
        return f"{self.degrees} {'on' if self.is_sequence else '×'} {self.gpus}"

    @property
    def layers(self) -> str:
        """Its layer ranges; of more than two, their number, the first and the last."""
        ranges = [f"[{first}, {end})" for first, end in self.stage.layers]
        return " ".join(ranges) if len(ranges) <= 2 else f"{len(ranges)}: {ranges[0]} … {ranges[-1]}"

    @property
    def recompute(self) -> str:
        """Its recompute policy; if layers differ, the number of layers with each, in order of appearance; if groups of
        equal length are recomputed together, their length."""
        counts = Counter(self.stage.recompute)
        if counts.keys() == {"full", JOINED} and len(groups := set(recompute_groups(self.stage.recompute))) == 1:
            return f"full by {groups.pop()}"
        return self.stage.policy if len(counts) == 1 else ", ".join(f"{n} {policy}" for policy, n in counts.items())

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward."""
        return self.cost.forward_s + self.cost.backward_s


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
        return _PART_COLOURS.get(self.name, style.INK)


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a step on the executor that ends last; `executor` names it, as in "stage 2 of pipeline 0"."""

    executor: str
    parts: tuple[StepPart, ...]


@dataclass(frozen=True, eq=False)
class PlanFacts:
    """A plan for a problem, and its price.

    `solver` is the plan file's object of that name; `pricer` is the cost model that priced the plan, if at hand.
    """

    problem: Problem
    plan: Plan
    cost: Cost
    solver: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    pricer: Pricer | None = None

    @cached_property
    def model(self) -> PlanPricer:
        """Our cost model of the problem: the caller's, if it is ours."""
        return our_model(self.pricer, self.problem) or PlanPricer(self.problem)

    @property
    def title(self) -> str:
        """The names of model and cluster."""
        return f"{self.problem.model.name} on {self.problem.cluster.name}"

    # Size

    @property
    def num_stages(self) -> int:
        """The number of stages of all pipelines."""
        return sum(len(pipeline.stages) for pipeline in self.plan.pipelines)

    @property
    def used_devices(self) -> str:
        """The number of devices in use, of all devices: `31 of 32`."""
        return f"{len(self.plan.devices()):,} of {self.problem.cluster.num_devices:,}"

    @cached_property
    def unused_devices(self) -> tuple[int, ...]:
        """The cluster's devices that the plan does not use."""
        used = set(self.plan.devices())
        return tuple(device for device in range(self.problem.cluster.num_devices) if device not in used)

    def unused_ranges(self, most: int) -> str:
        """The unused devices as ranges, at most `most` ranges."""
        return style.join_names(style.device_ranges(self.problem.cluster, self.unused_devices), most)

    @property
    def sharding(self) -> str:
        """ZeRO stage and sharding groups, in words."""
        stage, groups = self.plan.sharding.stage, self.plan.sharding.groups
        if not stage:
            return "none"
        within = {"all": "", "machine": " within machines"}.get(groups) if isinstance(groups, str) else None
        return f"ZeRO-{stage}" + (f" within {len(groups)} groups" if within is None else within)

    # Time

    def stages(self, pipeline: int) -> tuple[StageFacts, ...]:
        """The stages of the pipeline of that number."""
        plan, priced = self.plan.pipelines[pipeline], self.cost.pipelines[pipeline]
        times = [stage.forward_s + stage.backward_s for stage in priced.stages]
        slow_s = max(times) * (1 - _TIE)
        uneven = min(times) < slow_s
        sends = [a + b for a, b in zip(priced.send_forward_s, priced.send_backward_s, strict=True)]
        stages = []
        for k, (stage, cost, time_s) in enumerate(zip(plan.stages, priced.stages, times, strict=True)):
            binds = ["slowest"] if uneven and time_s >= slow_s else []
            if cost.excess_bytes > 0:
                binds.insert(0, f"+{style.gib(cost.excess_bytes)} GiB")
            elif is_full(cost):
                binds.insert(0, "memory")
            busy = plan.num_micro_batches * time_s / self.cost.step_time_s
            send_s = sends[k] if k < len(sends) else None
            stages.append(StageFacts(self.problem.cluster, pipeline, k, stage, cost, busy, send_s, tuple(binds)))
        return tuple(stages)

    @property
    def longest(self) -> int:
        """The number of the pipeline that ends last."""
        return max(range(len(self.plan.pipelines)), key=lambda p: self.cost.pipelines[p].end_s)

    @cached_property
    def slowest(self) -> StageFacts:
        """The stage that takes longest in the pipeline that ends last."""
        return max(self.stages(self.longest), key=lambda stage: stage.compute_s)

    @cached_property
    def slowest_message(self) -> StageFacts | None:
        """The stage of the pipeline that ends last whose messages take longest, if longer than the slowest stage."""
        stage = max(self.stages(self.longest), key=lambda stage: stage.send_s or 0.0)
        return stage if (stage.send_s or 0.0) > self.slowest.compute_s else None

    @cached_property
    def step(self) -> StepParts:
        """The parts of the step on the executor that ends last."""
        spent = breakdown(self.model, self.plan, self.cost)
        several = len(self.plan.pipelines[spent.pipeline].stages[spent.stage].parallelism.executors) > 1
        return _step_parts(spent, self.cost.step_time_s, several)

    def spans(self, number: int) -> Iterator[Span]:
        """The operations and messages of the pipeline `number`, in the order in which they end, over the network of the
        pricer; over that of our cost model where the pricer is no `PlanPricer`."""
        pricer = self.pricer if isinstance(self.pricer, PlanPricer) else self.model
        return pricer.spans(self.plan, self.cost, number)

    @cached_property
    def has_gradient_sync(self) -> bool:
        """Whether any gradient has more than one holder: in several pipelines, in a replicated stage or, with tied
        embeddings, in the first and the last stage."""
        return bool(Holdings.of(self.plan.pipelines).shared_groups(self.problem.parameters.trained_groups))

    @property
    def last_phase(self) -> str:
        """The name of the phase after the gradient synchronisation: the optimizer, and the all-gather of weights if the
        optimizer is sharded."""
        gathers = self.plan.sharding.gathers_weights and self.has_gradient_sync
        return "optimizer and weight all-gather" if gathers else "optimizer"

    def bound(self, key: str = "lower_bound_s") -> tuple[float, float] | None:
        """The lower bound in seconds that `solver` states under `key`, and the plan's gap to it.

        None if it states none, or one above the price, as when a plan file has been priced again.
        """
        bound_s = self.solver.get(key)
        if not isinstance(bound_s, int | float) or not 0 < bound_s <= self.cost.step_time_s * (1 + 1e-9):
            return None
        return bound_s, max(0.0, 1 - bound_s / self.cost.step_time_s)

    # Memory

    @cached_property
    def tightest(self) -> StageFacts:
        """The stage with the least free memory."""
        p, s = self.cost.binding_stage()
        return self.stages(p)[s]

    # Money

    @property
    def money(self) -> list[tuple[str, str]]:
        """The price of the machines in use, per step and per trillion tokens, with its label; empty if none is
        stated."""
        per_hour, unpriced = price_per_hour(self.problem, self.plan)
        if per_hour is None:
            return []
        per_s = per_hour / 3600
        without = f" (without {style.count(unpriced, 'machine')} of unknown price)" if unpriced else ""
        trillion = style.amount(per_s / self.cost.tokens_per_s * 1e12)
        step = style.amount(per_s * self.cost.step_time_s)
        return [("price", f"{step} per step, {trillion} per trillion tokens{without}")]


def price_per_hour(problem: Problem, plan: Plan) -> tuple[float | None, int]:
    """The price per hour of the machines that a plan uses (None if none states a price), in their currency, and the
    number of machines that state none."""
    machines = [problem.cluster.machines[m] for m in set(problem.cluster.machine_of[list(plan.devices())].tolist())]
    prices = [machine.price_per_hour for machine in machines if machine.price_per_hour is not None]
    return sum(sorted(prices)) if prices else None, len(machines) - len(prices)


def _step_parts(spent: Breakdown, step_time_s: float, several: bool) -> StepParts:
    """The parts of a step without those that round to nothing; `several`: its stage has several executors.

    Durations have the unit and the digits that `style.seconds` gives the step time, and are rounded so that they sum to
    it; percentages are rounded so that they sum to 100.0.
    """
    unit_s, decimals, unit = style.seconds_scale(step_time_s)
    steps = 10**decimals
    durations = _round_to_sum(list(spent.parts.values()), round(step_time_s / unit_s * steps))
    shown = [(*part, duration) for part, duration in zip(spent.parts.items(), durations, strict=True) if duration]
    permille = _round_to_sum([value for _, value, _ in shown], 1000)
    replica = f"replica {spent.executor} of " if several else ""
    return StepParts(
        f"{replica}stage {spent.stage} of pipeline {spent.pipeline}",
        tuple(
            StepPart(name, f"{duration / steps:,.{decimals}f} {unit}", f"{share / 10:.1f}%", value / step_time_s)
            for (name, value, duration), share in zip(shown, permille, strict=True)
        ),
    )


def _round_to_sum(values: Sequence[float], total: int) -> list[int]:
    """`values` scaled to whole numbers that sum to `total`; the largest remainders are rounded up."""
    scale = total / sum(values)
    exact = [max(0.0, value * scale) for value in values]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(values)), key=lambda k: whole[k] - exact[k])
    for k in by_remainder[: total - sum(whole)]:
        whole[k] += 1
    return whole

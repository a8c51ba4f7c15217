"""What a published system may choose, as data: the rules that its plans obey, column by column.

A plan format and a plan space wider than any of the systems' are given; a rule says what a system's own plans have in
common. Rules are asked about plans that are valid for the problem, and look at nothing else.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields

from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SHARDING_GROUPS
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._plans import RUNS_1F1B, divides_model


@dataclass(frozen=True, slots=True)
class Rule:
    """What all plans of a space have in common. `text` stands in the table, `violation` tells what breaks it."""

    text: str
    violation: str
    holds: Callable[[Problem, Plan], bool]


def _stages(plan: Plan) -> Iterable[Stage]:
    return (stage for pipeline in plan.pipelines for stage in pipeline.stages)


def _positions(plan: Plan) -> Iterable[tuple[Stage, ...]]:
    """The stages at each position of pipelines of equally many stages."""
    return zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)


def _all_alike(values: Iterable[Hashable]) -> bool:
    return len(set(values)) == 1


def _batches(plan: Plan) -> list[int]:
    return [pipeline.num_micro_batches for pipeline in plan.pipelines]


def _batch(pipeline: Pipeline) -> tuple[int, int]:
    return pipeline.num_micro_batches, pipeline.micro_batch_size


def copies_of(stage: Stage) -> tuple[tuple[int, ...], ...]:
    """The TP groups of a stage, those too that share experts."""
    group = stage.parallelism
    if isinstance(group, TensorParallel):
        return group.parameter_copies
    return tuple(replica.devices for replica in group.replicas)


def _degrees(stages: Iterable[Stage]) -> set[int]:
    return {len(devices) for stage in stages for devices in copies_of(stage)}


# What a stage is.
PLAIN_STAGES = Rule(
    "one TP group",
    "a replicated or interleaved stage",
    lambda _, plan: all(len(stage.parallelism.replicas) == 1 == len(stage.layers) for stage in _stages(plan)),
)
INTERLEAVED_STAGES = Rule(
    "one TP group, interleaved",
    "a replicated stage, or one of unequal layer ranges",
    lambda _, plan: all(
        len(stage.parallelism.replicas) == 1 and _all_alike(end - first for first, end in stage.layers)
        for stage in _stages(plan)
    ),
)
REPLICATED_STAGES = Rule(
    "TP groups that share samples",
    "an interleaved stage",
    lambda _, plan: all(stage.parallelism.replicas and len(stage.layers) == 1 for stage in _stages(plan)),
)

# How many stages a pipeline has, and whether pipelines are alike.
ANY_PIPELINES = Rule("any", "", lambda *_: True)
ALIKE = Rule(
    "alike",
    "pipelines of different layers",
    lambda _, plan: _all_alike(tuple(stage.layers for stage in pipeline.stages) for pipeline in plan.pipelines),
)
SINGLE_STAGES = Rule(
    "of one stage",
    "pipeline parallelism",
    lambda _, plan: all(len(pipeline.stages) == 1 for pipeline in plan.pipelines),
)
POWERS_OF_TWO = Rule(
    "alike, a power of two of stages",
    "pipelines of different layers, or a number of stages that is no power of two",
    lambda problem, plan: ALIKE.holds(problem, plan) and len(plan.pipelines[0].stages).bit_count() == 1,
)

# Layers per stage.
ANY_LAYERS = Rule("any", "", lambda *_: True)
EQUAL_LAYERS = Rule(
    "equal within one",
    "unequal layers",
    lambda _, plan: max(s.num_layers for s in _stages(plan)) - min(s.num_layers for s in _stages(plan)) <= 1,
)

# Tensor parallelism.
ANY_TP = Rule("any", "", lambda *_: True)
NO_TP = Rule("none", "tensor parallelism", lambda _, plan: _degrees(_stages(plan)) == {1})
ONE_TP = Rule("one", "unequal TP degrees", lambda _, plan: len(_degrees(_stages(plan))) == 1)
ONE_TP_OF_MODEL = Rule(
    "one, dividing heads and MLP",
    "unequal TP degrees, or one that does not divide heads and MLP columns",
    lambda problem, plan: ONE_TP.holds(problem, plan) and divides_model(problem, *_degrees(_stages(plan))),
)
TP_PER_STAGE = Rule(
    "one a stage",
    "unequal TP degrees in a stage",
    lambda _, plan: all(len(_degrees(stages)) == 1 for stages in _positions(plan)),
)

# Micro-batches.
ANY_BATCHES = Rule("any", "", lambda *_: True)
EQUAL_BATCHES = Rule("equal", "unequal batches", lambda _, plan: _all_alike(map(_batch, plan.pipelines)))
BATCHES_WITHIN_ONE = Rule(
    "equal within one",
    "unequal batches",
    lambda _, plan: (
        _all_alike(pipeline.micro_batch_size for pipeline in plan.pipelines)
        and max(_batches(plan)) - min(_batches(plan)) <= 1
    ),
)

# Recompute.
ONE_POLICY = Rule(
    "one policy",
    "several recompute policies",
    lambda _, plan: _all_alike(policy for stage in _stages(plan) for policy in stage.recompute),
)
ALIKE_RECOMPUTE = Rule(
    "any, alike on all devices",
    "different recompute on different devices",
    lambda _, plan: _all_alike(stage.recompute for stage in _stages(plan)),
)

# Devices.
ANY_DEVICES = Rule("any", "", lambda *_: True)
ALL_DEVICES = Rule("all", "a device left out", lambda problem, plan: set(plan.devices()) == set(problem.usable_devices))

UNSHARDED_OR_ZERO_1 = (Sharding(0), Sharding(1))  # over all holders


@dataclass(frozen=True, slots=True)
class PublishedSpace:
    """What a published system may choose. `schedules` and `sharding` are those that its plans may name."""

    schedules: tuple[Schedule, ...] = RUNS_1F1B
    sharding: tuple[Sharding, ...] = UNSHARDED_OR_ZERO_1
    stages: Rule = PLAIN_STAGES
    pipelines: Rule = ALIKE
    tp: Rule = ONE_TP
    devices: Rule = ANY_DEVICES
    batches: Rule = EQUAL_BATCHES
    recompute: Rule = ONE_POLICY
    layers: Rule = ANY_LAYERS

    def rules(self) -> dict[str, Rule]:
        """The rules by column; those behind may rely on those before."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Rule)}

    def first_violation(self, problem: Problem, plan: Plan) -> str | None:
        """The first rule that `plan`, valid for `problem`, breaks, in words; None if it lies in the space."""
        if plan.schedule not in self.schedules:
            return f"schedule {plan.schedule}"
        if plan.sharding not in self.sharding:
            return f"ZeRO-{plan.sharding.stage} over {plan.sharding.groups} holders"
        return next((rule.violation for rule in self.rules().values() if not rule.holds(problem, plan)), None)

    def row(self) -> dict[str, str]:
        """The space in words, by column."""
        zero, in_machines = (
            ", ".join(str(each.stage) for each in self.sharding if each.groups == groups) for groups in SHARDING_GROUPS
        )
        texts = {name: rule.text for name, rule in self.rules().items()}
        named = {
            "schedules": ", ".join(map(str, self.schedules)),
            "ZeRO": "; in machines ".join(filter(None, (zero, in_machines))),
        }
        return {**named, **{"TP" if name == "tp" else name: text for name, text in texts.items()}}


def markdown_table(spaces: Mapping[str, PublishedSpace]) -> str:
    """Spaces by name as a Markdown table of a row each."""
    rows = [{"baseline": f"`{name}`", **space.row()} for name, space in spaces.items()]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

"""A plan: pipelines of stages of replicas over devices. It holds choices, no costs.

Devices are the cluster's integers; names appear in files only (`plan_file.py`). Every class checks its own rules once,
when it is made; what only a problem can judge is in `check.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import get_args

from hexiopt.checks import whole_in, word_in
from hexiopt.errors import MISSING, FieldError, InputError, quoted
from hexiopt.plan.parallelism import (
    MAX_COUNT,
    ExpertParallel,
    Replica,
    Replicated,
    SequenceParallel,
    StageParallelism,
    TensorParallel,
    make_tuple,
)
from hexiopt.problem.space import SHARDING_GROUPS
from hexiopt.problem.workload import JOINED, LAYER_POLICIES, SHARDING_STAGES
from hexiopt.schedules.depth import broken_depths, other_depths
from hexiopt.schedules.registry import DEFAULT_SCHEDULE
from hexiopt.schedules.schedule import Depths, Schedule

_PARALLELISMS = get_args(StageParallelism)
_POLICIES = frozenset(LAYER_POLICIES)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and how devices work on them: as one TP group, as several, or with a sequence layout.

    `layers` are half-open ranges, one unless interleaved; `recompute` is one policy, or one per layer; of these,
    `joined` is full recompute together with the layer before, whose group keeps its first input alone. `in_flight` is
    the most micro-batches that the stage may have in flight, with None as many as the schedule gives it. All types of
    `parallelism` answer the same questions about how the devices work together. Raises InputError where ranges,
    policies and parallelism do not go together.
    """

    parallelism: StageParallelism
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...] = ("none",)
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.parallelism, _PARALLELISMS):
            what = f"the stage has parallelism {quoted(self.parallelism)}"
            types = "TensorParallel, Replicated, SequenceParallel or ExpertParallel"
            raise InputError(f"{what}; give {types} of hexiopt.plan.parallelism")
        if type(self.layers) is not tuple:
            make_tuple(self, "layers")
        if type(self.recompute) is not tuple:
            if isinstance(self.recompute, str):
                object.__setattr__(self, "recompute", (self.recompute,))
            make_tuple(self, "recompute")
        if self.in_flight is not None and (type(self.in_flight) is not int or not 1 <= self.in_flight <= MAX_COUNT):
            count = whole_in(self.in_flight, "the stage: in_flight", at_least=1, at_most=MAX_COUNT)
            object.__setattr__(self, "in_flight", count)
        if not self.layers:
            raise InputError("the stage has no layer range; give it one")
        for layers in self.layers:
            whole = type(layers) is tuple and len(layers) == 2 and type(layers[0]) is type(layers[1]) is int
            if not whole or not 0 <= layers[0] < layers[1]:
                rule = "is not a range; write [first, end], the end not included and above the first"
                raise FieldError("the stage: layers", layers, rule)
        if len(self.layers) > 1 and isinstance(self.parallelism, SequenceParallel):
            what = f"the stage has a sequence layout and {len(self.layers)} layer ranges"
            raise InputError(f"{what}; give it one range, or interleave stages without")
        if not self.recompute:
            raise FieldError("the stage: recompute", [], f"is empty; choose one of {', '.join(LAYER_POLICIES)}")
        if len(self.recompute) not in (1, self.num_layers):
            what = f"the stage has {len(self.recompute)} recompute policies for {self.num_layers} layers"
            raise InputError(f"{what}; state one, or one for each layer")
        try:
            known = _POLICIES.issuperset(self.recompute)
        except TypeError:  # what has no hash is no policy
            known = False
        if not known:
            for policy in self.recompute:
                word_in(policy, "the stage: recompute", LAYER_POLICIES)
        if JOINED in self.recompute:
            for (first, _), policies in zip(self.layers, self.policies(), strict=True):
                for k, policy in enumerate(policies):
                    if policy == JOINED and (k == 0 or policies[k - 1] not in ("full", JOINED)):
                        what = f"layer {first + k} is joined to {quoted(policies[k - 1]) if k else 'no layer'}"
                        raise InputError(f"{what}; join a layer to one of its range that is full or joined itself")

    @classmethod
    def of(cls, devices: tuple[int, ...], first: int, end: int, recompute: str = "none") -> "Stage":
        """The plain stage: layers [first, end) by tensor parallelism over `devices`."""
        return cls(TensorParallel(devices), ((first, end),), (recompute,))

    @classmethod
    def of_replicas(
        cls, replicas: tuple[Replica, ...], layers: tuple[tuple[int, int], ...], recompute: tuple[str, ...] = ("none",)
    ) -> "Stage":
        """The stage that `replicas` hold: tensor parallel where there is one that states no samples, else replicated.
        Raises InputError as `Replicated` and `Stage`."""
        if len(replicas) == 1 and replicas[0].samples is None:
            return cls(TensorParallel(replicas[0].devices, replicas[0].heads), layers, recompute)
        return cls(Replicated(replicas), layers, recompute)

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device of the stage, executor by executor."""
        executors = self.parallelism.executors
        return executors[0] if len(executors) == 1 else tuple(chain.from_iterable(executors))

    @property
    def tp(self) -> int:
        """Devices of the first executor: the tensor-parallel degree, unless there is a sequence layout."""
        return len(self.parallelism.executors[0])

    @property
    def num_layers(self) -> int:
        """Layers that the stage holds."""
        return sum(end - first for first, end in self.layers)

    @property
    def policy(self) -> str:
        """The recompute policy of a stage that has one for all layers."""
        return self.recompute[0]

    def policies(self) -> tuple[tuple[str, ...], ...]:
        """The recompute policy of every layer, range by range."""
        by_layer = self.recompute * self.num_layers if len(self.recompute) == 1 else self.recompute
        by_range, at = [], 0
        for first, end in self.layers:
            by_range.append(by_layer[at : at + end - first])
            at += end - first
        return tuple(by_range)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, and the pipeline's own share of the batch.

    Raises InputError where counts are below 1, where a stage has other samples or more layer ranges than the pipeline,
    and where layers are not in order, from layer 0 on.
    """

    stages: tuple[Stage, ...]
    num_micro_batches: int
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        if type(self.stages) is not tuple:
            make_tuple(self, "stages")
        if not self.stages:
            raise InputError("the pipeline has no stage; give it at least one")
        count, size = self.num_micro_batches, self.micro_batch_size
        if not type(count) is type(size) is int or not (1 <= count <= MAX_COUNT and 1 <= size <= MAX_COUNT):
            for name in ("num_micro_batches", "micro_batch_size"):
                value = whole_in(getattr(self, name), f"the pipeline: {name}", at_least=1, at_most=MAX_COUNT)
                object.__setattr__(self, name, value)
            size = self.micro_batch_size
        at, chunks = 0, 0
        for s, stage in enumerate(self.stages):
            if not isinstance(stage, Stage):
                raise InputError(f"stage {s} is {quoted(stage)}, not a Stage; give Stage(parallelism, layers)")
            if len(stage.layers) != (chunks := chunks or len(stage.layers)):
                what = f"stage {s} has {len(stage.layers)} layer ranges, stage 0 has {chunks}"
                raise InputError(f"{what}; give all stages equally many")
            if stage.parallelism.num_samples not in (None, size):
                split = " + ".join(map(str, stage.parallelism.samples(size)))
                what = f"stage {s} splits micro-batches of {size} sequences into {split}"
                raise InputError(f"{what}; the samples of its replicas must sum to {size}")
            if isinstance(stage.parallelism, TensorParallel) and size % stage.parallelism.num_replicas:
                what = f"stage {s} has {stage.parallelism.num_replicas} replicas that share experts"
                raise InputError(f"{what}; they divide a micro-batch evenly, state a multiple of that, not {size}")
        for chunk in range(chunks):
            for s, stage in enumerate(self.stages):
                first, end = stage.layers[chunk]
                if first != at:
                    what = f"stage {s} holds layers [{first}, {end}) where layer {at} is next"
                    raise InputError(f"{what}; each stage goes on where the one before it ends, the first from layer 0")
                at = end

    def resize(self, size: int) -> "Pipeline | None":
        """The pipeline with micro-batches of another size in sequences, which replicas share in the same proportion;
        None where these would be no whole numbers of samples."""
        stages, now = [], self.micro_batch_size
        for stage in self.stages:
            if isinstance(stage.parallelism, TensorParallel) and size % stage.parallelism.num_replicas:
                return None
            parallelism = stage.parallelism
            if isinstance(parallelism, Replicated | ExpertParallel):
                shares = [divmod(samples * size, now) for samples in parallelism.shares]
                if any(rest or bool(n) != bool(s) for s, (n, rest) in zip(parallelism.shares, shares, strict=True)):
                    return None
                stage = replace(stage, parallelism=parallelism.with_shares([n for n, _ in shares]))
            stages.append(stage)
        return replace(self, stages=tuple(stages), micro_batch_size=size)

    def with_micro_batches(self, count: int) -> "Pipeline":
        """The pipeline with so many micro-batches, of which no stage has more in flight."""
        stages = self.stages
        if any(depth is not None and depth > count for depth in self.depths):
            stages = tuple(
                [s if s.in_flight is None else replace(s, in_flight=min(s.in_flight, count)) for s in stages]
            )
        return replace(self, stages=stages, num_micro_batches=count)

    @property
    def num_sequences(self) -> int:
        """Sequences of the global batch that this pipeline processes."""
        return self.num_micro_batches * self.micro_batch_size

    @property
    def num_layers(self) -> int:
        """Layers that all stages hold together."""
        return self.stages[-1].layers[-1][1]

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage: more than one where the pipeline is interleaved."""
        return len(self.stages[0].layers)

    @property
    def depths(self) -> Depths:
        """What the stages state of micro-batches in flight; empty where none states anything."""
        depths = tuple([stage.in_flight for stage in self.stages])
        return depths if any(depths) else ()


@dataclass(frozen=True, slots=True)
class Sharding:
    """ZeRO stage 0 to 3, over all holders of a parameter (`all`), those in a machine (`machine`), or stated groups of
    devices. Raises InputError for other values."""

    stage: int = 0
    groups: str | tuple[tuple[int, ...], ...] = "all"

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in SHARDING_STAGES:
            object.__setattr__(self, "stage", whole_in(self.stage, "sharding: stage", at_least=0, at_most=3))
        if isinstance(self.groups, str):
            word_in(self.groups, "sharding: groups", SHARDING_GROUPS)
        else:
            rule = f"sharding groups are {quoted(self.groups)}; choose all, machine or lists of devices"
            try:
                object.__setattr__(self, "groups", tuple([tuple(group) for group in self.groups]))
            except TypeError:
                raise InputError(rule) from None
            if any(type(device) is not int for group in self.groups for device in group):
                raise InputError(f"{rule} by their numbers in the cluster")

    @property
    def gathers_weights(self) -> bool:
        """Whether sharded weights are gathered once a step: ZeRO-3 gathers them layer by layer."""
        return self.stage in (1, 2)

    def broken_rule(
        self, pipelines: Sequence[Pipeline], schedule: Schedule, name: Callable[[int], str] = str
    ) -> str | None:
        """The first rule of the sharding that `pipelines` under `schedule` break, in words, devices by `name`; or None.

        Stated groups divide the devices. ZeRO-2 and 3 gather and scatter layer by layer in every micro-batch, so that
        all holders of a layer must hold the same layers and take their turns together.
        """
        if not isinstance(self.groups, str):
            listed = Counter(device for group in self.groups for device in group)
            for device in (d for pipeline in pipelines for stage in pipeline.stages for d in stage.devices):
                if listed[device] != 1:
                    return f"device {name(device)} is in {listed[device]} sharding groups; put it into exactly one"
        uneven = any(isinstance(stage.parallelism, ExpertParallel) for line in pipelines for stage in line.stages)
        if uneven and self.stage and self.groups != "all":
            return "sharding groups over stages that share experts unevenly; take groups: all"
        if self.stage < 2:
            return None
        if uneven:
            return f"ZeRO-{self.stage} over stages that share experts unevenly; take ZeRO-1"
        if not schedule.lockstep:
            return f"ZeRO-{self.stage} under the {schedule} schedule; take 1f1b or gpipe"
        if any(pipeline.depths for pipeline in pipelines):
            return f"ZeRO-{self.stage} over stages that state in_flight; leave it out"
        if any(JOINED in stage.recompute for pipeline in pipelines for stage in pipeline.stages):
            return f"ZeRO-{self.stage} over layers recomputed together; recompute each by itself"
        if len({len(pipeline.stages) for pipeline in pipelines}) > 1:
            return f"ZeRO-{self.stage} over pipelines of unequally many stages; give all as many"
        if len({pipeline.num_micro_batches for pipeline in pipelines}) > 1:
            return f"ZeRO-{self.stage} over pipelines of unequally many micro-batches; give all as many"
        for s, stages in enumerate(zip(*(pipeline.stages for pipeline in pipelines), strict=True)):
            if len({stage.layers for stage in stages}) > 1:
                return f"ZeRO-{self.stage} over pipelines with unequal layers in stage {s}; give all the same"
            # Each device of a sequence layout holds whole layers, as with TP 1.
            if len({len(devices) for stage in stages for devices in stage.parallelism.parameter_copies}) > 1:
                return f"ZeRO-{self.stage} over pipelines with unequal TP degrees in stage {s}; give all the same"
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """Pipelines, and what is chosen once for all of them.

    Raises InputError where there is no pipeline, where the schedule is only a name, where a device is used twice or
    pipelines hold different layers, and where they break a rule of the schedule or of the sharding.
    """

    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = DEFAULT_SCHEDULE
    sharding: Sharding = field(default_factory=Sharding)

    def __post_init__(self) -> None:
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            raise InputError(
                f"plan: schedule: {quoted(schedule)} is not a schedule; give one of hexiopt.schedules.registry"
            )
        if not isinstance(self.sharding, Sharding):
            raise InputError(f"plan: sharding: {quoted(self.sharding)} is not a Sharding; give Sharding(stage, groups)")
        if type(self.pipelines) is not tuple:
            make_tuple(self, "pipelines")
        for p, pipeline in enumerate(self.pipelines):
            if not isinstance(pipeline, Pipeline):
                raise InputError(
                    f"plan: pipelines[{p}]: {quoted(pipeline)} is not a Pipeline; give Pipeline(stages, ...)"
                )
        wrong = broken_rule(self.pipelines, schedule, self.sharding)
        if wrong is not None:

            def rule(name: Callable[[int], str]) -> str:
                return (broken_rule(self.pipelines, schedule, self.sharding, name) or wrong)[1]

            raise FieldError(f"plan: {wrong[0]}", MISSING if self.pipelines else [], rule, str)

    @property
    def has_tensor_parallelism(self) -> bool:
        """Whether a TP group has several devices."""
        stages = [stage for pipeline in self.pipelines for stage in pipeline.stages]
        return any(len(replica.devices) > 1 for stage in stages for replica in stage.parallelism.replicas)

    @property
    def joins_layers(self) -> bool:
        """Whether layers are recomputed together."""
        return any(JOINED in stage.recompute for pipeline in self.pipelines for stage in pipeline.stages)

    def other_depths(self) -> Iterator[tuple[int, int]]:
        """The stages, as (pipeline, stage), that have more or fewer micro-batches in flight than the schedule has."""
        for p, pipeline in enumerate(self.pipelines):
            for s in other_depths(self.schedule, len(pipeline.stages), pipeline.num_micro_batches, pipeline.depths):
                yield p, s

    def devices(self) -> tuple[int, ...]:
        """All devices used, in the order of the plan."""
        return tuple(d for p in self.pipelines for s in p.stages for d in s.devices)


def broken_rule(
    pipelines: Sequence[Pipeline], schedule: Schedule, sharding: Sharding, name: Callable[[int], str] = str
) -> tuple[str, str] | None:
    """The first rule that keeps `pipelines` from being a plan: the field at fault, and what is wrong, in words with
    devices by `name` and a remedy; None if there is none.
    """
    if not pipelines:
        return "pipelines", "is empty; a plan has at least one pipeline"
    num_layers = pipelines[0].num_layers
    for p, pipeline in enumerate(pipelines):
        wrong = schedule.broken_rule(len(pipeline.stages), pipeline.num_chunks, pipeline.num_micro_batches)
        wrong = wrong or broken_depths(schedule, len(pipeline.stages), pipeline.num_micro_batches, pipeline.depths)
        if wrong is not None:
            return f"pipelines[{p}]", wrong
        if pipeline.num_layers != num_layers:
            what = f"{pipeline.num_layers} layers, where the first pipeline has {num_layers}"
            return f"pipelines[{p}]", f"{what}; each holds all layers of the model"
    executors = [
        devices for pipeline in pipelines for stage in pipeline.stages for devices in stage.parallelism.executors
    ]
    used = set().union(*executors)
    if len(used) != sum(map(len, executors)):
        device, times = Counter(chain.from_iterable(executors)).most_common(1)[0]
        return "pipelines", f"device {name(device)} is used {times} times; give each device one place in the plan"
    wrong = sharding.broken_rule(pipelines, schedule, name)
    return None if wrong is None else ("sharding", wrong)


def feature_without_price(pipeline: Pipeline) -> str | None:
    """What `pipeline` has that files and runs know but nothing prices, in words, with a remedy; None for nothing."""
    for s, stage in enumerate(pipeline.stages):
        groups = (stage.parallelism,) if isinstance(stage.parallelism, TensorParallel) else stage.parallelism.replicas
        if any(group.heads is not None for group in groups):
            return f"stage {s} states the heads of a TP group, which are not priced yet; leave out `heads`"
    return None

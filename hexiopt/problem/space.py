"""The plan space, defined once for solvers, oracles, checks and bounds.

Tensor parallelism stays inside one machine and one GPU type. A stage holds consecutive layers or, where the schedule is
interleaved, several ranges (chunks) of nearly equal length. A stage may have replicas, which share the samples of each
micro-batch. Pipelines have any structure and any number of micro-batches, and one micro-batch size each. Every stage
has its own recompute policy, or two, the one that stores less on its first layers. Sharding groups are all holders or
those of a machine. Devices may stay unused. Switches remove freedoms, for ablations and rivals; five add one:
with `sequence`, a stage may have a sequence layout instead of tensor parallelism (`hexiopt/plan/token_layout.py`) over
devices of any machines and types, with one recompute policy; with `uneven_chunks`, the ranges of a stage may have any
lengths; with `split_backward`, backwards may be split where the workload leaves the schedule open; with `depth`, a
stage may have more or fewer micro-batches in flight than its schedule has; with `uneven_experts`, replicas of a stage
on any machines and types may share the experts of its layers in any numbers, and devices may hold experts alone. Where
one of them is on, oracles decline, and with one of the first two or the last only the compute bound holds for the whole
space.

Other policies per layer, layers recomputed together (`joined`) and stated sharding groups can be priced and checked
too, but searches do not make them, and no bound or proof speaks of plans that have them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, combinations, pairwise

from hexiopt.checks import flag_in, list_in, number_in, whole_in, word_in
from hexiopt.errors import FieldError
from hexiopt.problem.workload import AUTO, JOINED, RECOMPUTE_POLICIES, SHARDING_STAGES, Workload
from hexiopt.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES, schedule_by_name
from hexiopt.schedules.schedule import Schedule
from hexiopt.value import Value

SHARDING_GROUPS = ("all", "machine")

Recompute = tuple[str, ...]  # of a stage: one policy, or one per layer
LayerRanges = tuple[tuple[int, int], ...]  # of a stage: half open, in the order of the model


@dataclass(frozen=True, repr=False)
class Space(Value):
    """The freedoms of a plan.

    `tp_degrees` is `powers_of_two` or `all`, up to the machine's size. `max_micro_batch_size` bounds the
    micro-batch sizes 1, 2, 4, ..., `max_chunks` the layer ranges of an interleaved stage. Each switch, if False, adds a
    restriction: `uneven_layers`, the stages of a pipeline have equally many layers (within one); `uneven_tp`, all
    stages have one TP degree; `uneven_batch`, all pipelines have equally many sequences (within one micro-batch);
    `uneven_structure`, all pipelines have the same TP degrees and layers; `recompute_per_stage`, all stages have one
    recompute policy; `recompute_per_layer`, all layers of a stage have one; `replicas`, no stage is replicated;
    `batch_remainder`, pipelines that must be even have exactly as many sequences; `machine_sharding`, sharding groups
    are all holders. `sequence`, if True, allows sequence layouts, `uneven_chunks` stages whose layer ranges differ in
    length by more than one layer, or of which a later one is longer, `split_backward` schedules that compute gradients
    of weights later than those of inputs (`zb`, `zb_interleaved`), where the workload does not state one, `depth`
    stages that have other numbers of micro-batches in flight than their schedule has, `uneven_experts` stages whose
    replicas share experts (`ExpertParallel`).
    `num_pipelines`, `num_stages` and `max_tp` are the user's constraints (None: no constraint); `exclude` names
    machines or devices (`machine:index`) to leave unused; `memory_headroom` is the share, 0 to 0.5, of the memory that
    a process can allocate on a GPU which plans must leave free, beyond the reserve that the memory model counts.
    Raises InputError where a value breaks its rule.
    """

    tp_degrees: str = "powers_of_two"
    max_micro_batch_size: int = 16
    max_chunks: int = 8
    replicas: bool = True
    uneven_layers: bool = True
    uneven_tp: bool = True
    uneven_batch: bool = True
    uneven_structure: bool = True
    recompute_per_stage: bool = True
    recompute_per_layer: bool = True
    batch_remainder: bool = True
    machine_sharding: bool = True
    sequence: bool = False
    uneven_chunks: bool = False
    split_backward: bool = False
    depth: bool = False
    uneven_experts: bool = False
    num_pipelines: int | None = None
    num_stages: int | None = None
    max_tp: int | None = None
    exclude: tuple[str, ...] = ()
    memory_headroom: float = 0.0

    def __post_init__(self) -> None:
        word_in(self.tp_degrees, "space: tp_degrees", ("powers_of_two", "all"))
        for name in (*SWITCHES, *EXACT_SWITCHES, *MORE_FREEDOMS):
            flag_in(getattr(self, name), f"space: {name}")
        for name in ("max_micro_batch_size", "max_chunks"):
            value = whole_in(getattr(self, name), f"space: {name}", at_least=1, at_most=1024)
            object.__setattr__(self, name, value)
        for name in ("num_pipelines", "num_stages", "max_tp"):
            if (bound := getattr(self, name)) is not None:
                value = whole_in(bound, f"constraints: {name}", at_least=1, at_most=10**6)
                object.__setattr__(self, name, value)
        object.__setattr__(self, "exclude", tuple(list_in(self.exclude, "constraints: exclude")))
        for k, excluded in enumerate(self.exclude):
            if not isinstance(excluded, str) or not excluded:
                rule = "is not a name; write a machine, or one device as machine:index"
                raise FieldError(f"constraints: exclude[{k}]", excluded, rule)
        headroom = number_in(self.memory_headroom, "constraints: memory_headroom", at_least=0.0, at_most=0.5)
        object.__setattr__(self, "memory_headroom", headroom)

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Space({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"

    def allowed_tp(self, num_gpus: int) -> tuple[int, ...]:
        """TP degrees in a machine of `num_gpus` devices, ascending."""
        top = min(num_gpus, self.max_tp or num_gpus)
        degrees = range(1, top + 1)
        if self.tp_degrees == "all":
            return tuple(degrees)
        return tuple(t for t in degrees if t & (t - 1) == 0)

    def micro_batch_sizes(self, global_batch: int) -> tuple[int, ...]:
        """Micro-batch sizes 1, 2, 4, ... in sequences, up to the limit and the global batch."""
        top = min(self.max_micro_batch_size, global_batch)
        return tuple(1 << k for k in range(top.bit_length()) if 1 << k <= top)


def layer_ranges(counts: Sequence[int], chunks: int) -> list[LayerRanges]:
    """The layer ranges of stages that hold `counts` layers in `chunks` ranges each, interleaved.

    A stage's layers are divided as equally as possible, longer ranges first.
    """
    parts = [length for turn in zip(*(range_lengths(n, chunks) for n in counts), strict=True) for length in turn]
    return list(ranges_of(parts, len(counts)))


def ranges_of(parts: Sequence[int], num_stages: int) -> tuple[LayerRanges, ...]:
    """The layer ranges of each stage, where virtual stage i holds `parts[i]` layers and belongs to stage i mod S."""
    ends = [0, *accumulate(parts)]
    return tuple(tuple((ends[k], ends[k + 1]) for k in range(s, len(parts), num_stages)) for s in range(num_stages))


def with_equal_chunks(ranges: Sequence[LayerRanges]) -> list[LayerRanges]:
    """The `layer_ranges` of stages with the same numbers of layers and of ranges as `ranges`."""
    return layer_ranges([sum(end - first for first, end in stage_ranges) for stage_ranges in ranges], len(ranges[0]))


def range_lengths(count: int, chunks: int) -> list[int]:
    """The number of layers of each of `chunks` ranges of a stage that holds `count` layers."""
    return [count // chunks + (c < count % chunks) for c in range(chunks)]


def recompute_groups(policies: Sequence[str]) -> list[int]:
    """The lengths of the groups of layers that are recomputed together: a layer, and the layers `joined` to it."""
    lengths: list[int] = []
    for policy in policies:
        if policy == JOINED:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def recompute_policies(workload: Workload) -> tuple[str, ...]:
    """The recompute policies that a stage may have."""
    return RECOMPUTE_POLICIES if workload.recompute == AUTO else (workload.recompute,)


def recompute_first(smaller: str, num_smaller: int, faster: str, num_layers: int) -> Recompute:
    """The policies of a stage's layers, `smaller` for the first `num_smaller`; a single policy where all are equal."""
    if smaller == faster or not num_smaller:
        return (faster,)
    return (smaller,) * num_smaller + (faster,) * (num_layers - num_smaller) if num_smaller < num_layers else (smaller,)


def recompute_chains(policies: Sequence[str], num_layers: int, per_layer: bool) -> tuple[tuple[Recompute, ...], ...]:
    """All recompute choices of a stage of `num_layers`; `policies` range from the fastest to the one storing least.

    From one element of a chain to the next, one more layer (without `per_layer`, every layer) has the next policy.
    """
    if not per_layer or num_layers == 1:
        return (tuple((policy,) for policy in policies),)
    chains = [policies, *(skipped for skipped in combinations(policies, 2) if skipped not in set(pairwise(policies)))]
    return tuple(
        (
            (chain[0],),
            *(
                recompute_first(smaller, n, faster, num_layers)
                for faster, smaller in pairwise(chain)
                for n in range(1, num_layers + 1)
            ),
        )
        for chain in chains
    )


def schedules(workload: Workload) -> tuple[Schedule, ...]:
    """The schedules that a plan may have where backwards are whole unless the workload states otherwise
    (`Problem.schedules`)."""
    return SCHEDULES if workload.schedule == AUTO else (schedule_by_name(workload.schedule),)


def default_schedule(workload: Workload) -> Schedule:
    """The schedule of pipelines whose stages hold one layer range each: 1F1B, unless the workload fixes another.

    It is interleaved only where that is fixed, since with one range per stage that equals 1F1B.
    """
    return DEFAULT_SCHEDULE if workload.schedule == AUTO else schedule_by_name(workload.schedule)


def sharding_stages(workload: Workload) -> tuple[int, ...]:
    """The ZeRO stages that a plan may have; from ZeRO-2 on, pipelines must be aligned (see `Sharding`)."""
    if workload.optimizer_sharding == AUTO:
        deep = not workload.sums_quantized and any(schedule.lockstep for schedule in schedules(workload))
        return SHARDING_STAGES[: min(3 if deep else 1, workload.most_sharding) + 1]
    return (int(workload.optimizer_sharding),)


SWITCHES = (
    "replicas",
    "uneven_layers",
    "uneven_tp",
    "uneven_batch",
    "uneven_structure",
    "recompute_per_stage",
    "recompute_per_layer",
)
"""Freedoms that make plans asymmetric."""

EXACT_SWITCHES = ("batch_remainder", "machine_sharding")
"""Further freedoms that other systems' formats lack; searches refuse problems that exclude them."""

MORE_FREEDOMS = ("sequence", "uneven_chunks", "split_backward", "depth", "uneven_experts")
"""Freedoms that are off by default: no proof covers them, and of the first two and the last no bound but that of
compute."""

BOUNDS = ("num_pipelines", "num_stages", "max_tp", "exclude", "memory_headroom")

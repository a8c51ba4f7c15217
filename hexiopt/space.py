"""The plan space, stated once: solvers, oracle, check and bounds ask here what a plan may be.

Tensor parallelism stays inside one machine and one GPU type; a stage holds consecutive layers; pipelines have any
structure and any number of micro-batches; a pipeline has one micro-batch size; every stage has its own recompute
policy; devices may stay unused. Switches take freedoms away, for ablations and rivals.
"""

from dataclasses import dataclass, fields
from typing import Any

from hexiopt.errors import InputError, closest
from hexiopt.reading import Section, as_mapping
from hexiopt.workload import AUTO, PRICED_SCHEDULES, PRICED_SHARDING_STAGES, RECOMPUTE_POLICIES, Workload


@dataclass(frozen=True)
class Space:
    """Which freedoms a plan has.

    `tp_degrees` is `powers_of_two` or `all`, up to the machine's size. `max_micro_batch_size` bounds the
    micro-batch sizes 1, 2, 4, ... A freedom set to False binds: `uneven_layers`, equal layers in the stages of
    a pipeline (within one); `uneven_tp`, one TP degree for all stages; `uneven_batch`, equally many sequences
    for all pipelines (within one micro-batch); `uneven_structure`, the same TP degrees and layers in all
    pipelines; `recompute_per_stage`, one recompute policy for all stages; `replicas`, no replicated stages.
    `num_pipelines`, `num_stages` and `max_tp` bind from outside (None leaves free); `exclude` names machines or
    devices (`machine:index`) to leave unused.
    """

    tp_degrees: str = "powers_of_two"
    max_micro_batch_size: int = 16
    replicas: bool = True
    uneven_layers: bool = True
    uneven_tp: bool = True
    uneven_batch: bool = True
    uneven_structure: bool = True
    recompute_per_stage: bool = True
    num_pipelines: int | None = None
    num_stages: int | None = None
    max_tp: int | None = None
    exclude: tuple[str, ...] = ()

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


def recompute_policies(workload: Workload) -> tuple[str, ...]:
    """The recompute policies that a stage may have."""
    return RECOMPUTE_POLICIES if workload.recompute == AUTO else (workload.recompute,)


def schedules(workload: Workload) -> tuple[str, ...]:
    """The schedules that a plan may have."""
    return PRICED_SCHEDULES if workload.schedule == AUTO else (workload.schedule,)


def sharding_stages(workload: Workload) -> tuple[int, ...]:
    """The ZeRO stages that a plan may have."""
    if workload.optimizer_sharding == AUTO:
        return PRICED_SHARDING_STAGES
    return (int(workload.optimizer_sharding),)


SWITCHES = (
    "replicas",
    "uneven_layers",
    "uneven_tp",
    "uneven_batch",
    "uneven_structure",
    "recompute_per_stage",
)


_BOUNDS = ("num_pipelines", "num_stages", "max_tp", "exclude")


def space_from_sections(space: Section, constraints: Section) -> Space:
    """The plan space of the `space` and `constraints` mappings of the command line. Raises InputError."""

    def whole(key: str) -> Any:
        return constraints.integer(key, at_least=1, at_most=10**6, default=None)

    result = Space(
        tp_degrees=space.text("tp_degrees", choices=("powers_of_two", "all"), default="powers_of_two"),
        max_micro_batch_size=space.integer("max_micro_batch_size", at_least=1, at_most=1024, default=16),
        **{name: space.flag(name, True) for name in SWITCHES},
        num_pipelines=whole("num_pipelines"),
        num_stages=whole("num_stages"),
        max_tp=whole("max_tp"),
        exclude=tuple(
            constraints.each(
                "exclude",
                lambda name: isinstance(name, str) and bool(name),
                "is not a name; write a machine, or one device as machine:index",
                optional=True,
            )
        ),
    )
    space.done()
    constraints.done()
    return result


def space_to_dict(space: Space) -> dict[str, Any]:
    """All fields of the space, as plain data."""
    data = {field.name: getattr(space, field.name) for field in fields(space)}
    return data | {"exclude": list(space.exclude)}


def space_from_dict(data: Any, where: str) -> Space:
    """The space that `space_to_dict` wrote. Raises InputError."""
    whole = as_mapping(data, where)
    known = {field.name for field in fields(Space)}
    for key in whole:
        if key not in known:
            raise InputError(f"{where}.{key}: unknown key; {closest(key, known)}")
    bounds = {key: whole[key] for key in _BOUNDS if whole.get(key) is not None}
    freedoms = {key: value for key, value in whole.items() if key not in _BOUNDS}
    return space_from_sections(Section(freedoms, where), Section(bounds, where))

"""The schemas of the command line's configurations, one a verb: the keys that it reads, with their types and ranges.

`cluster` and `model` are free mappings, checked by their own readers. Everything else is typed here: Hydra refuses
`seed=abc` when it composes the configuration, as it does keys that the verb does not read, and `__post_init__` checks
ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from experiments.app.verb_config import (
    CHOICES,
    BoundConfig,
    CollectConfig,
    CompareConfig,
    DiscoverConfig,
    EmulateConfig,
    ExportConfig,
    FitConfig,
    PageConfig,
    ProfileConfig,
    ReplanConfig,
    SweepConfig,
    TrainConfig,
    ValidateConfig,
    WhatIfConfig,
    node_of,
)
from hexiopt.errors import InputError, did_you_mean
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.problem_file import space_from_sections, workload_from_section
from hexiopt.problem.lora import Lora
from hexiopt.problem.space import BOUNDS, Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.solving import MAX_SEED, MAX_STEPS, MAX_TIME_LIMIT_S

_FREEDOMS = {freedom.name for freedom in fields(Space)} - {*BOUNDS}
_PROBLEM = ("cluster", "gpus", "network", "model", "workload", "space", "constraints")
_SEARCH = (*_PROBLEM, "solver", "seed")
_PRICED = (*_SEARCH, "pricer")
READS: Mapping[str, tuple[str, ...]] = {
    "plan": (*_PRICED, "bound", "report", "print", "alone", "sweep"),
    "compare": (*_PRICED, "bound", "compare", "report", "sweep"),
    "fit": (*_PRICED, "fit", "print", "sweep"),
    "page": ("page", "sweep"),
    "whatif": (*_PRICED, "bound", "whatif", "report", "sweep"),
    "price": ("plan", "cluster", "workload", "constraints.memory_headroom", "print", "sweep"),
    "replan": (
        *("plan", "lost", "slow", "added", "cluster", "workload", "space", "constraints", "solver", "seed"),
        *("replan", "report", "print", "sweep"),
    ),
    "train": ("plan", *_SEARCH, "train", "replan", "report", "print", "sweep"),
    "emulate": ("plan", *_SEARCH, "emulate", "report", "sweep"),
    "export": ("plan", "export", "sweep"),
    "import": ("file", "format", "ranks", *_SEARCH, "report", "print", "sweep"),
    "explain": ("plan", *_SEARCH, "print", "sweep"),
    "validate": ("data", "validate", "report", "sweep"),
    "calibrate": ("data", "run", "plan", "sweep"),
    "profile": ("profile", "sweep"),
    "discover": ("discover", "sweep"),
    "collect": ("collect", "report", "sweep"),
}
"""The keys of `Config` that each verb reads, with all keys below them: its schema."""
_SHAPES: Mapping[str, tuple[Any, str]] = {
    "run": (str | Sequence, "no run; write a folder of hexiopt train, a log, or a list of them"),
    "slow": (str | Mapping, "no speeds; write {machine:index: 0.7}, or the folder of a run"),
    "added": (str | Mapping | Sequence, "no machines; write a file, or a list as in the cluster file"),
}


@dataclass
class LoraConfig(node_of(Lora, {key.name for key in fields(Lora)} - {"targets"})):  # type: ignore[misc]
    """The fields of `hexiopt.problem.lora.Lora`; `targets` is a word or a list."""

    targets: Any = Lora.targets


@dataclass
class WorkloadConfig(node_of(Workload, {key.name for key in fields(Workload)} - {"lora"})):  # type: ignore[misc]
    """The fields of `hexiopt.problem.workload.Workload`."""

    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        self.workload()

    def workload(self) -> Workload:
        """The workload. Raises InputError."""
        return workload_from_section(Section(asdict(self), "workload"))


@dataclass
class SolverConfig:
    """The solver, and its budget: `time_limit_s` seconds and, if stated, `max_steps` of its own steps.

    `solver_config.py` derives a schema for each solver, which adds the solver's parameters.
    """

    name: str = MISSING
    time_limit_s: float = 10.0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        section = Section(asdict(self), "solver")
        section.number("time_limit_s", above=0, at_most=MAX_TIME_LIMIT_S)
        section.integer("max_steps", at_least=1, at_most=MAX_STEPS, default=None)

    def options(self) -> dict[str, Any]:
        """The solver's parameters that differ from their defaults, as `solvers.registry.make_solver` takes them."""
        parameters = {key.name: _default(key) for key in fields(self)}
        values = {name: getattr(self, name) for name in parameters if name not in ("name", "time_limit_s", "max_steps")}
        return {name: value for name, value in values.items() if value != parameters[name]}


def _default(parameter: Field[Any]) -> Any:
    factory = parameter.default_factory  # `MISSING` is another object in a process that got the class by pickle
    return factory() if callable(factory) else parameter.default


@dataclass
class SpaceConfig(node_of(Space, _FREEDOMS)):  # type: ignore[misc]
    """The freedoms of the plan space: fields of `hexiopt.problem.space.Space`.

    `preset` is the name of a trainer (docs/exports.md): it sets the switches under which plans can be exported to it.
    """

    preset: str | None = None

    def __post_init__(self) -> None:
        self.section()

    def section(self) -> Section:
        """The mapping that `Space` is made of. Raises InputError."""
        values = asdict(self)
        Section({"preset": values.pop("preset")}, "space").text("preset", choices=TRAINERS, default=None)
        space_from_sections(Section(values, "space"), Section({}, "constraints"))
        return Section(values, "space")


@dataclass
class ConstraintsConfig(node_of(Space, BOUNDS)):  # type: ignore[misc]
    """The constraints on a plan, also fields of `Space`: null, [] and a headroom of 0 mean none.

    `exclude` names machines or devices.
    """

    def __post_init__(self) -> None:
        space_from_sections(Section({}, "space"), Section(asdict(self), "constraints"))


class Keys:
    """What the schemas of all verbs can do."""

    verb: ClassVar[str] = ""
    space: SpaceConfig
    constraints: ConstraintsConfig

    def __post_init__(self) -> None:
        for key in fields(self):  # type: ignore[arg-type]
            _check(key.name, getattr(self, key.name), self.verb)

    def plan_space(self) -> Space:
        """The plan space, of a verb that reads it. Raises InputError."""
        return space_from_sections(self.space.section(), Section(asdict(self.constraints), "constraints"))


def _check(key: str, value: Any, verb: str) -> None:
    if key == "format":
        Section({key: value}, "import").text(key, choices=CHOICES[key], default=None)
    elif key in _SHAPES and not (value is None or isinstance(value, _SHAPES[key][0])):
        raise InputError(f"{key}: {value!r} is {_SHAPES[key][1]}")
    elif key == "seed" and not 0 <= value <= MAX_SEED:
        raise InputError(f"seed: {value} is out of range; it must be from 0 to {MAX_SEED}")
    elif key == "print" and value not in (choices := (*CHOICES[key], *["json"] * (verb == "fit"))):
        raise InputError(f"print: {value!r} is not known; {did_you_mean(value, choices)}")


@dataclass
class Config(Keys):
    """The keys of all verbs. `report` draws pictures (null: except in a sweep); `print=full` prints every stage of a
    plan, `summary` what fits a screen; `alone` also plans each GPU type of a mixed cluster alone, and says what the
    mixed one gives over the best of them; `pricer` is the name of the cost model that prices plans instead of ours;
    `plan` is the path of a plan file, `data` that of a file of measured runs,
    `run` a folder of `train` or another trainer's log, or a list of them, for `calibrate`.
    `gpus` names the cards of a cluster in place of `cluster`: [3090,4090] in one PC, [[3090,4090],[2x4060ti-16gb]] in
    several, which `network` joins (10gbe, or GB/s per PC and direction), or auto for those of this machine.
    `replan` does without `lost` machines and devices, with `slow` ones ({a:3: 0.7}, or the folder of a run that
    measured them) and with `added` machines (a list as in the cluster file, or a file of it). `import` reads the layout
    `file` of the trainer `format`, and the GPU of each rank from the table `ranks` (null: ranks are the cluster's GPUs
    in order).
    """

    cluster: Any = None
    gpus: Any = None
    network: Any = None
    model: Any = None
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    constraints: ConstraintsConfig = field(default_factory=ConstraintsConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    pricer: str | None = None
    seed: int = 0
    report: bool | None = None
    print: str = "summary"
    alone: bool = False
    plan: str | None = None
    lost: list[str] = field(default_factory=list)
    slow: Any = None
    added: Any = None
    data: str | None = None
    run: Any = None
    format: str | None = None
    file: str | None = None
    ranks: str | None = None
    compare: CompareConfig = field(default_factory=CompareConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    page: PageConfig = field(default_factory=PageConfig)
    whatif: WhatIfConfig = field(default_factory=WhatIfConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    replan: ReplanConfig = field(default_factory=ReplanConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    discover: DiscoverConfig = field(default_factory=DiscoverConfig)


def reads(verb: str, key: str) -> bool:
    """Whether a verb reads a key, such as workload.seq_len."""
    return any(key == read or key.startswith(f"{read}.") for read in READS[verb])


def schema(verb: str) -> type[Config]:
    """The schema of a verb: of the keys of `Config` those that it reads, and no others."""
    node: type[Config] = node_of(Config, READS[verb], Keys, verb=verb)
    return node


def register(verb: str) -> None:
    """Register the schema of a verb with Hydra; `solver_config.py` registers those of the solvers."""
    ConfigStore.instance().store(group="schema", name=verb, node=schema(verb), package="_global_")

"""The schema of the command line's configuration: what may be overridden, of which type, within which range.

`cluster` and `model` are free mappings that their own readers check; everything else is typed here, so that
`seed=abc` is refused when the configuration is composed, and ranges are checked in `__post_init__`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from hexiopt.errors import InputError
from hexiopt.problem.machine import NAME, NAME_RULE
from hexiopt.problem.space import BOUNDS, Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.problem_file import space_from_sections, workload_from_section
from hexiopt.reading import Section
from hexiopt.solving import MAX_SEED, MAX_STEPS, MAX_TIME_LIMIT_S


def _node(made: Any, names: Collection[str]) -> Any:
    """A dataclass with those fields of `made` for Hydra, which would make a frozen dataclass itself read-only."""
    hints = get_type_hints(made)
    own = [(one.name, hints[one.name], field(default=one.default)) for one in fields(made) if one.name in names]
    return make_dataclass(f"{made.__name__}Node", own)


_FREEDOMS = {one.name for one in fields(Space)} - {*BOUNDS}


@dataclass
class WorkloadConfig(_node(Workload, {one.name for one in fields(Workload)})):  # type: ignore[misc]
    """The fields of `hexiopt.problem.workload.Workload`."""

    def __post_init__(self) -> None:
        self.workload()

    def workload(self) -> Workload:
        """The workload. Raises InputError."""
        return workload_from_section(Section(asdict(self), "workload"))


@dataclass
class SolverConfig:
    """Which solver, and when it stops: after `time_limit_s` seconds, or `max_steps` of its own steps.

    Each solver's own has its parameters too (`solver_config.py`).
    """

    name: str = MISSING
    time_limit_s: float = 10.0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        section = Section(asdict(self), "solver")
        section.number("time_limit_s", above=0, at_most=MAX_TIME_LIMIT_S)
        section.integer("max_steps", at_least=1, at_most=MAX_STEPS, default=None)

    def options(self) -> dict[str, Any]:
        """The parameters of the solver that are not as it has them, as `solvers.registry.make_solver` takes them."""
        own = [one for one in fields(self) if one.name not in ("name", "time_limit_s", "max_steps")]
        return {one.name: getattr(self, one.name) for one in own if getattr(self, one.name) != _default(one)}


def _default(parameter: Field[Any]) -> Any:
    factory = parameter.default_factory
    return parameter.default if factory is dataclasses.MISSING else factory()


@dataclass
class SpaceConfig(_node(Space, _FREEDOMS)):  # type: ignore[misc]
    """The freedoms of a plan: fields of `hexiopt.problem.space.Space`."""

    def __post_init__(self) -> None:
        space_from_sections(Section(asdict(self), "space"), Section({}, "constraints"))


@dataclass
class ConstraintsConfig(_node(Space, BOUNDS)):  # type: ignore[misc]
    """The constraints on a plan, fields of `Space` too; null leaves free. `exclude` names machines or devices."""

    def __post_init__(self) -> None:
        space_from_sections(Section({}, "space"), Section(asdict(self), "constraints"))


@dataclass
class BoundConfig:
    """For how long the lower bound is raised after the search: null, half of the solver's time limit; 0, not at all."""

    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        Section(asdict(self), "bound").number("time_limit_s", at_least=0, at_most=MAX_TIME_LIMIT_S, default=None)


@dataclass
class CompareConfig:
    """The solvers that `compare` runs on one problem."""

    solvers: list[str] = field(default_factory=lambda: ["random", "hexiscale", "portfolio"])

    def __post_init__(self) -> None:
        _check_solvers("compare", self.solvers)
        if not self.solvers:
            raise InputError("compare.solvers: [] names no solver; name one or more")


def _check_solvers(verb: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{verb}.solvers: {name!r} stands twice; name every solver once")


@dataclass
class CollectConfig:
    """The sweep folders that `collect` gathers; empty stands for the newest below multirun/."""

    folders: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """How `train` trains. `data` is a text file, a folder of them or a token file (.npy); null, Python's own sources.

    `tokenizer` is a Hugging Face tokenizer.json; null, bytes. `resume` is a checkpoint (a folder step-NNNNNNNN),
    `weights` a Hugging Face folder or .safetensors file to start with; without them, weights are drawn by the seed.
    `tensorboard` also writes what metrics.jsonl has of the steps for TensorBoard.
    After a lost or hung process `on_failure` goes on from the last checkpoint: restart, replan (without the lost
    devices) or stop; `max_restarts` times in a row without a new checkpoint.

    `launch`: `local` starts all processes on this machine; `machine` those of the plan's devices in `machine`, as all
    machines do, which meet at `master` (host:port of the first device's machine) and share the run's folder; `torchrun`
    is one process of `torchrun -m experiments.train`. `machine` null writes the commands for all machines.

    `device`: on what processes compute. `auto` is a GPU each where the machine has as many as it starts processes, else
    its CPU. `force` starts also what the machine's cores or memory cannot carry.
    """

    steps: int = 50
    lr: float = 3e-3
    warmup_steps: int = 5
    min_lr_share: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_norm: float | None = 1.0
    data: str | None = None
    tokenizer: str | None = None
    resume: str | None = None
    weights: str | None = None
    checkpoint_every: int = 25
    keep_checkpoints: int = 2
    tensorboard: bool = False
    on_failure: str = "restart"
    max_restarts: int = 3
    timeout_s: float = 60.0
    launch: str = "local"
    machine: str | None = None
    master: str | None = None
    device: str = "auto"
    force: bool = False

    def __post_init__(self) -> None:
        section = Section(asdict(self), "train")
        section.text("device", choices=("auto", "cpu", "cuda"))
        for key, least in (("steps", 1), ("warmup_steps", 0), ("checkpoint_every", 1), ("keep_checkpoints", 1)):
            section.integer(key, at_least=least, at_most=MAX_STEPS)
        section.integer("max_restarts", at_least=0, at_most=MAX_STEPS)
        section.number("lr", above=0, at_most=100.0)
        section.number("weight_decay", at_least=0, at_most=100.0)
        for key in ("min_lr_share", "beta1", "beta2"):
            section.number(key, at_least=0, at_most=1.0)
        section.number("max_norm", above=0, at_most=1e9, default=None)
        section.number("timeout_s", at_least=1, at_most=MAX_TIME_LIMIT_S)
        section.text("on_failure", choices=("restart", "replan", "stop"))
        section.text("launch", choices=("local", "machine", "torchrun"))
        if self.resume is not None and self.weights is not None:
            raise InputError("train: resume and weights both say where to begin; state one of them")
        if self.launch != "local" and self.on_failure == "replan":
            raise InputError(
                "train: on_failure: replan is for launch=local; take restart, or replan and resume by hand"
            )


@dataclass
class EmulateConfig:
    """What `emulate` trains: plans of `solvers` (and that of plan=..., if any), `steps` steps each after a first one.

    `divisor` narrows the model and its sequences (null: as far as they divide); `dilation` is how long a second of the
    cluster takes (null: as short as this machine allows); `network` shapes links (null: where root, ip and tc allow).
    """

    solvers: list[str] = field(default_factory=lambda: ["portfolio", "megatron", "flashflex", "random"])
    steps: int = 3
    divisor: int | None = None
    dilation: float | None = None
    network: bool | None = None

    def __post_init__(self) -> None:
        _check_solvers("emulate", self.solvers)
        section = Section(asdict(self), "emulate")
        section.integer("steps", at_least=1, at_most=10_000)
        section.integer("divisor", at_least=1, at_most=10_000, default=None)
        section.number("dilation", above=0, at_most=1e6, default=None)


@dataclass
class ExportConfig:
    """What `export` makes of a `checkpoint`: `format` huggingface, safetensors and a config.json, in `precision`."""

    checkpoint: str | None = None
    format: str = "huggingface"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        section = Section(asdict(self), "export")
        section.text("format", choices=("huggingface",))
        section.text("precision", choices=("bf16", "fp32"))


@dataclass
class ValidateConfig:
    """What `validate` predicts runs with: `profiles` of layers (null: those that come with hexiopt; files of hexiopt,
    Sailor or AMP), and `network`, Sailor's fits of links (null: likewise). [] and "" take none.
    """

    profiles: list[str] | None = None
    network: str | None = None


@dataclass
class ProfileConfig:
    """What `profile` measures: each kind of operator and each link for about `seconds`, in `precision` (null: bf16 on
    a GPU that has it, else fp16; fp32 on a CPU), with `processes` (null: one for each GPU of this machine, or one).

    `machine` is what this machine is called (null: its host name), `name` the cluster. `base` is a cluster file, as of
    `discover`, whose nulls are filled for the machines measured. Several machines: torchrun -m experiments.profile.
    """

    name: str = "measured"
    precision: str | None = None
    processes: int | None = None
    seconds: float = 2.0
    machine: str | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        _check_name("profile", self.name)
        section = Section(asdict(self), "profile")
        section.text("precision", choices=("bf16", "fp16", "fp32"), default=None)
        section.integer("processes", at_least=1, at_most=1024, default=None)
        section.number("seconds", at_least=0.01, at_most=600.0)
        if self.machine is not None and not NAME.fullmatch(self.machine):
            raise InputError(f"profile.machine: {self.machine!r} {NAME_RULE}")


def _check_name(verb: str, name: str) -> None:
    if not 0 < len(name) <= 100 or not name.isprintable():
        raise InputError(f"{verb}.name: {name!r} is not a name; use up to 100 printable characters")


@dataclass
class DiscoverConfig:
    """Texts of a cluster's tools, as paths, and the `name` of the cluster that `discover` makes of them.

    `nvidia_smi` (nvidia-smi --query-gpu=index,name,memory.total --format=csv) and `topology` (nvidia-smi topo -m) are
    a path where there is one machine, else a mapping of machines to paths: {a: a.csv, b: b.csv}. `slurm` is scontrol
    show node or sinfo -N -o "%N %G"; `hostfile` a launcher's, whose slots are taken as GPUs. `nccl_tests`, likewise by
    machine, is what all_gather_perf or the like printed on all its GPUs: the rate of its links.
    """

    name: str = "discovered"
    nvidia_smi: Any = None
    topology: Any = None
    nccl_tests: Any = None
    slurm: str | None = None
    hostfile: str | None = None

    def __post_init__(self) -> None:
        _check_name("discover", self.name)
        self.paths("nvidia_smi")
        self.paths("topology")
        self.paths("nccl_tests")

    def paths(self, option: str) -> dict[str, str]:
        """The paths of an option that has one for each machine, a lone one under ''. Raises InputError."""
        value = getattr(self, option)
        paths = {"": value} if isinstance(value, str) and value else value or {}
        if not isinstance(paths, Mapping) or not all(isinstance(path, str) and path for path in paths.values()):
            rule = "is neither a path nor a mapping of machines to paths"
            raise InputError(f"discover.{option}: {value!r} {rule}; write {{a: a.txt, b: b.txt}}")
        return {str(machine): path for machine, path in paths.items()}


@dataclass
class Config:
    """All of it. `report` draws pictures (null: yes, but not in a sweep); `plan` is a plan file, `data` one of runs."""

    cluster: Any = None
    model: Any = None
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    constraints: ConstraintsConfig = field(default_factory=ConstraintsConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    seed: int = 0
    report: bool | None = None
    plan: str | None = None
    data: str | None = None
    compare: CompareConfig = field(default_factory=CompareConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    discover: DiscoverConfig = field(default_factory=DiscoverConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed: {self.seed} is out of range; it must be from 0 to {MAX_SEED}")

    def plan_space(self) -> Space:
        """The plan space. Raises InputError."""
        return space_from_sections(
            Section(asdict(self.space), "space"), Section(asdict(self.constraints), "constraints")
        )


def register() -> None:
    """Make the schema known to Hydra; those of solvers are `solver_config.py`'s."""
    ConfigStore.instance().store(name="schema", node=Config)

"""The sections of the configuration that single verbs read, with their types, ranges and choices."""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from hexiopt.errors import InputError
from hexiopt.exports.exporting import FORMATS, READ
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.machine import NAME, NAME_RULE
from hexiopt.reading import Section
from hexiopt.solving import MAX_SEED, MAX_STEPS, MAX_TIME_LIMIT_S
from hexiopt.study.alternatives import Wishes
from hexiopt.study.fitting.require import least_required
from hexiopt.study.replan.moving import CHECKPOINT_GB_PER_S, RESTART_S
from runtime.settings import AdamW, ExpertTraining, Settings

HUGGING_FACE = "huggingface"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "print": ("summary", "full"),
    "format": READ,
    "train.device": ("auto", "cpu", "cuda"),
    "train.attention": ("auto", "fa3", "fa4"),
    "train.loggers": ("tensorboard", "wandb", "mlflow"),
    "train.lr_schedule": ("cosine", "wsd"),
    "train.on_failure": ("restart", "replan", "stop"),
    "train.launch": ("local", "machine", "torchrun"),
    "export.format": (HUGGING_FACE, *FORMATS),
    "export.precision": ("bf16", "fp32"),
    "export.trainer": tuple(TRAINERS),
    "profile.precision": ("bf16", "fp16", "fp32"),
}
"""The values of keys that take one of a few."""


def node_of(kind: Any, names: Collection[str], base: type = object, **methods: Any) -> Any:
    """A mutable dataclass with the fields `names` of the dataclass `kind`, their types and defaults, which are stated
    there alone: Hydra makes the nodes of frozen dataclasses read-only. Of a section, a.b names one field."""
    hints, chosen = get_type_hints(kind), []
    for key in fields(kind):
        hint, parts = (
            hints[key.name],
            {name.removeprefix(f"{key.name}.") for name in names if name.partition(".")[0] == key.name},
        )
        if key.name in parts:
            default = field(default=key.default, default_factory=key.default_factory)
            chosen.append((key.name, hint, default))
        elif parts:
            section = node_of(hint, parts, __post_init__=hint.__post_init__)
            chosen.append((key.name, section, field(default_factory=section)))
    return make_dataclass(f"{kind.__name__}Node", chosen, bases=(base,), namespace=methods)


@dataclass
class BoundConfig:
    """Seconds spent on the lower bound after the search; 0 means none.

    In `plan` they are part of the time limit of the solver, and null means a quarter of it; in `compare` they come on
    top, and null means half of the limit of a solver.
    """

    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        Section(asdict(self), "bound").number("time_limit_s", at_least=0, at_most=MAX_TIME_LIMIT_S, default=None)


@dataclass
class CompareConfig:
    """The solvers that `compare` runs on one problem.

    `operators`: whether to print what each of their operators did, as operators.csv has it.
    """

    solvers: list[str] = field(default_factory=lambda: ["random", "hexiscale", "portfolio"])
    operators: bool = False

    def __post_init__(self) -> None:
        _check_solvers("compare", self.solvers)
        if not self.solvers:
            raise InputError("compare.solvers: [] names no solver; name one or more")


def _check_solvers(verb: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{verb}.solvers: {name!r} appears twice; name every solver once")


@dataclass
class FitConfig:
    """The settings of `fit`: it ends with exit code 3 where less than `require` fits ({context: 8192}; also
    micro_batch, layers, tokens_per_s). `offers` is a price list (docs/questions.md), of whose cards it says which to
    take next. `precision`, of the table by print=full, is the relative distance between the
    most that fits and the least that does not at which its search ends.
    """

    require: Any = None
    offers: str | None = None
    precision: float = 0.03

    def __post_init__(self) -> None:
        section = Section(asdict(self), "fit")
        section.number("precision", at_least=0.0, at_most=1.0)
        if self.require is not None:
            least_required(section.section("require"))


@dataclass
class PageConfig:
    """The settings of `page`: its `port` (0: any that is free), and whether to `open` it in a browser."""

    port: int = 8765
    open: bool = False

    def __post_init__(self) -> None:
        Section(asdict(self), "page").integer("port", at_least=0, at_most=65535)


@dataclass
class WhatIfConfig:
    """The settings of `whatif`: `prices` is a price list (docs/questions.md), `factor` that by which links are made
    faster, `processes` the number of searches at once (null: as many as the solver's cores allow).

    Further alternatives: without the machines or devices `take` ([a,b], or [[a],[b,c]] for several), and with the
    machines `add` of the cluster or on offer ({a: 2}, or [{a: 2},{b: 1}] for several).
    """

    prices: str | None = None
    factor: float = 2.0
    take: Any = None
    add: Any = None
    processes: int | None = None

    def __post_init__(self) -> None:
        section = Section(asdict(self), "whatif")
        section.number("factor", above=1.0, at_most=1000.0)
        section.integer("processes", at_least=1, at_most=1024, default=None)
        Wishes(self.take, self.add)  # judges them


@dataclass
class SweepConfig:
    """`resume` skips the jobs of a sweep that have ended, by a hash of everything that determines their results: in the
    folder `hydra.sweep.dir`, or in that of the newest sweep."""

    resume: bool = False


@dataclass
class CollectConfig:
    """The sweep folders that `collect` gathers; an empty list means the newest sweep in multirun/."""

    folders: list[str] = field(default_factory=list)


_ELSEWHERE = {"adam", "experts", "seed", "silence_s", "separator", "validation_share"}
_OF_SETTINGS = {key.name for key in fields(Settings)} - _ELSEWHERE
_OF_ADAM = {key.name for key in fields(AdamW)} - {"eps"}
_OF_EXPERTS = {key.name for key in fields(ExpertTraining)}


_ADAM, _EXPERTS, _SETTINGS = (
    node_of(kind, names) for kind, names in ((AdamW, _OF_ADAM), (ExpertTraining, _OF_EXPERTS), (Settings, _OF_SETTINGS))
)


@dataclass
class TrainConfig(_ADAM, _EXPERTS, _SETTINGS):  # type: ignore[misc, valid-type]
    """The settings of `train`: fields of `runtime.settings`, and what else a run is started with.

    `data` is a text file, a folder of text files or a token file (.npy); null means the sources of Python's standard
    library. A file of rows (.jsonl, .parquet; with * several), or a dataset of the Hugging Face Hub (hf://NAME), is
    read by the package datasets: the texts in the column `text_column`, of the Hub's `data_split` and, if there are
    several, `data_subset`. `tokenizer` is a Hugging Face tokenizer.json; null means one token per byte.

    `separator` is the token that ends a document: its number, or its text in the tokenizer. It is put after each file
    or row that is tokenised. With `document_masking`, attention does not see beyond it.

    `validation` is a share of the sequences, from 0 to 1, that is not trained on, or another corpus like `data` (of the
    Hub, its `validation_split`). Its loss is computed at the start, every `validation_every` steps and at the end,
    over at most `validation_batches` global batches.

    A run starts from `resume`, a checkpoint (a folder step-NNNNNNNN), or from `weights`, a Hugging Face folder or
    .safetensors file; without either, the weights are drawn from the seed. With workload.training=lora, adapters begin
    as nothing, or as those of `adapter`, a folder of peft; their products are scaled by `lora_alpha` over the rank
    (null: as the folder says, else twice the rank). A checkpoint of adapters goes on beside the `weights` that it began
    with, whose path it has. `loggers` also get the numbers of metrics.jsonl: tensorboard, wandb, mlflow.

    `trace_steps` writes a trace of so many steps of each process, after two, into the folder `trace`.

    The learning rate warms up linearly in `warmup_steps`. `lr_schedule`: `cosine` then falls along a cosine to
    `min_lr_share` of `lr`, `wsd` stays and falls linearly in the last `decay_share` of all steps.

    Of models with experts: with `expert_capacity`, a device sends an expert at most so many times the mean of what its
    tokens send to an expert, and drops the rest; null drops nothing, so that no plan changes what is trained.
    `sequence_balance` is the weight of a loss that balances the experts of each sequence, `expert_bias_rate` by how
    much a step moves the biases that balance them, of models that have such. Losses that balance a batch, or a
    micro-batch, would change with the plan: there are none.

    `on_failure` says what follows the loss or hang of a process or machine: `restart` resumes from the last checkpoint
    (and waits for a lost machine), `replan` does so with a plan without the lost devices, `stop` ends the run. The run
    fails after `max_restarts` restarts in a row without a new checkpoint. `replan` drops constraints on a plan's shape
    that the devices left cannot keep, and does what `restart` does where there is no plan without the lost ones.

    Ctrl-C ends a run with a checkpoint, for which it waits at most `stop_s` seconds; a second Ctrl-C ends it at once.

    `launch`: `local` starts all processes on this machine. `machine` makes this process the head of a run on the
    machines of the plan, which meet at `master` (host:port of this machine, by default port 29500 of its host name);
    each takes part by launch.sh, or by train.launch=machine with `master` and, as `machine`, its name in the cluster
    file. `torchrun` runs one process of a training that torchrun starts: in the order of the cluster file, or in any
    order with `machine`, the name of the machine that it is on.

    `device`: `auto` gives each process a GPU if the machine has enough, else all of them compute on the CPU. `force`
    skips the check that the machine's cores and memory suffice.

    `compile_layers` compiles the layers by torch.compile; null means on GPUs only. `attention`: `auto` takes the
    fastest fused kernel that torch has for the GPU, `fa3` or `fa4` FlashAttention-3 or -4, if its package is there.
    `async_tp` fuses the products of a TP group with its collectives (asynchronous tensor parallelism); it needs GPUs
    that read each other's memory.

    `profile` is the cluster file that `profile` wrote of this machine, measured with as many processes as the plan has
    devices; the measured step then stands beside one predicted for this machine, and not for the plan's GPUs.

    `seed` draws weights and data, also with a plan file; null means the seed of the search.
    """

    data: str | None = None
    text_column: str = "text"
    data_split: str = "train"
    data_subset: str | None = None
    tokenizer: str | None = None
    separator: Any = None
    document_masking: bool = False
    validation: Any = None
    validation_split: str = "validation"
    resume: str | None = None
    weights: str | None = None
    adapter: str | None = None
    loggers: list[str] = field(default_factory=list)
    on_failure: str = "restart"
    max_restarts: int = 3
    stop_s: float = 120.0
    launch: str = "local"
    machine: str | None = None
    master: str | None = None
    device: str = "auto"
    force: bool = False
    profile: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        section = Section(asdict(self), "train")
        section.integer("seed", at_least=0, at_most=MAX_SEED, default=None)
        section.text("device", choices=CHOICES["train.device"])
        for key in ("steps", "checkpoint_every", "keep_checkpoints", "validation_every", "validation_batches"):
            section.integer(key, at_least=1, at_most=MAX_STEPS)
        for key in ("warmup_steps", "trace_steps"):
            section.integer(key, at_least=0, at_most=MAX_STEPS)
        section.integer("max_restarts", at_least=0, at_most=MAX_STEPS)
        section.number("lr", above=0, at_most=100.0)
        section.number("weight_decay", at_least=0, at_most=100.0)
        for key in ("decay_share", "min_lr_share", "beta1", "beta2"):
            section.number(key, at_least=0, at_most=1.0)
        section.text("lr_schedule", choices=CHOICES["train.lr_schedule"])
        section.number("max_norm", above=0, at_most=1e9, default=None)
        section.number("expert_capacity", above=0, at_most=1e6, default=None)
        for key in ("sequence_balance", "expert_bias_rate"):
            section.number(key, at_least=0, at_most=100.0)
        section.number("lora_alpha", above=0, at_most=1e6, default=None)
        section.number("timeout_s", at_least=1, at_most=MAX_TIME_LIMIT_S)
        section.number("stop_s", at_least=0, at_most=MAX_TIME_LIMIT_S)
        section.text("on_failure", choices=CHOICES["train.on_failure"])
        section.text("attention", choices=CHOICES["train.attention"])
        section.text("launch", choices=CHOICES["train.launch"])
        for name in self.loggers:
            Section({"loggers": name}, "train").text("loggers", choices=CHOICES["train.loggers"])
        if self.loggers and self.launch == "torchrun":
            raise InputError("train: loggers: there are none under torchrun; leave them out, or take launch=machine")
        self._check_corpus(section)
        if self.launch == "torchrun" and self.on_failure == "replan":
            raise InputError(
                "train: on_failure: replan does not work under torchrun, which keeps the number of processes; "
                "take launch=machine, or choose restart"
            )

    def _check_corpus(self, section: Section) -> None:
        if isinstance(self.separator, bool) or not isinstance(self.separator, int | str | None):
            section.fail("separator", "is no token; write its number, or its text in the tokenizer")
        if self.document_masking and self.separator is None:
            section.fail("document_masking", "needs to know where documents end; state train.separator")
        if isinstance(self.validation, str):
            return
        if self.validation is not None and not 0 < section.number("validation", at_least=0, at_most=1) < 1:
            section.fail("validation", "is no share between 0 and 1; write one, or a path")

    @property
    def validation_share(self) -> float:
        """Which share of the text is held out."""
        return 0.0 if self.validation is None or isinstance(self.validation, str) else float(self.validation)


@dataclass
class ReplanConfig:
    """How `replan`, and `train` after a loss, weigh new plans: training steps until the next change, seconds that a
    change takes beside moving states, and GB/s at which a machine reads a checkpoint, at most as fast as its network
    interfaces receive (null: so fast). The last two are assumptions until you state what yours take."""

    horizon_steps: float = 1000.0
    restart_s: float = RESTART_S
    checkpoint_gb_per_s: float | None = CHECKPOINT_GB_PER_S

    def __post_init__(self) -> None:
        section = Section(asdict(self), "replan")
        section.number("horizon_steps", above=0, at_most=1e12)
        section.number("restart_s", at_least=0, at_most=1e9)
        section.number("checkpoint_gb_per_s", above=0, at_most=1e6, default=None)


@dataclass
class EmulateConfig:
    """The settings of `emulate`: it trains the plans of `solvers`, and of plan=... if given, for `steps` steps each
    after a warm-up step.

    `divisor` is the factor by which the model and its sequences are narrowed (null: the largest possible). `dilation`
    is the number of seconds here per second on the cluster (null: the least that this machine keeps up with).
    `network` shapes the links (null: if the process is root and has ip and tc).
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
    """The settings of `export`.

    Of a checkpoint (a folder step-NNNNNNNN), it makes a model in `format` huggingface with weights in `precision`, and
    adapters merged into them: those at `weights`, or null where the checkpoint says that they are. Of a
    plan file plan=..., it makes files of a launcher or of a trainer, whichever `format` is; a launcher's start
    `trainer`. `folder` is where machines find these files (null: where they are written), `master` the host:port where
    ranks meet (null: on the machine of the first), `job` the name of the job, `minutes` its time limit (null: the
    scheduler's own), `image` the container's, and `gpu_names` a mapping of GPU types to the scheduler's names of them.
    """

    checkpoint: str | None = None
    weights: str | None = None
    format: str = HUGGING_FACE
    precision: str = "bf16"
    trainer: str | None = None
    folder: str | None = None
    master: str | None = None
    job: str = "plan"
    minutes: int | None = None
    image: str = "pytorch/pytorch:latest"
    gpu_names: Any = None

    def __post_init__(self) -> None:
        section = Section(asdict(self), "export")
        section.text("format", choices=CHOICES["export.format"])
        section.text("precision", choices=CHOICES["export.precision"])
        section.text("trainer", choices=CHOICES["export.trainer"], default=None)
        section.integer("minutes", at_least=1, at_most=10**6, default=None)
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", self.job):
            section.fail("job", "is not a name; use up to 30 lower-case letters, digits and '-', a letter first")
        names = {} if self.gpu_names is None else self.gpu_names
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in (*names, *names.values())):
            section.fail("gpu_names", "is no mapping of GPU types to names; write {a100_80gb_sxm: NAME}")
        if self.master is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+:[0-9]{1,5}", self.master):
            section.fail("master", "is not host:port; write the host and the port where ranks meet")
        for key in ("folder", "image"):
            value = getattr(self, key)
            if value is not None and (not value or not value.isprintable() or set(value) & set("'\"$`\\\n")):
                section.fail(key, "has characters that a shell would take for its own; use letters, digits, '/', '.'")


@dataclass
class ValidateConfig:
    """The measurements that `validate` predicts with: `profiles` of layers, files of hexiopt, Sailor or AMP ([]: none),
    and `network`, Sailor's fits of links ("": none). Null means the ones that hexiopt ships. `errors` is a file of
    measured over predicted values by kind of run, such as hexiopt/numbers/errors.yaml, in which those of this data are
    replaced.
    """

    profiles: list[str] | None = None
    network: str | None = None
    errors: str | None = None


@dataclass
class ProfileConfig:
    """The settings of `profile`: it measures each kind of operator and each link for about `seconds` in `precision`
    (null: bf16 on a GPU that supports it, else fp16; fp32 on a CPU) with `processes` (null: one per GPU of this
    machine, or one on its CPU).

    `machine` names this machine (null: its host name) and `name` the cluster. `base` is a cluster file, such as one
    written by `discover`, whose nulls are filled in for the measured machines. To measure several machines, run
    torchrun -m experiments.profile.
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
        section.text("precision", choices=CHOICES["profile.precision"], default=None)
        section.integer("processes", at_least=1, at_most=1024, default=None)
        section.number("seconds", at_least=0.01, at_most=600.0)
        if self.machine is not None and not NAME.fullmatch(self.machine):
            raise InputError(f"profile.machine: {self.machine!r} {NAME_RULE}")


def _check_name(verb: str, name: str) -> None:
    if not 0 < len(name) <= 100 or not name.isprintable():
        raise InputError(f"{verb}.name: {name!r} is not a name; use up to 100 printable characters")


@dataclass
class DiscoverConfig:
    """The settings of `discover`: paths of the outputs of a cluster's tools, and the `name` of the cluster.

    `nvidia_smi` (nvidia-smi --query-gpu=index,name,memory.total --format=csv, or -L), `rocm_smi` (rocm-smi
    --showproductname --showmeminfo vram) and `topology` (nvidia-smi topo -m, rocm-smi --showtopo) are one path for a
    single machine, else a mapping of machines to paths: {a: a.csv, b: b.csv}. `slurm` is the output of scontrol show
    node or sinfo -N -o "%N %G %t", in text or JSON, or slurm.conf or gres.conf. `kubernetes` is that of kubectl get
    nodes -o yaml. `hostfile` is a launcher's; its slots are taken as GPUs. `nccl_tests`, by machine like `topology`, is
    the output of all_gather_perf or the like on all GPUs of a machine, from which the rate of its links is read.
    """

    name: str = "discovered"
    nvidia_smi: Any = None
    rocm_smi: Any = None
    topology: Any = None
    nccl_tests: Any = None
    slurm: str | None = None
    kubernetes: str | None = None
    hostfile: str | None = None

    def __post_init__(self) -> None:
        _check_name("discover", self.name)
        self.paths("nvidia_smi")
        self.paths("rocm_smi")
        self.paths("topology")
        self.paths("nccl_tests")

    def paths(self, option: str) -> dict[str, str]:
        """The paths of an option by machine; a single path without a machine has the key ''. Raises InputError."""
        value = getattr(self, option)
        paths = {"": value} if isinstance(value, str) and value else value or {}
        if not isinstance(paths, Mapping) or not all(isinstance(path, str) and path for path in paths.values()):
            rule = "is neither a path nor a mapping of machines to paths"
            raise InputError(f"discover.{option}: {value!r} {rule}; write {{a: a.txt, b: b.txt}}")
        return {str(machine): path for machine, path in paths.items()}

"""The formats of trainers and launchers, and how a format refuses a plan."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from hexiopt.errors import InputError, blame
from hexiopt.exports.rank_table import RankRow
from hexiopt.numbers.messages import TRAINING
from hexiopt.numbers.optimizers import ADAMW
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import FULL, Workload
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """A plan in a trainer's terms.

    `devices` are the plan's in the order of ranks, `files` the trainer's files by name. Each process runs `python
    COMMAND`; a launcher runs the line of shell `setup` before it and sets the `environment`. In all of them $HERE is
    the folder of the files. `notes` say what differs from the plan.
    """

    devices: tuple[int, ...]
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def exports(self) -> list[str]:
        """Lines of shell that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]


@dataclass(frozen=True)
class ImportContext:
    """The arguments of an importer besides the file, which is called `where`.

    `devices` are the cluster's in the order of ranks: those of a rank table (`table`), or all usable ones. `workload`
    has what the file does not state; its `stated_keys` are the user's and override the file. Without a model, the file
    must state it.
    """

    where: str
    cluster: Cluster
    devices: tuple[int, ...]
    model: ModelSpec | None
    workload: Workload
    space: Space
    stated_keys: frozenset[str] = frozenset()
    table: bool = False

    def fail(self, what: str) -> NoReturn:
        """Refuse the file: `what` ends in the remedy."""
        raise InputError(f"{self.where}: {what}")

    def blame_file(self) -> AbstractContextManager[None]:
        """A context whose InputErrors name the file."""
        return blame(self.where)

    def require_model(self, name: str) -> ModelSpec:
        """The model. Raises InputError where none is given, since files of `name` do not state it."""
        if self.model is None:
            raise InputError(
                f"model: is missing, and {name} files do not state it; give model=NAME or model=config.json"
            )
        return self.model

    def workload_of(self, **values: Any) -> tuple[Workload, tuple[str, ...]]:
        """The workload with the `values` that the file states, and notes on the values that the user overrides.

        Raises InputError as `Workload` does.
        """
        overruled = {
            key: value
            for key, value in values.items()
            if key in self.stated_keys and getattr(self.workload, key) != value
        }
        notes = tuple(self.overrule_note(key, value) for key, value in overruled.items())
        return replace(self.workload, **{k: v for k, v in values.items() if k not in overruled}), notes

    def overrule_note(self, key: str, value: Any) -> str:
        """The note on a value of the file that the user overrides."""
        return f"workload.{key}={getattr(self.workload, key)} of the command line replaces {value} of the file"

    def ranks_of(self, stated_world: int | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The devices in the order of ranks, and notes; `stated_world` is the number of ranks that the file states.

        Raises InputError if the number of devices differs, since another layout would be priced.
        """
        count = len(self.devices)
        if stated_world is None:
            note = f"the file does not state its number of GPUs: all {count} are taken"
            return self.devices, () if self.table else (note,)
        if stated_world != count:
            remedy = "give a cluster with as many"
            if self.table:
                remedy = "give the rank table a row for each rank"
            elif stated_world < count:
                others = self._others(count - stated_world)
                remedy = f"say which by ranks=ranks.tsv, or leave the others out by constraints.exclude={others}"
            self.fail(f"runs on {stated_world} GPUs, and there are {count} to use; {remedy}")
        return self.devices, ()

    def _others(self, count: int) -> str:
        """Machines at the end of the cluster that have `count` of the devices together, as a list of names."""
        names: list[str] = []
        used = [int(self.cluster.machine_of[device]) for device in self.devices]
        for machine in reversed(dict.fromkeys(used)):
            if used.count(machine) <= count:
                count -= used.count(machine)
                names.insert(0, self.cluster.machines[machine].name)
        return f"[{','.join(names)}]" if names and not count else "[...]"


@dataclass(frozen=True)
class ImportedPlan:
    """A problem and a plan that a file of another system describes; `notes` say what was left out or assumed."""

    problem: Problem
    plan: Plan
    notes: tuple[str, ...] = ()


def divides_model(problem: Problem, tp: int) -> bool:
    """Whether a TP degree divides the model's query heads, its key-value heads and its MLP columns."""
    model = problem.model
    return model.num_heads % tp == model.num_kv_heads % tp == model.ffn_size % tp == 0


def divides_model_and_sequence(problem: Problem, tp: int) -> bool:
    """Whether a TP degree divides the model (`divides_model`), and the sequence, as sequence parallelism requires."""
    return divides_model(problem, tp) and problem.workload.seq_len % tp == 0


EVEN: dict[str, tuple[Any, ...]] = {
    "space.tp_degrees": ("powers_of_two",),
    "space.uneven_tp": (False,),
    "space.uneven_structure": (False,),
    "space.uneven_batch": (False,),
    "space.batch_remainder": (False,),
    "space.recompute_per_stage": (False,),
    "space.recompute_per_layer": (False,),
    "space.replicas": (False,),
    "space.machine_sharding": (False,),
    "space.sequence": (False,),
    "space.depth": (False,),
}
"""The choices of a trainer whose pipelines are all equal."""

Refuse = Callable[[str, str], NoReturn]
"""Refuses a plan: the obstacle in it, and the override that plans around it."""


WHOLE_BY_ADAMW: Mapping[str, str] = MappingProxyType({"training": FULL, "optimizer": ADAMW})
"""Keys of `workload`, and their values for which formats of others are written: no other training is exported yet."""


class Trainer(ABC):
    """A program that trains, as a format of plans.

    `target` is the program with the versions that the format is for; `expresses` says in a few words which plans the
    format can state. `schedules` are the schedules that the program runs, the preferred one first, each with the
    program's word for it, if any; `precisions` are those that its files can state.
    """

    name: ClassVar[str]
    target: ClassVar[str]
    expresses: ClassVar[str]
    schedules: ClassVar[Mapping[Schedule, str]] = {}
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = EVEN
    """The preset without its schedules: see `preset`."""
    can_read: ClassVar[bool] = True
    """Whether the trainer's files are read, too."""
    optional_sequence_parallelism: ClassVar[bool] = False
    """Whether the program can run TP groups without sequence parallelism."""
    stated_training: ClassVar[Mapping[str, str]] = WHOLE_BY_ADAMW
    """The values of keys of `workload` for which the format is written: what is trained, and by which optimizer."""
    is_launched: ClassVar[bool] = True
    """Whether launchers start the program, a process for each rank."""
    recomputes_together: ClassVar[bool] = False
    """Whether the program can recompute groups of layers, keeping only the input of each group."""

    @abstractmethod
    def write(self, problem: Problem, plan: Plan) -> Program:
        """Write the plan in the trainer's terms. Raises InputError for a plan that the format cannot express."""

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        """Read the problem and the plan in a file. Raises InputError for a file that is not understood."""
        raise NotImplementedError(f"{self.name} files are not read")

    @abstractmethod
    def takes_tp(self, problem: Problem, tp: int) -> bool:
        """Whether a TP degree suits the problem's model."""

    def unsuitable(self, problem: Problem) -> str | None:
        """The reason why no plan of a problem can be expressed, with a remedy; None if some can."""
        return None

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        """The reason why a model with experts, or with layers of several kinds, cannot be trained, with a remedy; None
        where it can, and where all layers are equal."""
        if not problem.model.layers:
            return None
        return (
            f"is not written for experts, nor for layers of several kinds, as those of {problem.model.name}; "
            "export plans of models whose layers are equal"
        )

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        """The values of keys of `space`, `constraints` and `workload` under which every plan is expressible; the first
        value of a key is set by default."""
        workload = {"schedule": tuple(map(str, self.schedules))}
        fixed = {"message_precision": TRAINING, "gradient_precision": TRAINING, **self.stated_training}
        workload |= {key: (value,) for key, value in fixed.items()}
        return {**self.choices, **{f"workload.{key}": values for key, values in workload.items()}}

    def runs_tp(self, problem: Problem, tp: int) -> bool:
        """Whether a TP degree suits the model, and the trainer runs the workload's sequence parallelism."""
        has_switch = problem.workload.sequence_parallel or self.optional_sequence_parallelism
        return self.takes_tp(problem, tp) and (tp == 1 or has_switch)

    def refuse(self, what: str, switch: str) -> NoReturn:
        """Raise InputError: `what` in the plan is the obstacle, and `switch` the override that plans around it."""
        remedy = f"plan again with space.preset={self.name}, which sets {switch}"
        raise InputError(f"export.format: {self.name} cannot express the plan: {what}; {remedy}")

    def check_precision(self, problem: Problem) -> None:
        """Raise InputError where the files cannot state the precision of a problem."""
        if problem.workload.precision not in self.precisions:
            *others, last = self.precisions
            precisions = f"{', '.join(others)} and {last}"
            rule = f"{self.name} is written for {precisions}; plan with workload.precision=bf16"
            raise InputError(f"export.format: {rule}")


@dataclass(frozen=True)
class LaunchOptions:
    """The arguments of a launcher besides the plan.

    Ranks meet at `master` (host:port; None: the first rank's machine); `folder` holds the files on every machine;
    `job` and `image` name the job and the container; `minutes` is the time limit (None: the
    scheduler's own); `gpu_names` has the scheduler's names of GPU types.
    """

    folder: str
    job: str = "plan"
    master: str | None = None
    image: str = "pytorch/pytorch:latest"
    minutes: int | None = None
    gpu_names: Mapping[str, str] = field(default_factory=dict)

    def meeting_point(self, first_machine: str) -> tuple[str, str]:
        """The host and the port where ranks meet: `master`, else the usual port of the first rank's machine."""
        host, _, port = (self.master or first_machine).partition(":")
        return host, port or "29500"


@dataclass(frozen=True)
class Launch:
    """A launcher's `files` by name, the `start` command to type, and notes."""

    files: Mapping[str, str]
    start: str
    notes: tuple[str, ...] = ()


class Launcher(ABC):
    """A system that starts processes, as a format; for `target` and `expresses` see `Trainer`."""

    name: ClassVar[str]
    target: ClassVar[str]
    expresses: ClassVar[str]

    @abstractmethod
    def write(self, cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> Launch:
        """Write the files that start a program by the rank table. Raises InputError where the launcher cannot."""


def stage_name(pipeline: int, stage: int) -> str:
    """The name of a stage in refusals."""
    return f"stage {stage} of pipeline {pipeline}"

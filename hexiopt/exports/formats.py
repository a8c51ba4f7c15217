"""What a trainer's and a launcher's format are, and how a format refuses a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hexiopt.errors import InputError
from hexiopt.exports.rank_table import RankRow
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload


@dataclass(frozen=True)
class Program:
    """A plan in a trainer's terms.

    `devices` are those of the plan in the order of ranks, `files` the trainer's files by name. Each process runs
    `python COMMAND`; `setup` is a line of shell that a launcher runs before it, `environment` what it sets. In both
    texts $HERE is the folder of the files. `notes` say what differs from the plan.
    """

    devices: tuple[int, ...]
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImportContext:
    """What an importer is told beside the file called `where`: the cluster, the devices in the order of ranks, and
    defaults for what the file does not state. Without a model, the file must state it."""

    where: str
    cluster: Cluster
    devices: tuple[int, ...]
    model: ModelSpec | None
    workload: Workload
    space: Space

    def fail(self, what: str) -> NoReturn:
        """Refuse the file: `what` ends in the remedy."""
        raise InputError(f"{self.where}: {what}")

    def stated_model(self, name: str) -> ModelSpec:
        """The model. Raises InputError where none is stated, since files of `name` do not hold one."""
        if self.model is None:
            raise InputError(
                f"model: is missing, and {name} files do not state it; give model=NAME or model=config.json"
            )
        return self.model


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
    """As `divides_model`, and the tokens of a sequence, which sequence parallelism cuts too."""
    return divides_model(problem, tp) and problem.workload.seq_len % tp == 0


@dataclass(frozen=True)
class Trainer:
    """A program that trains, as a format of plans.

    `target` is the program with the versions that the format is for; `expresses` says in a few words which plans it
    takes. `preset` has, for a problem, values for keys of `space`, `constraints` and `workload` under which the best
    plan is expressible, those that are set first; `takes_tp` says whether a TP degree suits a model. `write` raises
    InputError for a plan that the format cannot express, `read` for a file that it does not understand.
    """

    name: str
    target: str
    expresses: str
    preset: Callable[[Problem], Mapping[str, tuple[Any, ...]]]
    takes_tp: Callable[[Problem, int], bool]
    write: Callable[[Problem, Plan], Program]
    read: Callable[[str, ImportContext], ImportedPlan] | None = None
    unsuitable: Callable[[Problem], str | None] = lambda problem: None
    """Why no plan of a problem can be expressed, with a remedy."""
    optional_sequence_parallelism: bool = False
    """Whether the trainer runs TP groups without sequence parallelism too, which others always have."""

    recomputes_together: bool = False
    """Whether it can recompute groups of layers, keeping the input of each group alone."""

    def runs_tp(self, problem: Problem, tp: int) -> bool:
        """Whether a TP degree suits the model, and the trainer the sequence parallelism of its groups."""
        has_switch = problem.workload.sequence_parallel or self.optional_sequence_parallelism
        return self.takes_tp(problem, tp) and (tp == 1 or has_switch)


@dataclass(frozen=True)
class LaunchOptions:
    """What a launcher is told beside the plan: where ranks meet (`master`, host:port; None: the first rank's machine),
    the `folder` that holds the files on every machine, a `job` name, a container `image`, a time limit in minutes, and
    the scheduler's own names of GPU types (`gpu_names`)."""

    folder: str
    job: str = "plan"
    master: str | None = None
    image: str = "pytorch/pytorch:latest"
    minutes: int = 60
    gpu_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A system that starts processes, as a format. `write` makes its files from the rank table and a program."""

    name: str
    target: str
    expresses: str
    write: Callable[[Cluster, Sequence[RankRow], Program, LaunchOptions], "Launch"]


@dataclass(frozen=True)
class Launch:
    """A launcher's `files` by name, the `start` command to type, and notes."""

    files: Mapping[str, str]
    start: str
    notes: tuple[str, ...] = ()


class Refusal:
    """Refuses plans in the name of a trainer's format."""

    def __init__(self, trainer: str) -> None:
        self.trainer = trainer

    def __call__(self, what: str, switch: str) -> NoReturn:
        """Raise InputError: `what` in the plan is the obstacle, and `switch` the override that plans around it."""
        remedy = f"plan again with space.preset={self.trainer}, which sets {switch}"
        raise InputError(f"export.format: {self.trainer} cannot express the plan: {what}; {remedy}")


def stage_name(pipeline: int, stage: int) -> str:
    """How a refusal names a stage."""
    return f"stage {stage} of pipeline {pipeline}"

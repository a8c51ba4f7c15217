"""What the verbs share: a job with its inputs and outputs, an interruptible search, and the outcome of a job."""

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import hexiopt as hx
from experiments.app.compile import compile_once
from experiments.app.config import Config
from experiments.app.own_files import FILE_CHOICES
from experiments.app.terminal import mute, show
from experiments.app.verbs import module_of
from hexiopt.discovery.cards import CardCluster, cluster_of_cards
from hexiopt.errors import InputError
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict
from hexiopt.files.huggingface import config_file, model_from_config, name_of_file, read_config
from hexiopt.files.plan_file import PlanFile, read_plan, write_text
from hexiopt.files.problem_file import problem_from_section, problem_to_dict
from hexiopt.own_packages import own_package
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping
from hexiopt.solving.referee import InvalidPlanError, Refereed
from hexiopt.solving.registry import parameters
from hexiopt.study.running import Interrupt
from hexiopt.study.solution import PlacedPlan, Solution
from solvers.registry import solver_class

INTERRUPTED = 130
# Of the configuration, in the problem of a plan file: what verbs may change that price it anew, or plan again.
_CHANGEABLE = {"workload": "workload", "space": "space", "constraints": "space"}
PROBLEM_KEYS = ("cluster", "gpus", "network", "model", "workload", "space", "constraints")
"""Keys of which a problem is made."""
_NOT_BESIDE_A_PLAN = (*PROBLEM_KEYS, "solver", "seed", "experiment")


class NoPlanError(Exception):
    """There is no feasible plan; the message says in one line what binds and what would fit."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class FailedError(Exception):
    """A process that the verb started ended too early; the message gives the reason in one line."""


class StoppedError(Exception):
    """Ctrl-C has ended the verb before its end; the message says in one line what goes on from there."""


class RunOutcome(float):
    """The outcome of a job: its metric (step time in seconds, infinite without a plan), exit code and one-line message.

    It is a float so that a sweeper can minimise it, and picklable so that a launcher's process can return it.
    """

    exit_code: int
    message: str
    known: bool  # from an earlier sweep

    def __new__(cls, metric: float, exit_code: int = 0, message: str = "", known: bool = False) -> "RunOutcome":
        self = super().__new__(cls, metric)
        self.exit_code, self.message, self.known = exit_code, message, known
        return self

    def report(self) -> int:
        """The exit code; where it is not 0, the message is printed."""
        if self.exit_code:
            print(f"hexiopt: {self.message}", file=sys.stderr)
        return self.exit_code


def worst(codes: Sequence[int]) -> int:
    """The exit code of a sweep: an unexpected error outranks bad input, which outranks having no plan."""
    return next((code for code in (INTERRUPTED, 1, 2, 3) if code in codes), 0)


def failure(error: Exception) -> RunOutcome:
    """The outcome of a job or of the program that an exception ended."""
    if isinstance(error, InputError):
        return RunOutcome(math.inf, 2, str(error))
    if isinstance(error, NoPlanError):
        return RunOutcome(math.inf, 3, str(error))
    if isinstance(error, StoppedError):
        return RunOutcome(math.inf, INTERRUPTED, f"interrupted {error}")
    if isinstance(error, FailedError | InvalidPlanError):
        return RunOutcome(math.inf, 1, str(error))
    if os.environ.get("HEXIOPT_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
        hint = "see the traceback above"
    else:
        hint = "set HEXIOPT_DEBUG=1 for the traceback"
    text = " ".join(str(error).split())
    what = f"unexpected {type(error).__name__}" + (f": {text[:500]}" if text else "")
    return RunOutcome(math.inf, 1, f"{what}; {hint}")


@dataclass(frozen=True)
class Job:
    """One run of a verb: its configuration, output folder, choices and overrides, and whether it is part of a sweep."""

    config: Config
    folder: Path
    choices: Mapping[str, Any]
    overrides: Sequence[str]
    in_sweep: bool

    @property
    def verb(self) -> str:
        """The verb."""
        return self.config.verb

    @property
    def pictures(self) -> bool:
        """Whether to draw."""
        return not self.in_sweep if self.config.report is None else self.config.report

    @cached_property
    def problem(self) -> Problem:
        """The problem of the configuration. Raises InputError."""
        problem = Problem(self.cluster, self.model, self.config.workload.workload(), self.config.plan_space())
        preset = self.config.space.preset
        return problem if preset is None else restrict(problem, TRAINERS[preset])

    @property
    def cluster(self) -> Cluster:
        """The cluster of the configuration. Raises InputError."""
        if self.cards is None:
            return cluster_from_section(self._section("cluster"), self._profile_folder())
        if self.choices.get("cluster") is not None:
            raise InputError("gpus: stands beside cluster=...; state one of them")
        return cluster_from_section(Section(overlay(self.cards.data, self.config.cluster or {}), "gpus"))

    @cached_property
    def cards(self) -> CardCluster | None:
        """The cluster of the cards `gpus`, where they are named; else None. Raises InputError."""
        if getattr(self.config, "gpus", None) is not None:
            return cluster_of_cards(self.config.gpus, self.config.network)
        if getattr(self.config, "network", None) is not None:
            raise InputError("network: joins the PCs of gpus=[[...],[...]]; state them, or leave it out")
        return None

    @property
    def model(self) -> ModelSpec:
        """The model of the configuration. Raises InputError."""
        return model_from_config(self._section("model"), self._model_name())

    @property
    def pricer(self) -> str | None:
        """The name of the cost model of the configuration; None for ours, by which most verbs price."""
        return getattr(self.config, "pricer", None)

    @property
    def progress(self) -> bool | None:
        """Whether to show progress: not in a sweep, else on a terminal or, if the search is long, in a log."""
        return False if self.in_sweep else None

    def search_arguments(self, solver: Refereed | None = None, *, compiled: bool = True) -> dict[str, Any]:
        """The solver, by default the configured one, with budget, seed and progress, as keyword arguments of the verbs
        of hexiopt that search; what searches run is compiled then, unless it needs no kernel."""
        config = self.config.solver
        if compiled:
            compile_once()
        limits = {"time_limit_s": config.time_limit_s, "max_steps": config.max_steps, "seed": self.config.seed}
        chosen = {"solver": config.name, **config.options()} if solver is None else {"solver": solver}
        return limits | chosen | {"progress": self.progress}

    def plan_file(self, *verb_keys: str) -> PlanFile:
        """The plan file `plan=...`; `verb_keys` concern the verb, not the file.

        Raises InputError, also where an override concerns what the file holds.
        """
        return self._plan_file([key for key in _NOT_BESIDE_A_PLAN if key not in verb_keys])

    def priced_plan(self) -> PlacedPlan:
        """The plan of the file `plan=...`, priced. Raises InputError as `plan_file`, and where it breaks a rule."""
        file = self.plan_file()
        plan = PlacedPlan.of(file.problem, file.plan, file.solver)
        hx.price(file.problem, plan, str(self.config.plan))
        return plan

    def changed_plan_file(self) -> tuple[PlanFile, Problem]:
        """The plan file `plan=...`, and its problem with what the verb's overrides change of it.

        Raises InputError, also for an experiment, which does not say what of it is meant to change.
        """
        file = self._plan_file(("experiment",))
        data = problem_to_dict(file.problem)
        chosen = self.choices.get("cluster") is not None
        if chosen or self.config.cluster:
            changed = overlay(_inherit_rates(data["cluster"]), self.config.cluster)
            section = self._section("cluster") if chosen else Section(changed, "cluster")
            data["cluster"] = cluster_to_dict(cluster_from_section(section, self._profile_folder()))
        preset = None
        for override in self.overrides:
            path, _, value = override.lstrip("+~").partition("=")
            name, _, key = path.partition(".")
            if name in _CHANGEABLE:
                now = asdict(getattr(self.config, name))
                keys = [key] if key else map(str, OmegaConf.create(value) if value.startswith("{") else now)
                changes = {key: now[key] for key in keys}
                preset = changes.pop("preset", preset)
                data[_CHANGEABLE[name]] |= changes
        data["workload"] = {key: value for key, value in data["workload"].items() if value is not None}
        problem = problem_from_section(Section(data, str(self.config.plan)))
        return file, problem if preset is None else restrict(problem, TRAINERS[preset])

    def _plan_file(self, fixed: Sequence[str]) -> PlanFile:
        if not self.config.plan:
            raise InputError(f"plan: is missing; give the file: hexiopt {self.verb} plan=path/plan.json")
        for override in self.overrides:
            key = override.lstrip("+~").partition("=")[0]
            if key.partition(".")[0].partition("/")[0] in fixed:
                raise InputError(
                    f"{override.lstrip('+')}: does not apply to a plan file, which holds its whole problem; "
                    "remove it, or plan again"
                )
        return read_plan(self.config.plan)

    def _section(self, group: str) -> Section:
        """The mapping of `cluster` or `model`: a shipped configuration or the user's file, with overrides applied."""
        data, choice = getattr(self.config, group), self.choices.get(group)
        file_choice = FILE_CHOICES[group]
        if data is None or choice is None:
            names = ", ".join(name for name in config_names(group) if name != file_choice)
            cards = ", gpus=[3090,4090] with names of cards" * (group == "cluster")
            raise InputError(
                f"{group}: is missing; choose {group}=FILE with your own file{cards}, or {group}=NAME of {names}"
            )
        if choice != file_choice:
            return Section(data, f"{group}={choice}")
        path = data.get("path")
        if not isinstance(path, str) or not path:
            raise InputError(f"{group}.path: {path!r} is not a path; state {group}.path=FILE")
        file = config_file(path) if group == "model" else path
        over = {key: value for key, value in data.items() if key != "path"}
        read = read_config if group == "model" else read_mapping
        return Section(overlay(read(file), over), str(file))

    def _profile_folder(self) -> Path:
        """The folder that paths in the cluster file are relative to: the file's, unless an override gives one."""
        overridden = {"profile", "calibration"} & set(self.config.cluster or ())
        relative_to_file = self.choices.get("cluster") == FILE_CHOICES["cluster"] and not overridden
        return Path(self.config.cluster["path"]).parent if relative_to_file else Path()

    def _model_name(self) -> str | None:
        """The name of a user's model whose file states none."""
        file = None if self.choices.get("model") != FILE_CHOICES["model"] else self.config.model.get("path")
        return name_of_file(file) if isinstance(file, str) else None

    def drop(self, *names: str) -> None:
        """Delete result files that an earlier run left in the folder, so that it never mixes the files of two."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a result file atomically. Raises InputError where the folder cannot be written to."""
        if isinstance(content, str):
            self.draw(name, lambda path: write_text(path, content))
        else:
            self.draw(name, lambda path: path.write_bytes(content))

    def draw(self, name: str, draw: Callable[[Path], Any]) -> None:
        """Let `draw` write a result file, which appears atomically. Raises InputError."""
        path = self.folder / name
        partial = path.with_name(f".{name}.partial")
        try:
            draw(partial)
            partial.replace(path)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise InputError(f"{path}: {why}; choose another hydra.run.dir") from None
        finally:
            partial.unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write plain data as a JSON result file."""
        self.write(name, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def show(self, *renderables: Any) -> None:
        """Print for people, except in a sweep, where the output of jobs would interleave."""
        if not self.in_sweep:
            show(*renderables)

    def show_files(self, *names: str) -> None:
        """Print the paths of result files, relative to the working directory."""
        if not self.in_sweep:
            print()
            for name in names:
                print(os.path.relpath(self.folder / name))


def _inherit_rates(cluster: dict[str, Any]) -> dict[str, Any]:
    """A cluster's mapping in which machines state only network rates that are not the cluster's own."""
    common = {f"nic_{key}": value for key, value in cluster["inter_machine"].items()}
    machines = [
        {k: v for k, v in machine.items() if k not in common or v != common[k]} for machine in cluster["machines"]
    ]
    return {**cluster, "machines": machines}


def config_names(group: str) -> list[str]:
    """The names of the configurations in a group."""
    names = (entry.name for entry in files(own_package("conf")).joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def overlay(base: Any, over: Any) -> Any:
    """`over` merged into `base`: mappings by key, lists by index where `over` maps indices, else replaced."""
    if not isinstance(over, dict):
        return over
    if isinstance(base, list) and over:
        merged = list(base)
        for key, value in over.items():
            index = int(key) if str(key).isdecimal() else len(merged)
            if index >= len(merged):
                rule = f"is not an index of a list of {len(merged)} items"
                raise InputError(f"{key!r} {rule}; replace the whole list")
            merged[index] = overlay(merged[index], value)
        return merged
    if not isinstance(base, dict):
        return over
    return base | {key: overlay(base.get(key), value) for key, value in over.items()}


# --------------------------------------------------------------------------------- searching


def solvers_of(job: Job, names: Sequence[str]) -> list[Refereed]:
    """Solvers by name, each given the options `solver.*` that it accepts.

    Raises InputError as `hexiopt.solver` does, and for an option that none of them accepts.
    """
    options = job.config.solver.options()
    accepted = {name: {field.name for field in parameters(solver_class(name))} for name in names}
    if left := options.keys() - set().union(*accepted.values()):
        option = min(left)
        raise InputError(f"solver.{option}: none of {', '.join(names)} accepts it; name one that does, or remove it")
    return [
        hx.solver(name, **{key: value for key, value in options.items() if key in accepted[name]}) for name in names
    ]


def search(job: Job, problem: Problem, solver: Refereed | None = None, **changes: Any) -> Solution:
    """Search as configured, or by another `solver`, but for `changes` of the arguments of `hexiopt.solve`. Ctrl-C stops
    it; the result then has the best plan so far.

    Raises InputError, and InvalidPlanError where the plan breaks a rule.
    """
    with interrupt.caught():
        return hx.solve(problem, pricer=job.pricer, **(job.search_arguments(solver) | changes))


def plan_of(solution: Solution) -> PlacedPlan:
    """The plan of a solution. Raises NoPlanError with the reason where there is none."""
    if solution.plan is None:
        raise NoPlanError(f"{solution.status}: {solution.reason or f'{solution.solver} found no plan'}")
    return solution.plan


interrupt = Interrupt()


# ----------------------------------------------------------------------------------- running


def run_verb(verb: str, start: Callable[[], Job]) -> RunOutcome:
    """Run `experiments.<verb>.run` on the job that `start` returns; every exception becomes an outcome."""
    try:
        interrupt.pressed = False
        job = start()
        metric: float = import_module(module_of(verb)).run(job)
        if interrupt.pressed:
            return RunOutcome(metric, INTERRUPTED, "interrupted; the best plan so far is kept")
        return RunOutcome(metric)
    except BrokenPipeError:  # harmless: files are written before anything is printed
        mute()
        return RunOutcome(math.inf)
    except Exception as error:
        return failure(error)

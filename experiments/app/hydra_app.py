"""Hydra behind the command line: composes the configuration, runs a job or a sweep, reports errors in one line.

`hydra.main` exits with code 1 and several lines on every kind of error, and ends a sweep at its first failed job.
Hence its application object is used directly.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import version as hydra_version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from experiments.app import solver_config, sweeps
from experiments.app.common import INTERRUPTED, Job, RunOutcome, failure, run_verb, status_of
from experiments.app.compile import compile_once
from experiments.app.config import Config, register
from experiments.app.own_files import FILE_CHOICES, with_own_files
from experiments.app.terminal import plain_warnings
from experiments.app.verb_help import READS, keys_text, refuse_unread
from experiments.app.verbs import VERBS
from hexiopt.errors import InputError, did_you_mean
from hexiopt.files.sweep_files import STATUS_FILE
from hexiopt.reading import sha256_of
from solvers.registry import known

_CONFIG_ERRORS = (HydraException, OmegaConfBaseException)
_REFUSED = "refused"  # in the configuration of a job of a sweep: why it is wrong
_KEY = "job_key"  # and in Hydra's part of it: `sweeps.key_of`
_MERGING = "Error merging override "
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def run(verb: str, args: Sequence[str]) -> int:
    """Run a verb with Hydra's arguments; returns the exit code."""
    try:
        with plain_warnings():
            return _run(verb, args)
    except _CONFIG_ERRORS as error:
        outcome = RunOutcome(float("inf"), 2, one_line(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        if not error.filename:
            outcome = failure(error)
        else:
            what = f"{error.filename}: {error.strerror}; choose another folder for the results"
            outcome = RunOutcome(float("inf"), 2, what)
    except Exception as error:
        outcome = failure(error)
    return _ended(outcome)


def _ended(outcome: RunOutcome) -> int:
    if outcome.exit_code:
        print(f"hexiopt: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def _run(verb: str, args: Sequence[str]) -> int:
    parsed = _parse(args)
    refuse_unread(verb, [] if parsed.shell_completion else parsed.overrides)
    overrides = [_open(override) for override in with_own_files(parsed.overrides, parsed.config_dir)]
    if verb == "train" and not any(o.startswith(("workload=", "plan=", "experiment")) for o in overrides):
        overrides.append("workload=small")
    hydra_version.setbase("1.3")
    register()
    solver_config.register(_chosen_solvers(parsed), whole="solver" in READS[verb])
    search_path = create_automatic_config_search_path(None, None, parsed.config_path or "pkg://conf")
    if parsed.config_dir is not None:
        folder = Path(parsed.config_dir)
        if not folder.is_dir():
            raise InputError(f"--config-dir: {str(folder)!r} is not a folder; check the path")
        search_path.prepend("command-line", f"file://{folder.absolute()}")
    GlobalHydra.instance().clear()
    hydra = cast(_Hydra, _Hydra.create_main_hydra2(task_name=verb, config_search_path=search_path))
    hydra.config_loader = loader = _Loader(search_path)
    name = parsed.config_name or "config"
    try:
        if parsed.help:
            print(f"hexiopt {verb} [key=value ...]: {VERBS[verb]}\n")
            hydra.app_help(config_name=name, args_parser=get_args_parser(), args=parsed)
            composed = hydra.compose_config(name, overrides, RunMode.RUN, with_log_configuration=False)
            print(keys_text(verb, composed))
        elif parsed.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=get_args_parser(), args=parsed)
        elif parsed.cfg is not None:
            hydra.show_cfg(name, overrides, parsed.cfg, parsed.package, parsed.resolve)
        elif parsed.shell_completion:
            hydra.shell_completion(config_name=name, overrides=parsed.overrides)
        elif parsed.info is not None:
            hydra.show_info(parsed.info, config_name=name, overrides=overrides)
        elif parsed.multirun or (_may_set_mode(parsed) and hydra.get_mode(name, overrides) == RunMode.MULTIRUN):
            return _sweep(hydra, name, verb, [*sweeps.in_newest_folder(overrides), "hydra.mode=MULTIRUN"])
        else:
            for override in parsed.overrides:
                if override.lstrip("+").startswith("sweep."):
                    raise InputError(f"{override}: is for sweeps; add -m, or remove it")
            return _one(hydra, loader, name, verb, [*overrides, "hydra.mode=RUN"])
    except SystemExit as leave:  # Hydra's way of saying that a package of --cfg is unknown
        return 2 if leave.code else 0
    finally:
        GlobalHydra.instance().clear()
    return 0


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]

    def refuse(message: str) -> NoReturn:
        unknown = next((word for word in args if word.startswith("--") and word.partition("=")[0] not in flags), None)
        if unknown is None or not message.startswith("unrecognized"):
            raise InputError(f"{message}; see --hydra-help")
        near = get_close_matches(unknown, flags, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "see --hydra-help"
        raise InputError(f"{unknown}: is not a flag; {hint}")

    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_intermixed_args(list(args))
    if parsed.experimental_rerun is not None:
        raise InputError("--experimental-rerun: pickles are not read; a plan file states how it was made")
    for override in parsed.overrides:
        if "=" not in override and not override.startswith("~") and not parsed.shell_completion:
            raise InputError(f"{override!r}: is not an override; write key=value")
    return parsed


def _may_set_mode(parsed: argparse.Namespace) -> bool:
    """Whether `hydra.mode` may be set other than by --multirun: by an experiment, the user's files or an override.

    To find out for certain, the configuration has to be composed once more, which the folder of a run does not ask for.
    """
    foreign = (parsed.config_path, parsed.config_dir, parsed.config_name)
    stated = [override.lstrip("+") for override in parsed.overrides]
    return any(foreign) or any(
        override.startswith(("experiment", "hydra")) and not override.startswith("hydra.run.") for override in stated
    )


def _chosen_solvers(parsed: argparse.Namespace) -> set[str] | None:
    """The solvers whose schemas may be needed (importing each takes time); None for all of them."""
    others = (parsed.help, parsed.hydra_help, parsed.shell_completion, parsed.info, parsed.config_path)
    if any(others) or parsed.config_dir or parsed.config_name:
        return None
    chosen = {"portfolio"}
    for override in parsed.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "experiment" or key.startswith("hydra.searchpath"):
            return None
        if key == "solver":
            chosen |= set(re.findall(r"\w+", value))
    return chosen


def _open(override: str) -> str:
    """Allow any key below `cluster` and `model` to be set or added; their readers check the keys."""
    return f"++{override}" if override.startswith(("cluster.", "model.")) else override


def _one(hydra: Hydra, loader: "_Loader", name: str, verb: str, overrides: list[str]) -> int:
    returned = hydra.run(config_name=name, task_function=partial(task, verb, False), overrides=overrides)
    outcome: RunOutcome = returned.return_value
    for folder in loader.new_folders:  # remove what Hydra created, unless it holds results
        try:
            folder.rmdir()
        except OSError:
            break
    return _ended(outcome)


def _sweep(hydra: "_Hydra", name: str, verb: str, overrides: list[str]) -> int:
    began_s = time.time()
    if "solver" in READS[verb]:
        compile_once()  # here, not in each of a launcher's processes
    try:
        hydra.multirun(config_name=name, task_function=partial(task, verb, True), overrides=overrides)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(sweeps.how_to_resume(hydra.sweep_folder)) from None
    return sweeps.summary(hydra.sweep_folder, began_s)


def task(verb: str, in_sweep: bool, cfg: DictConfig) -> RunOutcome:
    """Run one job, in this process or a launcher's. It never raises; in a sweep it writes `status.json`."""
    hydra: Any = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    given: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides = sweeps.plain(given) if in_sweep else [override.removeprefix("++") for override in given]

    def start() -> Job:
        refused = OmegaConf.select(cfg, _REFUSED)
        if refused is not None:
            raise InputError(refused)
        try:
            config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise InputError(one_line(error)) from None
        choices: dict[str, Any] = {k: v for k, v in hydra.runtime.choices.items() if v not in (None, "null")}
        return Job(verb, config, folder, choices, overrides, in_sweep)

    if not in_sweep:
        return run_verb(verb, start)
    key = str(OmegaConf.select(hydra, _KEY))
    outcome = sweeps.settled(folder, key) if _resumes(cfg) else None
    known = outcome is not None
    if outcome is None:
        began_s = time.perf_counter()
        outcome = run_verb(verb, start)
        status = status_of(outcome, overrides, time.perf_counter() - began_s, key)
        Job(verb, Config(), folder, {}, overrides, True).write_json(STATUS_FILE, status)
    said = f"{outcome:.6g} s" if not outcome.exit_code else f"exit code {outcome.exit_code}"
    print(f"#{hydra.job.num}: {said}{', known already' if known else ''}", flush=True)
    if outcome.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return outcome


def _resumes(cfg: DictConfig) -> bool:
    return bool(OmegaConf.select(cfg, "sweep.resume"))


class _Hydra(Hydra):
    """Remembers the last configuration that it composed; a sweep's has the folder of its jobs."""

    composed: DictConfig

    def compose_config(self, *args: Any, **kwargs: Any) -> DictConfig:
        self.composed = super().compose_config(*args, **kwargs)
        if kwargs.get("run_mode") == RunMode.MULTIRUN and kwargs.get("with_log_configuration"):  # not just for its mode
            sweeps.asked_for(self.composed, self.config_loader)
        return self.composed

    @property
    def sweep_folder(self) -> Path:
        """The folder of the sweep."""
        return Path(str(self.composed.hydra.sweep.dir))


class _Loader(ConfigLoaderImpl):
    """Composes configurations. Where the configuration of a job in a sweep is invalid, the job reports so when it runs.

    `new_folders` are the folders that a single run will create, innermost first.
    """

    new_folders: tuple[Path, ...] = ()

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self._folders = sweeps.Folders()

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        try:
            cfg = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        except ValueError as error:  # such as workload=null
            raise ConfigCompositionException(str(error)) from None
        if run_mode == RunMode.RUN:
            try:
                folder = Path(str(cfg.hydra.run.dir)).absolute()
            except OmegaConfBaseException:
                return cfg
            self.new_folders = tuple(path for path in (folder, *folder.parents) if not path.exists())
        return cfg

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """As Hydra's, which copies every configuration for each of the groups that a help text lists."""
        if any("searchpath" in override for override in overrides or ()):
            return super().get_group_options(group_name, results_filter, config_name, overrides)
        return self.repository.get_group_options(group_name, results_filter)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        cfg = self._load_job(master_config, sweep_overrides)
        key = _key_of(cfg)
        with open_dict(cfg.hydra):
            cfg.hydra[_KEY] = key
            if _resumes(master_config):
                cfg.hydra.sweep.subdir = self._folders.name(Path(str(master_config.hydra.sweep.dir)), key)
        return cfg

    def _load_job(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        try:
            return super().load_sweep_config(master_config, sweep_overrides)
        except _CONFIG_ERRORS as error:
            refused = one_line(error)
        hydra_only = [override for override in sweep_overrides if override.startswith("hydra.")]
        cfg = super().load_sweep_config(master_config, hydra_only)
        with open_dict(cfg):
            cfg[_REFUSED] = refused
            cfg.hydra.overrides.task = [o for o in sweep_overrides if not o.startswith("hydra.")]
        return cfg


def _key_of(cfg: DictConfig) -> str:
    """The key of a job of a sweep; of one whose configuration is wrong, by its overrides."""
    overrides: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    plain = sweeps.plain(overrides)
    try:
        if OmegaConf.select(cfg, _REFUSED) is None:
            bare = deepcopy(cfg)
            with flag_override(bare, ["struct", "readonly"], [False, False]):
                del bare["hydra"]
            config: Config = OmegaConf.to_object(bare)  # type: ignore[assignment]
            choices = {k: v for k, v in cfg.hydra.runtime.choices.items() if v not in (None, "null")}
            return sweeps.key_of(str(cfg.hydra.job.name), config, choices, plain)
    except (OmegaConfBaseException, InputError):
        pass
    return sha256_of({"verb": str(cfg.hydra.job.name), "refused": sorted(plain)})[:16]


# ------------------------------------------------------------------------------------ errors


def one_line(error: BaseException) -> str:
    """An error of Hydra or OmegaConf as one line: value, rule, remedy."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for part in chain:
        said = _said(part)
        if said:
            return " ".join(said.split())
    texts = [str(part).splitlines()[0].rstrip(".") for part in chain if str(part)] or [type(error).__name__]
    if texts[0].startswith(_MERGING):
        override = texts[0].removeprefix(_MERGING).lstrip("+")
        texts = [f"{override}: cannot be merged ({' '.join(texts[1:2])})"]
    return f"{texts[0]}; see --help for groups and keys"


def _said(error: BaseException) -> str | None:
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0].split(": ", 1)[-1].rstrip(".")
        what = f"{error.override!r}: is not an override ({reason})"
        return f"{what}; write key=value, and quote what is not a plain word"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error)
    if isinstance(error, ValidationError):
        key, text = error.full_key, str(error).splitlines()[0]
        kind = next((words for name, words in _TYPES.items() if text.endswith(name)), None)
        if text.startswith("Value ") and kind:
            return f"{key}: {text.removeprefix('Value ').split(' of type ')[0]} is not {kind}; state one"
        if "is not a valid bool" in text:
            return f"{key}: {text.removeprefix('Value ').split(' is not ')[0]} is not true or false; state one"
        if "is not a ListConfig" in text:
            return f"{key}: is not a list; write {key}=[a,b]"
        return f"{key}: {text[:1].lower()}{text[1:]}; see --help for its type"
    if isinstance(error, MissingMandatoryValue):
        key = getattr(error, "full_key", None) or str(error).rsplit(": ", 1)[-1]
        return f"{key}: is missing; state {key}=..."
    said = str(error)
    if said.startswith("Could not append to config"):
        key = said.partition("'")[2].partition("'")[0]
        return f"{key}: exists already; remove the + before it"
    if said.startswith("Ambiguous value for argument"):
        argument = said.splitlines()[0].removeprefix("Ambiguous value for argument ").strip("'")
        return f"{argument!r}: has several values; sweep over them with -m, or write a list as key=[a,b]"
    if said.startswith("Sweep parameters "):
        override = said.removeprefix("Sweep parameters ").split(" requires")[0]
        return f"{override}: has several values; sweep over them with -m"
    return None


def _unknown_choice(error: MissingConfigException) -> str | None:
    group, slash, name = (error.missing_cfg_file or "").rpartition("/")
    if not slash or not error.options:
        return None
    hint = did_you_mean(name, known() if group == "solver" else error.options)
    if (group, name) == ("hydra/launcher", "joblib"):
        hint = "it comes with pip install -e '.[joblib]'"
    return f"{group}: {name!r} is not known; {hint}"


def _unknown_key(error: ConfigAttributeError | ConfigKeyError) -> str | None:
    key = str(error.full_key or error.key or "")
    parent = error.parent_node
    if not key or not OmegaConf.is_dict(parent):
        return None
    names = [str(name) for name in parent if name != "hydra"]
    last = key.rpartition(".")[2]
    if "." not in key and not get_close_matches(last, names, cutoff=0.6):
        inner = {str(name): group for group in names for name in _keys_of(parent, group)}
        near = get_close_matches(last, inner, n=1, cutoff=0.75)
        if near:
            return f"{key}: unknown key; did you mean {inner[near[0]]}.{near[0]}?"
    return f"{key}: unknown key; {did_you_mean(last, names)}"


def _keys_of(config: Any, group: str) -> list[Any]:
    """The keys of a group of the configuration; of `cluster` and `model`, which are free, none."""
    found = config._get_node(group)
    typed = OmegaConf.is_dict(found) and not found._is_none() and not found._is_missing() and group not in FILE_CHOICES
    return list(found) if typed else []

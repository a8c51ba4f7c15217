"""Hydra behind the command line: one `hydra.main` composes the configuration of a verb and runs a job, or its sweep."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app import solver_config, sweeps
from experiments.app.common import Job, RunOutcome, run_verb
from experiments.app.config import READS, register
from experiments.app.config_errors import config_of, outcome_of
from experiments.app.flags import parse, words
from experiments.app.own_files import with_own_files
from experiments.app.terminal import plain_warnings
from experiments.app.verb_help import help_text, refusal, refuse_unread
from hexiopt.errors import InputError
from hexiopt.own_packages import own_package

_VERSION = "1.3"  # of Hydra, whose behaviour is asked for
_FULL_ERROR = "HYDRA_FULL_ERROR"  # with it, Hydra raises errors, which we tell in one line, and does not print them


def run(verb: str, args: Sequence[str]) -> int:
    """Run a verb with Hydra's arguments; returns the exit code."""
    try:
        with plain_warnings():
            return _run(verb, args)
    except BrokenPipeError:
        raise
    except Exception as error:
        outcome = outcome_of(error, verb)
        experiments = [word for word in args if word.startswith("experiment=")]
        if experiments and outcome.message == refusal(verb, outcome.message.partition(":")[0]):  # not typed
            outcome.message = f"{', '.join(experiments)}: {outcome.message}"
        return outcome.report()


def _run(verb: str, args: Sequence[str]) -> int:
    flags = parse(args)
    refuse_unread(verb, [] if flags.shell_completion else flags.overrides)
    overrides = [_open(override) for override in with_own_files(flags.overrides, flags.config_dir)]
    register(verb)
    if "solver" in READS[verb]:
        solver_config.register(_chosen_solvers(verb, flags))
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    if flags.help:
        print(_help(verb, flags, overrides))
        return 0
    main = hydra.main(version_base=_VERSION, config_path=f"pkg://{own_package('conf')}", config_name=verb)(task)
    try:
        with _arguments([*words(flags), *sweeps.in_newest_folder(overrides)]):
            main()
    except SystemExit as end:  # how `sweeps.Outcomes` ends; and Hydra, where it does not know a package of --cfg
        return 2 if flags.cfg and end.code else int(end.code or 0)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*sweeps.how_to_resume()) from None
    if flags.hydra_help or flags.cfg or flags.shell_completion or flags.info:
        return 0
    name = flags.config_name or verb
    raise InputError(f"--config-name: {name!r} is not a configuration of {verb}; begin its defaults with - {verb}")


@contextmanager
def _arguments(args: Sequence[str]) -> Iterator[None]:
    """A context in which `args` are those of the process, and Hydra raises its errors."""
    argv, full = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv = [argv[0], *args]
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ[_FULL_ERROR]
        if full is not None:
            os.environ[_FULL_ERROR] = full


def _help(verb: str, flags: argparse.Namespace, overrides: list[str]) -> str:
    search_path = [] if flags.config_dir is None else [f"hydra.searchpath=[file://{Path(flags.config_dir).absolute()}]"]
    with hydra.initialize_config_module(own_package("conf"), job_name=verb, version_base=_VERSION):
        config = hydra.compose(flags.config_name or verb, [*overrides, *search_path], return_hydra_config=True)
        groups = [group for group in config.hydra.runtime.choices if group.partition("/")[0] != "hydra"]
        loader = GlobalHydra.instance().config_loader()
        options = {group: loader.get_group_options(group, overrides=search_path) for group in sorted(groups)}
    return help_text(verb, config, options)


def _chosen_solvers(verb: str, flags: argparse.Namespace) -> set[str] | None:
    """The solvers whose schemas may be needed (importing each takes time); None for all of them."""
    if any((flags.help, flags.shell_completion, flags.config_path, flags.config_dir, flags.config_name)):
        return None
    chosen = {"rules" if verb == "fit" else "portfolio"}
    for override in flags.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("experiment", "sweep") or key.startswith("hydra.searchpath"):
            return None
        if key == "solver":
            chosen |= set(re.findall(r"\w+", value))
    return chosen


def _open(override: str) -> str:
    """Allow any key below `cluster` and `model` to be set or added; their readers check the keys."""
    return f"++{override}" if override.startswith(("cluster.", "model.")) else override


def task(cfg: DictConfig) -> RunOutcome:
    """Run one job, in this process or a launcher's. It raises no exception: what is wrong is in its outcome."""
    hydra_config: Any = HydraConfig.get()
    in_sweep = sweeps.in_sweep(hydra_config)
    folder = Path(hydra_config.runtime.output_dir)
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    verb = sweeps.verb_of(cfg)

    def start() -> Job:
        if not in_sweep and (
            stray := next((word for word in overrides if word.lstrip("+").startswith("sweep.")), None)
        ):
            raise InputError(f"{stray}: is for sweeps; add -m, or remove it")
        return Job(config_of(cfg, verb), folder, sweeps.choices_of(hydra_config), sweeps.plain(overrides), in_sweep)

    if in_sweep and (known := sweeps.known_outcome(cfg, hydra_config)) is not None:
        return known
    return run_verb(verb, start)

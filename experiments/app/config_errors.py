"""A composed configuration as a typed one; errors of Hydra and OmegaConf as one line: value, rule, remedy."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from experiments.app.common import RunOutcome, failure
from experiments.app.config import Config
from experiments.app.own_files import FILE_CHOICES
from experiments.app.verb_help import refusal
from hexiopt.errors import InputError, did_you_mean
from solvers.registry import known

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, ValueError)  # the last for workload=null and the like
REFUSED = "refused"  # in the configuration of a job of a sweep: why it is wrong
_EXTRAS = {"joblib": "joblib", "optuna": "sweeps", "submitit_slurm": "sweeps", "submitit_local": "sweeps"}
_MERGING = "Error merging override "
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def outcome_of(error: Exception, verb: str) -> RunOutcome:
    """The outcome of a command that an exception of Hydra, of a file system or of ours ended."""
    if isinstance(error, CONFIG_ERRORS) and not isinstance(error, InputError):
        return RunOutcome(float("inf"), 2, one_line(error, verb))
    if isinstance(error, OSError) and error.filename:
        what = f"{error.filename}: {error.strerror}; choose another folder for the results"
        return RunOutcome(float("inf"), 2, what)
    return failure(error)


def config_of(cfg: DictConfig, verb: str) -> Config:
    """A composed configuration as the schema of its verb. Raises InputError, also for keys that a + has added to it."""
    if reason := OmegaConf.select(cfg, REFUSED):
        raise InputError(reason)
    try:
        config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise InputError(one_line(error, verb)) from None
    if stray := next(_strays(config), None):
        raise InputError(f"{stray}: unknown key; remove it (a + adds keys to cluster and model alone)")
    return config


def _strays(config: Any, prefix: str = "") -> Iterator[str]:
    names = {key.name for key in fields(config)}
    for name, value in vars(config).items():
        if name not in names:
            yield prefix + name
        elif is_dataclass(value):
            yield from _strays(value, f"{prefix}{name}.")


def one_line(error: BaseException, verb: str) -> str:
    """An error of Hydra or OmegaConf as one line: value, rule, remedy."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for part in chain:
        message = _message(part, verb)
        if message:
            return " ".join(message.split())
    texts = [str(part).splitlines()[0].rstrip(".") for part in chain if str(part)] or [type(error).__name__]
    if texts[0].startswith(_MERGING):
        override = texts[0].removeprefix(_MERGING).lstrip("+")
        texts = [f"{override}: cannot be merged ({' '.join(texts[1:2])})"]
    return f"{texts[0]}; see --help for groups and keys"


def _message(error: BaseException, verb: str) -> str | None:
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0].split(": ", 1)[-1].rstrip(".")
        what = f"{error.override!r}: is not an override ({reason})"
        return f"{what}; write key=value, and quote what is not a plain word"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error, verb)
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
    message = str(error)
    if message.startswith("Could not append to config"):
        key = message.partition("'")[2].partition("'")[0]
        return f"{key}: exists already; remove the + before it"
    if message.startswith("Ambiguous value for argument"):
        argument = message.splitlines()[0].removeprefix("Ambiguous value for argument ").strip("'")
        return f"{argument!r}: has several values; sweep over them with -m, or write a list as key=[a,b]"
    if message.startswith("Sweep parameters "):
        override = message.removeprefix("Sweep parameters ").split(" requires")[0]
        return f"{override}: has several values; sweep over them with -m"
    return None


def _unknown_choice(error: MissingConfigException) -> str | None:
    group, slash, name = (error.missing_cfg_file or "").rpartition("/")
    if not slash or not error.options:
        return None
    hint = did_you_mean(name, known() if group == "solver" else error.options)
    if name in _EXTRAS and group.startswith("hydra/"):
        hint = f"it comes with pip install -e '.[{_EXTRAS[name]}]'"
    return f"{group}: {name!r} is not known; {hint}"


def _unknown_key(error: ConfigAttributeError | ConfigKeyError, verb: str) -> str | None:
    key = str(error.full_key or error.key or "")
    parent = error.parent_node
    if of_others := refusal(verb, key):
        return of_others
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
    node = config._get_node(group)
    typed = OmegaConf.is_dict(node) and not node._is_none() and not node._is_missing() and group not in FILE_CHOICES
    return list(node) if typed else []

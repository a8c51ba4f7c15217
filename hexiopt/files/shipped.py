"""The clusters and models that ship with hexiopt, by name: the YAML files of the package `conf`."""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.own_packages import own_package
from hexiopt.reading import read_mapping

_FOR_A_PATH = {"cluster": "file", "model": "hf"}  # configurations that only hold the path of a user's file


def shipped_names(group: str) -> list[str]:
    """The names of the shipped clusters (`group` "cluster") or models ("model"), sorted."""
    entries = (entry.name for entry in files(own_package("conf")).joinpath(group).iterdir())
    names = (name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))
    return sorted(name for name in names if name != _FOR_A_PATH.get(group))


def read_shipped(group: str, name: str) -> dict[str, Any]:
    """Read the file of the shipped cluster or model `name`. Raises InputError for an unknown name."""
    names = shipped_names(group)
    if name not in names:
        raise InputError(f"{group}: {quoted(name)} is not known; {did_you_mean(name, names)}")
    with as_file(files(own_package("conf")).joinpath(group, f"{name}.yaml")) as file:
        return read_mapping(file)


def is_shipped(group: str, source: str) -> bool:
    """Whether `source` names a shipped cluster or model, not a user's file: a path with a folder, a suffix, or both.

    Raises InputError for a bare word that is neither a shipped name nor a file.
    """
    path = Path(source)
    if source in shipped_names(group):
        return True
    if path.suffix or path.name != source or path.exists():
        return False
    hint = did_you_mean(source, shipped_names(group))
    raise InputError(f"{group}: {quoted(source)} is neither a shipped {group} nor a file; {hint}")

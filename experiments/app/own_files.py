"""What Hydra would take for something else, as overrides that it reads: `cluster=FILE` and `model=FILE`, which look
like names of configurations, and devices as keys, as in `slow={a:3: 0.7}`, whose colons look like those after keys.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.files.hub import is_hub_name
from hexiopt.files.shipped import shipped_names

FILE_CHOICES = {"cluster": "file", "model": "hf"}
"""The configuration of each group that reads the file at `GROUP.path`."""

_SUFFIXES = (".yaml", ".yml", ".json")
_BY_DEVICE = ("slow",)
_PLAIN = re.compile(r"[\w./-]+")
_DEVICE_KEY = re.compile(r"([A-Za-z0-9_.-]+):([0-9]+)\s*:")


def shell_override(key: str, path: Path) -> str:
    """An override that names a file, as it is typed in a shell: relative to the working directory."""
    name = os.path.relpath(path)
    if _PLAIN.fullmatch(name):
        return f"{key}={name}"
    word = f"{key}={_quote(name)}"
    return shlex.quote(word) if set(word) & set('"$`\\!') else f'"{word}"'


def with_own_files(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """`overrides` with `cluster=my.yaml` as `cluster=file` and `cluster.path=my.yaml`, and so for `model`, which may be
    a name ORG/NAME on the Hub too.

    A value is a file or folder if it exists or looks like a path, and names no configuration, shipped or in
    `config_dir`. A sweep may list several. Raises InputError for a file that does not exist, and for a list of both
    names and files.
    """
    return [rewritten for override in overrides for rewritten in _rewrite(override, config_dir)]


def _rewrite(override: str, config_dir: str | None) -> Iterator[str]:
    group, _, value = override.partition("=")
    if group in _BY_DEVICE:
        yield group + "=" + _DEVICE_KEY.sub(r"\1\\:\2:", value)
        return
    if group not in FILE_CHOICES or not value:
        yield override
        return
    listed = [value] if _is_file(group, value, config_dir) else [part.strip() for part in value.split(",")]
    files = [part for part in listed if _is_file(group, part, config_dir)]
    if not files:
        yield override
        return
    if len(files) < len(listed):
        name = next(part for part in listed if part not in files)
        raise InputError(f"{override}: {name!r} is a name and {files[0]!r} a file; sweep over names or over files")
    for file in files:
        if group == "model" and is_hub_name(_unquote(file)):
            continue
        if not (path := Path(_unquote(file)).expanduser()).exists():
            raise InputError(f"{group}={file}: the file {str(path)!r} does not exist; check the path")
    yield f"{group}={FILE_CHOICES[group]}"
    yield f"{group}.path={','.join(_quote(_unquote(file)) for file in files)}"


def _is_file(group: str, value: str, config_dir: str | None) -> bool:
    value = _unquote(value)
    if not value or "${" in value or value in (*shipped_names(group), FILE_CHOICES[group]):
        return False
    if config_dir is not None and Path(config_dir, group, value).with_suffix(".yaml").exists():
        return False
    path = Path(value).expanduser()
    if "," in value:
        return path.exists()
    return value.endswith(_SUFFIXES) or "/" in value or path.exists()


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _quote(path: str) -> str:
    """The path as a quoted string of Hydra's grammar."""
    text = str(Path(path).expanduser()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"

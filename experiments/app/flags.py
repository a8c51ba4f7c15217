"""The flags of a verb's command line: Hydra's, in any order, of which an unknown one is refused in one line."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from hexiopt.errors import InputError

_SWITCHES = {
    "--help": "-h",
    "--hydra-help": None,
    "--resolve": None,
    "--run": "-r",
    "--multirun": "-m",
    "--shell-completion": "-sc",
}
_VALUES = {
    "--cfg": "-c",
    "--package": "-p",
    "--config-path": "-cp",
    "--config-name": "-cn",
    "--config-dir": "-cd",
    "--experimental-rerun": None,
}
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The flags and `overrides` of a command line. Raises InputError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, short in _SWITCHES.items():
        parser.add_argument(flag, *filter(None, [short]), action="store_true")
    for flag, short in _VALUES.items():
        parser.add_argument(flag, *filter(None, [short]), choices=("job", "hydra", "all") if flag == "--cfg" else None)
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=_INFO)
    parser.add_argument("overrides", nargs="*")
    known = (*_SWITCHES, *_VALUES, "--info")

    def refuse(message: str) -> NoReturn:
        unknown = next((word for word in args if word.startswith("--") and word.partition("=")[0] not in known), None)
        if unknown is None or not message.startswith("unrecognized"):
            raise InputError(f"{message}; see --hydra-help")
        near = get_close_matches(unknown, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "see --hydra-help"
        raise InputError(f"{unknown}: is not a flag; {hint}")

    parser.error = refuse  # type: ignore[method-assign]
    flags = parser.parse_intermixed_args(list(args))
    if flags.experimental_rerun is not None:
        raise InputError("--experimental-rerun: pickles are not read; a plan file states how it was made")
    for override in flags.overrides:
        if "=" not in override and not override.startswith("~") and not flags.shell_completion:
            raise InputError(f"{override!r}: is not an override; write key=value")
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise InputError(f"--config-dir: {flags.config_dir!r} is not a folder; check the path")
    if flags.config_path is not None and "://" not in flags.config_path:
        flags.config_path = str(Path(flags.config_path).absolute())
    return flags


def words(flags: argparse.Namespace) -> list[str]:
    """The flags, without overrides, as Hydra's own parser takes them."""
    arguments: list[str] = []
    for flag in (*_SWITCHES, *_VALUES, "--info"):
        value = getattr(flags, flag.removeprefix("--").replace("-", "_"))
        if value:
            arguments += [flag] if value is True else [flag, value]
    return arguments

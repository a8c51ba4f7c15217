"""The settings that a command line states by dotted names, as torchtitan takes them."""

import re
from typing import Any

from hexiopt.exports.shell.scripts import Words, read_script

_DOTTED = re.compile(r"(?<!\S)--([A-Za-z]\w*\.[\w.-]+)")
_WORDS = {"true": True, "false": False, "none": None}


def has_dotted_arguments(text: str) -> bool:
    """Whether arguments such as `--training.seq_len` stand in a text."""
    return _DOTTED.search(text) is not None


def dotted_settings(text: str, where: str) -> tuple[dict[str, Any], int | None, tuple[str, ...]]:
    """The arguments of the command in a script that has dotted ones, the number of ranks if stated, and notes.

    Names have underscores. An argument without a value is true or, where its last part begins with `no_`, false.
    Raises InputError as `read_script` does.
    """
    script = read_script(text, where, {name.replace("_", "-") for name in _DOTTED.findall(text)})
    settings: dict[str, Any] = {}
    for argument, words in script.arguments.items():
        *tables, name = argument.replace("-", "_").split(".")
        off = not words and name.startswith("no_")
        settings[".".join([*tables, name.removeprefix("no_") if off else name])] = (
            not off if not words else _value(words)
        )
    return settings, script.world, script.notes


def _value(words: Words) -> Any:
    values = [_literal(str(word)) for word in words]
    return values[0] if len(values) == 1 else values


def _literal(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return _WORDS.get(word.lower(), word)

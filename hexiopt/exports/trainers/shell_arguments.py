"""The arguments `--name value ...` in a shell script, whose plain variables are filled in; nothing is run."""

import re
import shlex

from hexiopt.errors import InputError

_ASSIGNED = re.compile(r"(?:^|;)[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?!\()(\"[^\"]*\"|'[^']*'|[^\s;]*)", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\"'\n]*$", re.MULTILINE)
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)=\(([^)]*)\)", re.MULTILINE)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
_MOST = 20  # variables within variables


def shell_arguments(text: str, where: str) -> dict[str, list[str]]:
    """The values of each argument, by its name without dashes; of an argument stated twice, the last.

    Values of variables that the script does not set stay as they are written. Raises InputError where quotes do not
    close or no argument is found.
    """
    joined = re.sub(r"\\\n", " ", text)
    joined = _COMMENT.sub("", "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#")))
    variables = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(joined)}
    arrays = dict(_ARRAY.findall(joined))
    found: dict[str, list[str]] = {}
    for chunk in [*variables.values(), *arrays.values(), _without(joined)]:
        name = None
        for word in _words(_filled(chunk, variables), where):
            if re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", word):
                name, equals, value = word[2:].partition("=")
                name = name.replace("_", "-")
                found[name] = [value] if equals else []
            elif name is not None and re.fullmatch(r"[|&;<>]+.*", word):
                name = None
            elif name is not None:
                found[name].append(word)
    if not found:
        raise InputError(f"{where}: has no argument --name value; give the script or the arguments of a training run")
    return found


def _without(text: str) -> str:
    """The text without assignments, which have been read."""
    return _ARRAY.sub("", _ASSIGNED.sub("", text))


def _filled(text: str, variables: dict[str, str]) -> str:
    for _ in range(_MOST):
        filled = _USED.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
        if filled == text:
            break
        text = filled
    return text


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{where}: is not a shell script ({error}); correct its quotes") from None

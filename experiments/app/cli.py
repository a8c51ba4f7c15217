"""`hexiopt VERB [Hydra overrides]`; the program starts in `hexiopt/command.py`.

Exit codes: 0 done, 2 bad input, 3 no feasible plan, 1 unexpected error, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

from experiments.app.terminal import mute
from experiments.app.verbs import VERBS
from hexiopt.errors import InputError
from hexiopt.own_packages import PACKAGES, own_package

_COMPLETION = ("-sc", "--shell-completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(args)
    except KeyboardInterrupt as stop:
        print(": ".join(["hexiopt", *filter(None, ["interrupted", str(stop)])]), file=sys.stderr)
        return 130
    except BrokenPipeError:
        mute()
        return 0


def _main(args: list[str]) -> int:
    if "--version" in args:
        print(f"hexiopt {_version()}")
        return 0
    if any(arg in _COMPLETION for arg in args):
        args = _completion([arg for arg in args if arg not in VERBS])
        if not args:
            return 0
    if not args:
        print(f"hexiopt: no verb; state one of {', '.join(VERBS)} (hexiopt --help)", file=sys.stderr)
        return 2
    if args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    verb, overrides = args[0], args[1:]
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VERBS)}"
        print(f"hexiopt: {verb!r} is not a verb; {hint}", file=sys.stderr)
        return 2
    try:
        for name in PACKAGES:
            own_package(name)
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    from experiments.app.hydra_app import run

    return run(verb, overrides)


def _version() -> str:
    try:
        return version("hexiopt")
    except PackageNotFoundError:
        return "(not installed)"


def _usage() -> str:
    lines = ["hexiopt VERB [key=value ...]", ""]
    lines += [f"  {verb:9} {does}" for verb, does in VERBS.items()]
    lines += [
        "",
        "  hexiopt plan cluster=small_mixed model=llama2_7b",
        "  hexiopt plan --help    groups, configurations and values of a verb; -m sweeps",
        "",
        "Exit codes: 0 done, 2 bad input, 3 no feasible plan, 1 unexpected (HEXIOPT_DEBUG=1: traceback)",
    ]
    return "\n".join(lines)


def _completion(args: list[str]) -> list[str]:
    """Arguments for the completion of a verb's overrides, the verb taken out of COMP_LINE.

    The shell calls `hexiopt -sc query=SHELL` with the line so far in COMP_LINE. While that holds only a part of
    the verb, print the verbs that complete it and return [].
    """
    if not any(arg.startswith("query=") for arg in args):
        return ["plan", *args]
    words = os.environ.get("COMP_LINE", "").split(" ")
    program, rest = words[0], [word for word in words[1:] if word] + [""] * (words[-1] == "")
    if len(rest) < 2:
        print(" ".join(verb for verb in VERBS if verb.startswith(rest[0] if rest else "")))
        return []
    os.environ["COMP_LINE"] = " ".join([program, *rest[1:]])
    return [rest[0] if rest[0] in VERBS else "plan", *args]


if __name__ == "__main__":
    sys.exit(main())

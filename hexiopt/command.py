"""The program `hexiopt`, also `python -m hexiopt`: the command line, unless a folder of the user's hides a part of it.

`python -m` looks for modules in the current folder first. The command line is in `experiments`, a name that a folder
there may well have, so the program starts here, where it can still say so in one line.
"""

import sys
from importlib import import_module

from hexiopt.errors import InputError
from hexiopt.own_packages import refuse_hidden


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        refuse_hidden("experiments", "solvers", "conf", "runtime")
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    code: int = import_module("experiments.app.cli").main()
    return code

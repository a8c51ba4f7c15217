"""The program `hexiopt`, also `python -m hexiopt`: the command line, unless a folder of the user's hides a part of it.

`python -m` looks for modules in the current folder first. The command line is in `experiments`, which is a common name
for a folder there, so the program starts here, where it can still report the clash in one line.
"""

import os
import sys
from importlib import import_module

from hexiopt.errors import InputError
from hexiopt.own_packages import PACKAGES, own_package


def main() -> int:
    """Run the command line; returns the exit code."""
    _open_closed_streams()
    try:
        ours = {name: own_package(name) for name in PACKAGES}
    except InputError as error:
        print(f"hexiopt: {error}", file=sys.stderr)
        return 2
    code: int = import_module(f"{ours['experiments']}.app.cli").main()
    return code


def _open_closed_streams() -> None:
    """Open standard streams that the caller has closed (`>&-`) on /dev/null; else a file opened later becomes one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))

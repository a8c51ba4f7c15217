"""Where our other packages are: beside hexiopt in a checkout, in `hexiopt.packages` in a wheel.

Their names are common, so that a checkout's may be hidden by a user's folder, and a wheel must not take them
(`experiments/packaging/backend.py`).
"""

from importlib.util import find_spec
from pathlib import Path

from hexiopt.errors import InputError

PACKAGES = ("conf", "experiments", "runtime", "solvers")
_HERE = Path(__file__).resolve().parent
_INSIDE = _HERE / "packages"
IN_A_WHEEL = _INSIDE.is_dir()
HOME = _INSIDE if IN_A_WHEEL else _HERE.parent
"""The folder that has them."""


def own_package(name: str) -> str:
    """The name by which Python imports our package `name`. Raises InputError where a user's folder hides it."""
    if IN_A_WHEEL:
        return f"hexiopt.packages.{name}"
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a specification
        return name
    ours = HOME / name
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    first = next((Path(path).resolve() for path in places if path), ours)
    if first != ours and ours.is_dir():
        raise InputError(f"{first}: hides hexiopt's own package {name!r}; rename it, or run from another folder")
    return name

"""Our top-level packages beside `hexiopt` have common names, which a folder of the user's may have too."""

from importlib.util import find_spec
from pathlib import Path

from hexiopt.errors import InputError

_HOME = Path(__file__).resolve().parent.parent


def refuse_hidden(*names: str) -> None:
    """Raises InputError where a user's folder or module hides our package of one of `names` from Python."""
    for name in names:
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a specification
            continue
        own = _HOME / name
        found = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        first = next((Path(path).resolve() for path in found if path), own)
        if first != own and own.is_dir():
            raise InputError(f"{first}: hides hexiopt's own package {name!r}; rename it, or run from another folder")

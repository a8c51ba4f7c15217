"""Our other top-level packages have common names, which a user's folder may have too."""

from importlib.util import find_spec
from pathlib import Path

from hexiopt.errors import InputError

_HOME = Path(__file__).resolve().parent.parent


def refuse_hidden(*names: str) -> None:
    """Raise InputError where a user's folder or module hides one of our packages `names` from Python."""
    for name in names:
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a specification
            continue
        ours = _HOME / name
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        first = next((Path(path).resolve() for path in places if path), ours)
        if first != ours and ours.is_dir():
            raise InputError(f"{first}: hides hexiopt's own package {name!r}; rename it, or run from another folder")

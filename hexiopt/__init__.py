"""Plans LLM training on mixed-GPU clusters; the names of `hexiopt.api`, imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexiopt.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("_"):
        api = import_module("hexiopt.api")
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("hexiopt.api").__all__})

"""Plans LLM training on mixed-GPU clusters; the names of `hexiopt.api`, imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexiopt.api import (
        InputError,
        Plan,
        Problem,
        Space,
        Workload,
        check,
        cluster,
        load_plan,
        lower_bound,
        model,
        price,
        solve,
        solvers,
    )

__all__ = [
    "InputError",
    "Plan",
    "Problem",
    "Space",
    "Workload",
    "check",
    "cluster",
    "load_plan",
    "lower_bound",
    "model",
    "price",
    "solve",
    "solvers",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("hexiopt.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

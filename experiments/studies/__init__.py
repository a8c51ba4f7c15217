"""Studies: each answers one question by searches. `python -m experiments.studies NAME` measures and writes a page."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.studies.frame.study import Study

_MODULES = (
    "homogeneous",
    "layer_split",
    "rivals",
    "convergence",
    "irregular",
    "scaling",
    "ablation",
    "sequence.long_context",
    "sequence.layouts",
    "sequence.joint",
    "scheduling",
    "flashflex",
    "small_suite",
    "bounds",
    "gaps",
    "proofs",
    "replan",
    "split_and_depth",
    "mixtures",
    "unequal_cards",
)
NAMES = tuple(module.rpartition(".")[2] for module in _MODULES)


def study(name: str) -> "Study":
    """The study called `name`, one of `NAMES`."""
    found: Study = import_module(f"experiments.studies.{_MODULES[NAMES.index(name)]}").STUDY
    return found

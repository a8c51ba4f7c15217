"""Studies: each answers one question by searches. `python -m experiments.studies NAME` measures and writes a page."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.studies.frame.study import Study

NAMES = (
    "homogeneous",
    "layer_split",
    "rivals",
    "convergence",
    "irregular",
    "scaling",
    "ablation",
    "long_context",
    "layouts",
    "joint",
    "scheduling",
    "flashflex",
    "small_suite",
    "bounds",
    "gaps",
    "proofs",
    "replan",
)


def study(name: str) -> "Study":
    """The study called `name`, one of `NAMES`."""
    found: Study = import_module(f"experiments.studies.{name}").STUDY
    return found

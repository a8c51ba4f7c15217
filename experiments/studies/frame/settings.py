"""The settings of HexiScale's evaluation (arXiv 2409.01143, section 5), synthetic clusters, and planners."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.search import BOUND, SearchSpec
from experiments.studies.frame.study import Scale
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

GPUS_A_MACHINE = 8


@dataclass(frozen=True)
class Planner:
    """A solver of the registry with its options, and its name in tables."""

    label: str
    solver: str
    options: tuple[tuple[str, str | bool], ...] = ()

    def search(self, problem: Problem, limit_s: float, labels: Mapping[str, Any], seed: int = 0) -> SearchSpec:
        """Its search on `problem`, with its name among the labels."""
        return SearchSpec(problem, self.solver, limit_s, {**labels, "planner": self.label}, seed, dict(self.options))


OURS, LOWER_BOUND = Planner("ours", "portfolio"), Planner(BOUND, BOUND)
HOMOGENEOUS = (Planner("Megatron-LM", "megatron"), Planner("Galvatron", "galvatron"), Planner("FSDP", "fsdp"))
RIVALS = (
    Planner("Metis (ATC 24)", "metis_atc24"),
    Planner("AMP", "amp"),
    Planner("Espresso", "espresso"),
    Planner("FlashFlex as published", "flashflex"),
    Planner("FlashFlex as released", "flashflex", (("defects", "as_released"),)),
    Planner("Sailor", "sailor"),
    *HOMOGENEOUS,
)


@dataclass(frozen=True)
class Setting:
    """A mixed cluster, a model, and the homogeneous cluster of similar FLOPS, all by name."""

    number: str
    cluster: str
    partner: str
    model: str
    workload: Workload = field(default_factory=Workload)

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return f"{self.number.replace('_', ' ')} · {self.model}"

    @property
    def labels(self) -> dict[str, str | int]:
        """Columns of its rows."""
        own = {"setting": self.label, "number": self.number, "model": self.model}
        return {**own, "tokens": self.workload.tokens}

    def problem(self, scale: Scale, *, space: Space | None = None, schedule: str = "auto") -> Problem:
        """The problem on the mixed cluster."""
        workload = Workload(self.workload.global_batch, self.workload.seq_len, schedule=schedule)
        cluster = named_cluster(self.cluster, inter_gb_per_s=scale.inter_gb_per_s)
        return Problem(cluster, named_model(self.model), workload, space or Space())

    def partner_problem(self, scale: Scale) -> Problem:
        """The problem on the homogeneous cluster."""
        cluster = named_cluster(self.partner, inter_gb_per_s=scale.inter_gb_per_s)
        return Problem(cluster, named_model(self.model), self.workload)


_TWO, _FOUR = "homogeneous_2x8_a800_pcie", "homogeneous_4x8_a800_pcie"
SETTINGS = (
    Setting("1", "hexiscale_setting_1", _TWO, "llama2_7b"),
    Setting("1", "hexiscale_setting_1", _TWO, "llama2_13b"),
    Setting("2", "hexiscale_setting_2", _TWO, "llama2_7b"),
    Setting("2", "hexiscale_setting_2", _TWO, "llama2_13b"),
    Setting("3", "hexiscale_setting_3", _FOUR, "llama_30b"),
    Setting("3_readme", "hexiscale_setting_3_readme", _FOUR, "llama_30b"),
)
QUICK = (Setting("quick", "small_mixed", _TWO, "tiny", Workload(32, 512)),)


def settings(scale: Scale) -> Sequence[Setting]:
    """All settings; a tiny one if `scale.quick`."""
    return QUICK if scale.quick else SETTINGS


def first_models(scale: Scale) -> Sequence[Setting]:
    """Settings 1 to 3 with their first model; the tiny one if `scale.quick`."""
    return QUICK if scale.quick else (SETTINGS[0], SETTINGS[2], SETTINGS[4])


def synthetic(gpus: int, scale: Scale, model: str, workload: Workload, space: Space | None = None) -> Problem:
    """A synthetic cluster of `gpus` (`conf/cluster/synthetic.yaml`), with a tiny model if `scale.quick`."""
    given: dict[str, float] = {"num_machines": gpus // GPUS_A_MACHINE}
    if scale.inter_gb_per_s is not None:
        given["inter_bandwidth_gb_per_s"] = scale.inter_gb_per_s
    cluster = named_cluster("synthetic", **given)
    return Problem(cluster, named_model("tiny" if scale.quick else model), workload, space or Space())

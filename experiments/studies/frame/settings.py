"""The settings of HexiScale's evaluation (arXiv 2409.01143, section 5), and synthetic clusters."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.app.configurations import named_cluster, named_model
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

GPUS_A_MACHINE = 8


def quick() -> bool:
    """Whether studies run a tiny setting with a few steps a search, to show that they run: QUICK=1."""
    return os.environ.get("QUICK", "0") not in ("", "0")


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
        labels: dict[str, str | int] = {"setting": self.label, "number": self.number, "model": self.model}
        return {**labels, "tokens": self.workload.tokens}

    def problem(
        self, *, space: Space | None = None, schedule: str = "auto", inter_gb_per_s: float | None = None
    ) -> Problem:
        """The problem on the mixed cluster."""
        workload = Workload(self.workload.global_batch, self.workload.seq_len, schedule=schedule)
        cluster = named_cluster(self.cluster, inter_gb_per_s=inter_gb_per_s)
        return Problem(cluster, named_model(self.model), workload, space or Space())

    def partner_problem(self) -> Problem:
        """The problem on the homogeneous cluster."""
        return Problem(named_cluster(self.partner), named_model(self.model), self.workload)


_TWO, _FOUR = "homogeneous_2x8_a800_pcie", "homogeneous_4x8_a800_pcie"
SETTINGS = (
    Setting("1", "hexiscale_setting_1", _TWO, "llama2_7b"),
    Setting("1", "hexiscale_setting_1", _TWO, "llama2_13b"),
    Setting("2", "hexiscale_setting_2", _TWO, "llama2_7b"),
    Setting("2", "hexiscale_setting_2", _TWO, "llama2_13b"),
    Setting("3", "hexiscale_setting_3", _FOUR, "llama_30b"),
    Setting("3_readme", "hexiscale_setting_3_readme", _FOUR, "llama_30b"),
)
TINY = (Setting("quick", "small_mixed", _TWO, "tiny", Workload(32, 512)),)


def sizes() -> Sequence[int]:
    """The numbers of GPUs of synthetic clusters; a small one if quick."""
    return (16,) if quick() else (16, 64, 256, 1024, 10_240)


def settings() -> Sequence[Setting]:
    """All settings; a tiny one if quick."""
    return TINY if quick() else SETTINGS


def first_models() -> Sequence[Setting]:
    """Settings 1 to 3 with their first model; the tiny one if quick."""
    return TINY if quick() else (SETTINGS[0], SETTINGS[2], SETTINGS[4])


def synthetic(gpus: int, model: str, workload: Workload, space: Space | None = None) -> Problem:
    """A synthetic cluster of `gpus` (`conf/cluster/synthetic.yaml`), with a tiny model if quick."""
    cluster = named_cluster("synthetic", num_machines=gpus // GPUS_A_MACHINE)
    return Problem(cluster, named_model("tiny" if quick() else model), workload, space or Space())

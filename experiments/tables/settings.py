"""The settings of HexiScale's evaluation (arXiv 2409.01143, section 5), and tiny ones for a quick look."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.configurations import named_cluster, named_model
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload


@dataclass(frozen=True)
class Setting:
    """A mixed cluster, a model, and the homogeneous cluster of like FLOPS, all by name."""

    number: str
    cluster: str
    partner: str
    model: str
    workload: Workload = field(default_factory=Workload)

    @property
    def label(self) -> str:
        """Its name in tables and pictures."""
        return f"{self.number.replace('_', ' ')} · {self.model}"

    def problem(self, inter_gb_per_s: float | None, *, space: Space | None = None, schedule: str = "auto") -> Problem:
        """The problem on the mixed cluster; `inter_gb_per_s` replaces its bandwidth between machines."""
        workload = Workload(self.workload.global_batch, self.workload.seq_len, schedule=schedule)
        cluster = named_cluster(self.cluster, inter_gb_per_s=inter_gb_per_s)
        return Problem(cluster, named_model(self.model), workload, space or Space())

    def partner_problem(self, inter_gb_per_s: float | None) -> Problem:
        """The problem on the homogeneous cluster."""
        cluster = named_cluster(self.partner, inter_gb_per_s=inter_gb_per_s)
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
NUMBERS = tuple(dict.fromkeys(setting.number for setting in SETTINGS))


def one_model_each(settings: Sequence[Setting]) -> list[Setting]:
    """The first model of every setting, of setting 3 the variant of the slides alone where both are asked for."""
    first = {setting.number: setting for setting in reversed(settings)}
    if "3" in first:
        first.pop("3_readme", None)
    return [setting for setting in settings if setting in first.values()]

"""The settings of HexiSeq's evaluation (arXiv 2605.07569), tiny ones for a quick look, and who is compared.

Global batch 8 is the paper's; its models are of GPT style (`conf/model/gpt_*.yaml`), its simulated clusters known by
their sizes alone (`conf/cluster/hexiseq_sim_*.yaml` say what was chosen).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.configurations import named_cluster, named_model
from experiments.tables.long_context.speeds import equally_efficient
from experiments.tables.names import Planner
from experiments.tables.options import Options
from experiments.tables.task import BOUND, Task
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

GLOBAL_BATCH = 8
HEXISEQ = Planner("hexiseq", "ours")
BASELINES = (Planner("ring", "Ring Attention"), Planner("ulysses", "Ulysses"), Planner("usp", "USP"))
LAYOUTS = Space(sequence=True)
_KI = 1024


@dataclass(frozen=True)
class Setting:
    """A cluster and a model, by name, and the length of a sequence in tokens; `by_peak` has speeds of GPUs in
    proportion to their peaks in place of the calibrated ones (`speeds.py`)."""

    cluster: str
    model: str
    seq_len: int
    global_batch: int = GLOBAL_BATCH
    by_peak: bool = False

    @property
    def label(self) -> str:
        """Its name in tables and pictures."""
        return f"{self.place} · {self.context}"

    @property
    def place(self) -> str:
        """Cluster and model."""
        return f"{self.cluster.removeprefix('hexiseq_')} · {self.model}"

    @property
    def context(self) -> str:
        """The length of a sequence."""
        return f"{self.seq_len // _KI:,}K" if self.seq_len % _KI == 0 else f"{self.seq_len:,}"

    @property
    def speeds(self) -> str:
        """What speeds GPUs have."""
        return "by peak" if self.by_peak else "calibrated"

    def problem(self, options: Options, *, cluster: str | None = None, space: Space = LAYOUTS) -> Problem:
        """The problem, on `cluster` instead where one is named."""
        found = named_cluster(cluster or self.cluster, inter_gb_per_s=options.inter_gb_per_s)
        workload = Workload(self.global_batch, self.seq_len)
        if self.by_peak:
            found = equally_efficient(found, workload.precision)
        return Problem(found, named_model(self.model), workload, space)

    def task(self, planner: Planner, options: Options, *, cluster: str | None = None) -> Task:
        """The search of a planner, ours or a baseline, on `cluster` instead where one is named."""
        budgets = options.budgets
        limit_s = budgets.sequence_s if planner == HEXISEQ else budgets.sequence_baseline_s
        return planner.task(self.problem(options, cluster=cluster), limit_s)

    def bound(self, options: Options) -> Task:
        """The search for a lower bound of all plans."""
        return Task(self.problem(options), BOUND, options.budgets.bound_s)


def _settings(clusters: Sequence[str], models: Sequence[str], contexts: Sequence[int]) -> tuple[Setting, ...]:
    return tuple(Setting(c, m, k * _KI) for c in clusters for m in models for k in contexts)


QUICK = (Setting("small_mixed", "tiny", 4 * _KI, 4),)
TESTBED = _settings(["hexiseq_testbed"], ["gpt_3b", "gpt_7b", "gpt_13b"], [16, 32, 64, 128, 256])
SIMULATIONS = _settings(
    ["hexiseq_sim_1", "hexiseq_sim_2", "hexiseq_sim_3"], ["gpt_13b", "gpt_70b"], [128, 256, 512, 1024]
)
PARTNERS = {
    "hexiseq_sim_4": "homogeneous_152_a100",
    "hexiseq_sim_5": "homogeneous_168_a100",
    "small_mixed": "homogeneous_2x8_a800_pcie",
}
PAIRS = _settings(["hexiseq_sim_4", "hexiseq_sim_5"], ["gpt_13b"], [128, 256, 512, 1024])
ABLATION = (
    Setting("hexiseq_testbed", "gpt_7b", 128 * _KI),
    *_settings(["hexiseq_sim_1", "hexiseq_sim_2", "hexiseq_sim_3"], ["gpt_13b"], [256]),
)
JOINT = (
    *_settings(["hexiseq_testbed", "hexiseq_sim_1", "hexiseq_sim_2"], ["gpt_13b"], [128]),
    *_settings(["hexiscale_setting_1", "hexiscale_setting_2", "hexiscale_setting_3"], ["gpt_7b"], [128]),
    *_settings(["four_machines"], ["gpt_3b"], [128]),
)


def at_peak(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The same settings with speeds in proportion to peaks."""
    return tuple(replace(setting, by_peak=True) for setting in settings)


def limits(options: Options) -> str:
    """The time limits of `Setting.task`, in words."""
    budgets = options.budgets
    return f"{budgets.sequence_s:g} s a search of ours, {budgets.sequence_baseline_s:g} s of a baseline"


def asked(settings: tuple[Setting, ...], options: Options) -> tuple[Setting, ...]:
    """The settings of a table; a tiny one for a quick look."""
    return QUICK if options.quick else settings

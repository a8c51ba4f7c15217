"""The settings of HexiSeq's evaluation (arXiv 2605.07569): clusters, models, lengths and planners.

The global batch of 8 is the paper's. Its models are GPT-style (`conf/model/gpt_*.yaml`). It states only the sizes of
its simulated clusters; `conf/cluster/hexiseq_sim_*.yaml` state what was chosen beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.planners import Planner
from experiments.studies.frame.settings import quick
from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

GLOBAL_BATCH = 8
LAYOUTS = Space(sequence=True)
HEXISEQ = Planner("ours", "hexiseq")
BASELINES = (Planner("Ring Attention", "ring"), Planner("Ulysses", "ulysses"), Planner("USP", "usp"))
OURS_S, BASELINE_S, BOUND_S = 5.0, 30.0, 40.0  # time limits; the baselines need theirs to finish
IF_BY_PEAK = "Were all types of GPU as efficient as an A100, so that an H100 had three times its speed"
_KI = 1024
_EXAMPLE = "a100_80gb_sxm"


@dataclass(frozen=True)
class LongSetting:
    """A cluster and a model, by name, and the length of a sequence in tokens.

    `by_peak` gives every GPU type the efficiency of an A100 instead of its calibrated efficiency. The paper compares
    clusters of similar peak FLOPS, which counts an H100 as three A100; by published runs it is worth less
    (`hexiopt/numbers`). Tables with both show what depends on that.
    """

    cluster: str
    model: str
    seq_len: int
    global_batch: int = GLOBAL_BATCH
    by_peak: bool = False

    @property
    def place(self) -> str:
        """Cluster and model, in words."""
        return f"{self.cluster.removeprefix('hexiseq_')} · {self.model}"

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return f"{self.place} · {context(self.seq_len)}"

    @property
    def labels(self) -> dict[str, str | int]:
        """Columns of its rows."""
        speeds = "by peak" if self.by_peak else "calibrated"
        return {"setting": self.label, "place": self.place, "seq_len": self.seq_len, "speeds": speeds}

    def problem(self, *, cluster: str | None = None, space: Space = LAYOUTS) -> Problem:
        """The problem, on the cluster named `cluster` if one is given."""
        machines = named_cluster(cluster or self.cluster)
        workload = Workload(self.global_batch, self.seq_len)
        if self.by_peak:
            machines = equally_efficient(machines, workload.precision)
        return Problem(machines, named_model(self.model), workload, space)


def context(seq_len: int) -> str:
    """The length of a sequence, in words."""
    return f"{seq_len // _KI:,}K" if seq_len % _KI == 0 else f"{seq_len:,}"


def equally_efficient(cluster: Cluster, precision: str) -> Cluster:
    """The cluster with an A100's efficiency and GEMM fill time for all GPU types."""
    example = catalogue()[_EXAMPLE]
    peak = example.peak_flops(precision)
    assert peak is not None
    machines = []
    for machine in cluster.machines:
        half_flops = example.efficiency.gemm_half_flops * (machine.gpu.peak_flops(precision) or peak) / peak
        efficiency = replace(example.efficiency, gemm_half_flops=half_flops)
        machines.append(replace(machine, gpu=replace(machine.gpu, efficiency=efficiency)))
    return replace(cluster, machines=tuple(machines))


def _settings(clusters: Sequence[str], models: Sequence[str], contexts: Sequence[int]) -> tuple[LongSetting, ...]:
    return tuple(LongSetting(c, m, k * _KI) for c in clusters for m in models for k in contexts)


def chosen(settings: Sequence[LongSetting]) -> Sequence[LongSetting]:
    """The settings; a tiny one if quick."""
    return TINY if quick() else settings


_SIMULATED = ["hexiseq_sim_1", "hexiseq_sim_2", "hexiseq_sim_3"]
TINY = (LongSetting("small_mixed", "tiny", 4 * _KI, 4),)
TESTBED = _settings(["hexiseq_testbed"], ["gpt_3b", "gpt_7b", "gpt_13b"], [16, 32, 64, 128, 256])
SIMULATIONS = _settings(_SIMULATED, ["gpt_13b", "gpt_70b"], [128, 256, 512, 1024])
PAIRS = _settings(["hexiseq_sim_4", "hexiseq_sim_5"], ["gpt_13b"], [128, 256, 512, 1024])
PARTNERS = {
    "hexiseq_sim_4": "homogeneous_152_a100",
    "hexiseq_sim_5": "homogeneous_168_a100",
    "small_mixed": "homogeneous_2x8_a800_pcie",
}
ABLATION = (LongSetting("hexiseq_testbed", "gpt_7b", 128 * _KI), *_settings(_SIMULATED, ["gpt_13b"], [256]))
JOINT = (
    *_settings(["hexiseq_testbed", "hexiseq_sim_1", "hexiseq_sim_2"], ["gpt_13b"], [128]),
    *_settings(["hexiscale_setting_1", "hexiscale_setting_2", "hexiscale_setting_3"], ["gpt_7b"], [128]),
    *_settings(["four_machines"], ["gpt_3b"], [128]),
)

_UNEVEN = ("tokens", "heads", "groups")


@dataclass(frozen=True)
class Freedoms:
    """What may be uneven, and the order of tokens; None leaves the order to the search."""

    uneven: tuple[str, ...] = _UNEVEN
    order: str | None = None

    @property
    def options(self) -> dict[str, str | bool]:
        """Options of the solver."""
        off: dict[str, str | bool] = {f"uneven_{what}": False for what in _UNEVEN if what not in self.uneven}
        return off | ({"order": self.order} if self.order else {})

    def holds(self, other: "Freedoms") -> bool:
        """Whether every layout that `other` allows is allowed here too."""
        return set(other.uneven) <= set(self.uneven) and self.order in (None, other.order)


EVEN, ALL = "nothing uneven", "all of them uneven"
VARIANTS = {
    EVEN: Freedoms(()),
    **{f"uneven {what} only": Freedoms((what,)) for what in _UNEVEN},
    ALL: Freedoms(),
    **{f"all uneven, {order}": Freedoms(order=order) for order in ("contiguous", "zigzag")},
}
INSIDE = {name: [other for other in VARIANTS if layout.holds(VARIANTS[other])] for name, layout in VARIANTS.items()}

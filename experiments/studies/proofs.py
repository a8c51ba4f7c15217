"""How large a mixed problem can be proved, and at what cost?

Random problems: 20 of 4 to 8 GPUs, 10 of 9 to 12, and 10 of 16 GPUs on four machines, each with a model of 20 to 32
layers that fits in memory, on networks of 5 to 200 Gbit/s. `exact` searches each until its plan is proved to be within
1 % of the best. A last problem is HexiScale's case study: eight GPUs of three types, on which the paper reports 25.55 s
a step, and 41.52 s for Megatron.

python -m experiments.studies proofs               # at most 90 minutes on two cores; --quick: seconds
python -m experiments.studies proofs --only "GPUs=9 to 12"
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.frame.figures import framed, line
from experiments.studies.frame.search import SearchSpec
from experiments.studies.frame.study import Report, Scale, Study
from experiments.studies.frame.words import seconds, share
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B

_LIMIT_S = 60.0
_PROVED = 0.01  # gap
_QUICK = 2  # problems
_GPUS = (
    *("h100_80gb_sxm", "h100_80gb_pcie", "a100_80gb_sxm", "a100_80gb_pcie", "a100_40gb_pcie"),
    *("l40s", "rtx_a6000", "rtx_4090", "rtx_3090", "rtx_3080_ti"),
)
_MODELS = ("llama2_7b", "mistral_7b", "gpt_3b", "llama3_8b", "gpt2_345m", "opt_350m")
_SIZES = (1, 2, 2, 3, 4, 4)  # GPUs of a machine, drawn from these
_GBIT_PER_S = (5, 10, 25, 100, 200)
_STATE_BYTES = 16  # per parameter: weights, gradients and optimiser states, unsharded
_FULL = 0.9  # most of all memory that they fill
_SPACE = Space(replicas=False)
_SCHEDULE, _ZERO = ONE_F_ONE_B.name, "1"
_CASE = "case study"
_CASE_WORKLOAD = Workload(64, 4096, schedule=_SCHEDULE, optimizer_sharding=_ZERO)
_NOTES = (
    "gap: upper bound on the distance of the plan to the optimum. nodes: usages, cases, partitions and plans examined, "
    "and the portfolio's steps. CPU time: of all processes of a search, with the portfolio's first plan. The time "
    "limit of a search is one of CPU time, for each of its two processes; compilation by numba, once, is not counted. "
    f"The proofs cover the whole plan space of these problems: 1F1B, ZeRO-1 and no replicated stages "
    f"(workload.schedule={_SCHEDULE}, workload.optimizer_sharding={_ZERO}, space.replicas=false)."
)


@dataclass(frozen=True)
class ProblemSizes:
    """Random problems of `least` to `most` GPUs on `machines` of which each is drawn; `count` of them."""

    least: int
    most: int
    count: int
    machines: tuple[int, int] = (2, 4)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.least} to {self.most}" if self.least < self.most else f"{self.least}"

    def sizes(self, rng: random.Random) -> list[int]:
        """GPUs of each machine."""
        while True:
            found = [rng.choice(_SIZES) for _ in range(rng.randint(*self.machines))]
            if self.least <= sum(found) <= self.most:
                return found


GROUPS = (ProblemSizes(4, 8, 20), ProblemSizes(9, 12, 10), ProblemSizes(16, 16, 10, (4, 4)))


def random_problem(group: ProblemSizes, seed: int) -> Problem:
    """A problem with one to four types of GPU."""
    rng, known = random.Random(seed), catalogue()
    sizes, rate = group.sizes(rng), rng.choice(_GBIT_PER_S) / 8 * 1e9
    types = rng.sample(_GPUS, min(len(sizes), rng.randint(2, 4)))
    machines = []
    for k, size in enumerate(sizes):
        gpu = known[types[k] if k < len(types) else rng.choice(types)]
        inside = intra_bandwidth_gb_per_s(gpu) * 1e9 if size > 1 else float("inf")
        machines.append(Machine(f"m{k}", f"m{k}", gpu, size, inside, 3e-6, (), 1, rate, 2e-5))
    cluster = Cluster(f"random_{group.least}_{seed}", tuple(machines), rate, 2e-5)
    memory_bytes = sum(machine.num_gpus * machine.gpu.usable_memory_bytes for machine in machines)
    layers = rng.randint(20, 32)
    models = (replace(named_model(name), num_layers=layers) for name in rng.sample(_MODELS, len(_MODELS)))
    model = next(own for own in models if own.num_params * _STATE_BYTES < _FULL * memory_bytes)
    seq_len = min(rng.choice((1024, 2048, 4096)), model.max_positions or 4096)
    batch = rng.choice((32, 48, 64, 96, 128))
    return Problem(cluster, model, Workload(batch, seq_len, schedule=_SCHEDULE, optimizer_sharding=_ZERO), _SPACE)


def case_study() -> Problem:
    """HexiScale's; batch and length are assumed, as the paper does not state them."""
    return Problem(named_cluster("hexiscale_case_study"), named_model("llama2_13b"), _CASE_WORKLOAD, _SPACE)


def searches(scale: Scale) -> list[SearchSpec]:
    """One proof of each problem."""
    return [
        SearchSpec(
            problem,
            "exact",
            scale.limit_s(_LIMIT_S),
            {"group": group, "problem": name, **_labels(problem)},
            options={"gap": _PROVED},
            cpu_time=True,
        )
        for group, name, problem in _problems(scale)
    ]


def _problems(scale: Scale) -> Iterator[tuple[str, str, Problem]]:
    for group in GROUPS[:1] if scale.quick else GROUPS:
        for seed in range(_QUICK if scale.quick else group.count):
            yield group.label, f"{group.least}.{seed}", random_problem(group, seed)
    if not scale.quick:
        yield _CASE, _CASE, case_study()


def _labels(problem: Problem) -> dict[str, str]:
    machines = problem.cluster.machines
    sizes = {gpu.name: "+".join(str(m.num_gpus) for m in machines if m.gpu == gpu) for gpu in problem.cluster.types}
    return {
        "GPUs": f"{problem.cluster.num_devices}: {', '.join(f'{size} {gpu}' for gpu, size in sizes.items())}",
        "model (layers)": f"{problem.model.name} ({problem.model.num_layers})",
        "Gbit/s": f"{problem.cluster.inter_bandwidth_bytes_per_s * 8 / 1e9:g}",
        "batch": f"{problem.workload.global_batch}",
    }


def report(rows: pd.DataFrame, scale: Scale) -> list[Report]:
    """Plans, bounds, gaps and costs of every problem, and a summary."""
    rows = rows.assign(gap=1 - rows["bound_s"] / rows["step_time_s"])
    cells = rows[["problem", "GPUs", "model (layers)", "Gbit/s", "batch"]].set_index("problem")
    for name, texts in {
        "plan": rows["step_time_s"].map(seconds),
        "bound": rows["bound_s"].map(seconds),
        "gap": rows["gap"].map(lambda value: "" if pd.isna(value) else f"{value:.2%}"),
        "CPU time": rows["cpu_s"].map(seconds),
        "nodes": rows["steps"].map(lambda value: "" if pd.isna(value) else f"{value:,.0f}"),
    }.items():
        cells[name] = texts.to_numpy()
    return [Report({"Summary": _summary(rows), "Problems": cells}, claims(rows), draw(rows), _NOTES)]


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    found = {}
    for group, own in rows.groupby("group", sort=False):
        proved = own[own["gap"] <= _PROVED + 1e-9]
        found[group] = {
            "problems": f"{len(own)}",
            "proved to 1 %": f"{len(proved)}",
            "CPU time: median": seconds(own["cpu_s"].median()),
            "CPU time: most of a proof": seconds(proved["cpu_s"].max()),
            "gap: worst": share(own["gap"].max()),
        }
    return pd.DataFrame(found).T.rename_axis("GPUs")


def claims(rows: pd.DataFrame) -> list[str]:
    """How many are proved, and what the case study's plan is."""
    said = []
    for group, own in rows[rows["group"] != _CASE].groupby("group", sort=False):
        proved = (own["gap"] <= _PROVED + 1e-9).sum()
        said.append(f"{group} GPUs: {proved} of {len(own)} plans are proved to be within 1 % of the best.")
    for _, own in rows[(rows["group"] == _CASE) & rows["gap"].notna()].iterrows():
        said.append(
            f"HexiScale's case study: a step of {seconds(own['step_time_s'])}, and no plan takes less than "
            f"{seconds(own['bound_s'])} (gap {own['gap']:.2%}), proved in {seconds(own['cpu_s'])} of CPU time. Batch "
            f"({_CASE_WORKLOAD.global_batch}) and length ({_CASE_WORKLOAD.seq_len:,}) are assumed, so that the seconds "
            "cannot be compared with the paper's 25.55 s, and 41.52 s for Megatron."
        )
    return said


def draw(rows: pd.DataFrame) -> Figure:
    """CPU time and gap of each problem."""
    figure, (ax,) = framed(
        "What a proof costs",
        f"Gap to the proven bound and CPU time of every problem; dashed: {_PROVED:.0%}, where a search ends",
        width=9.5,
    )
    for k, (group, own) in enumerate(rows.groupby("group", sort=False)):
        label = group if group == _CASE else f"{group} GPUs"
        ax.plot(own["cpu_s"], 100 * own["gap"], **{**line(k), "linestyle": "none"}, label=label)
    ax.axhline(100 * _PROVED, color="#8A8F98", linestyle="--", linewidth=1)
    if rows["gap"].notna().any():
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("CPU time (s)")
    ax.set_ylabel("gap (%)")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=9)
    return figure


STUDY = Study("proofs", "How large a problem can be proved", __doc__, searches, report)
